"""Use cases of functions."""
