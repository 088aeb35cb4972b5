"""A handler whose file talks while it is imported."""

import sys

print("reading weights")
print("slowly", file=sys.stderr)


def greet() -> str:
    print("hello")
    return "done"
