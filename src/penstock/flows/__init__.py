"""Sagas, one Temporal workflow each, and the loops that wake them: the only code that crosses domains."""
