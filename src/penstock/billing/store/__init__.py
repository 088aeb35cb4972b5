"""All SQL of billing."""
