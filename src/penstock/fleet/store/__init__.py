"""All SQL of the fleet, by what it is about. Private to the domain."""
