"""What a parser's input costs: time and memory must grow with the size of the input, not faster."""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

#: Each is four times the one before: linear work takes four times as long, quadratic work sixteen times.
SIZES = (4 << 10, 16 << 10, 64 << 10)
_GROWTH_MAX = 9.0
#: Below it a clock tells little; quadratic work on the largest size is far above it.
_FLOOR_S = 0.005
_RUNS = 5
_MEMORY_SLACK = 512 << 10


def assert_linear(
    parse: Callable[[Any], object],
    make: Callable[[int], Any],
    *,
    refusals: tuple[type[Exception], ...] = (),
    sizes: Sequence[int] = SIZES,
    bytes_per_byte_max: int | None = 64,
) -> None:
    """`parse(make(size))` for growing sizes costs time in proportion, and memory of at most so many bytes for each of
    the input's. `refusals` is what the parser may raise; anything else fails the test."""
    before = _seconds(parse, make(sizes[0]), refusals, enough=_FLOOR_S)
    for size in sizes[1:]:
        limit = max(before, _FLOOR_S) * _GROWTH_MAX
        seconds = _seconds(parse, make(size), refusals, enough=limit)
        assert seconds <= limit, (
            f"{size} bytes cost {seconds:.3f} s, a quarter of them {before:.3f} s: {make(16)!r:.200}"
        )
        before = seconds
    if bytes_per_byte_max is None:
        return
    peak = _peak(parse, make(sizes[-1]), refusals)
    assert peak <= sizes[-1] * bytes_per_byte_max + _MEMORY_SLACK, (
        f"{sizes[-1]} bytes cost {peak} bytes: {make(16)!r:.200}"
    )


def _seconds(
    parse: Callable[[Any], object], given: Any, refusals: tuple[type[Exception], ...], *, enough: float
) -> float:
    """CPU time of this thread: others on the machine do not count. Tried again while it is more than enough."""
    best = float("inf")
    for _ in range(_RUNS):
        began = time.thread_time()
        with suppress(*refusals):
            parse(given)
        best = min(best, time.thread_time() - began)
        if best <= enough:
            break
    return best


def _peak(parse: Callable[[Any], object], given: Any, refusals: tuple[type[Exception], ...]) -> int:
    tracemalloc.start()
    try:
        with suppress(*refusals):
            parse(given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
