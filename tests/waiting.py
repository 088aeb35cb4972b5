"""Patience: how long a test waits for what must happen says nothing of how fast it is on a busy machine."""

import asyncio
import time
from collections.abc import AsyncIterator

PATIENCE_S = 60.0


async def attempts(pause_s: float = 0.02) -> AsyncIterator[None]:
    """Time to look again, and again, until there was enough of it."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        yield
        await asyncio.sleep(pause_s)
