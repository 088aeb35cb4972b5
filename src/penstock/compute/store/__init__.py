"""All SQL of compute; private to it. Takes a transaction or a reader and returns values of the model."""
