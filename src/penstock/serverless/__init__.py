"""Functions: definitions, invocations, the workers that run them."""
