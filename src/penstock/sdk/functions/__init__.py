"""What tenant code imports: apps, functions, classes, and what a handler may ask about its invocation.

It stands on the standard library alone and runs on Python 3.10, because it is copied into units where nothing else of
ours is.
"""
