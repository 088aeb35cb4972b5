"""All SQL of notices."""
