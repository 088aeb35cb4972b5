"""Parsing of outside input: more than a little of it leaves the event loop."""

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

#: What the loop parses itself: well under a millisecond.
LOOP_BYTES_MAX: Final = 64 << 10
P = ParamSpec("P")
T = TypeVar("T")


async def parse(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function` of the arguments, in a thread when `size` is large. The function must be pure."""
    if size <= LOOP_BYTES_MAX:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
