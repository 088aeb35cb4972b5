"""Work that comes together is done together: while one batch is under way, the next one gathers.

Nothing waits for a timer. A single item is done at once, with those that came in the same turn of the event loop; under
load batches grow by themselves.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Gatherer(Generic[T, R]):
    """Calls `work` with whatever has come, at most `at_once` calls at a time; an answer for each item, in order. An
    answer that is an exception is raised to its own caller alone."""

    def __init__(
        self,
        work: Callable[[Sequence[T]], Awaitable[Sequence[R | BaseException]]],
        *,
        batch_max: int,
        at_once: int = 1,
    ) -> None:
        self._work = work
        self._batch_max = batch_max
        self._room = at_once
        self._beginning = False
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def do(self, item: T) -> R:
        """The answer to this item."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        self._begin()
        return await answer

    def _begin(self) -> None:
        if self._waiting and self._room and not self._beginning:
            self._beginning = True
            self._room -= 1
            task = asyncio.get_running_loop().create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(self._batch_max, len(self._waiting)))]
        self._beginning = False
        self._begin()
        try:
            answers = await self._work([item for item, _ in batch])
        except BaseException as error:  # noqa: BLE001 (it is every caller's)
            answers = [error] * len(batch)
        finally:
            self._room += 1
            self._begin()
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
