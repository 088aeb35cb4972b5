"""Use cases of identity, by what they are about. Each takes the caller's transaction and writes its audit row in it."""
