"""Telling people elsewhere: webhooks that carry events out."""
