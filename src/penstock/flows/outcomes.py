"""Waiting for node tasks: one subscription for all of them. Hints may be lost, so waiters also look at the row."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.kit.bus import Bus
from penstock.wire import subjects


class Outcomes:
    """Tells waiters that their task has a result."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Event]] = {}

    async def watch(self, bus: Bus) -> None:
        """Listen to hints about finished tasks."""
        await bus.on_hint(subjects.ALL_TASKS_DONE, self._arrived)

    async def _arrived(self, subject: str, _: bytes) -> None:
        for event in self._waiting.get(subjects.last_token(subject), ()):
            event.set()

    @contextmanager
    def waiting(self, task_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when a hint about this task arrives. Each of several waiters has its own."""
        event = asyncio.Event()
        waiters = self._waiting.setdefault(task_id, [])
        waiters.append(event)
        try:
            yield event
        finally:
            waiters.remove(event)
            if not waiters:
                del self._waiting[task_id]
