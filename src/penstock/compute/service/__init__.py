"""Use cases of compute, by what people and sagas do. Each takes the caller's transaction and never commits."""
