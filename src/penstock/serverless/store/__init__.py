"""All SQL of functions; private to the domain."""
