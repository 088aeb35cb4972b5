"""Loops end when they are cancelled, also where what they wait for swallows the cancellation."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from penstock.kit.process import every, guarded


async def deaf() -> None:
    """What a client does that loses a cancellation."""
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return


async def pieces() -> None:
    """A loop of one's own, whose work is guarded."""
    while True:
        await guarded(deaf(), name="test")


@pytest.mark.parametrize("loop", [lambda: every(60, deaf, name="test"), pieces])
async def test_a_swallowed_cancellation_ends_the_loop(loop: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.ensure_future(loop())
    await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(30):
        await asyncio.wait({task})
    assert task.cancelled()
