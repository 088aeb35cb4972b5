"""Payment providers behind one port. All of them speak Stripe's events, signed in Stripe's way."""
