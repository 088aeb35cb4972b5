"""Waiting for node tasks: one subscription for all of them. Hints may be lost, so waiters also look at the row."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.kit.bus import Bus
from penstock.wire import subjects


class Outcomes:
    """Tells waiters that their task has a result."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}

    async def watch(self, bus: Bus) -> None:
        """Listen to hints about finished tasks."""
        await bus.on_hint(subjects.ALL_TASKS_DONE, self._arrived)

    async def _arrived(self, subject: str, _: bytes) -> None:
        if event := self._waiting.get(subjects.last_token(subject)):
            event.set()

    @contextmanager
    def waiting(self, task_id: str) -> Iterator[asyncio.Event]:
        """An event that is set when a hint about this task arrives. Several waiters may share one."""
        event = self._waiting.setdefault(task_id, asyncio.Event())
        try:
            yield event
        finally:
            self._waiting.pop(task_id, None)
