"""Those who wait here for invocations: by a long poll, or on a stream of what they say.

Hints wake them; they look at the rows, and now and then without a hint. Places are bounded, in a project and in all.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import Unauthenticated
from penstock.serverless.errors import TooManyWaiters
from penstock.serverless.service import invocations
from penstock.serverless.service.invocations import Shown
from penstock.serverless.store import reads
from penstock.serverless.store.reads import Lines
from penstock.wire import rest, subjects
from penstock.wire.rest import OutputLine

WAIT_S_MAX: Final = 60.0
WAITERS_MAX: Final = 2000
WAITERS_PER_PROJECT_MAX: Final = 200
BATCH: Final = 200
_LOOK_S: Final = 1.0
_SETTLE_S: Final = 0.1
_KEEP_ALIVE_S: Final = 15.0
_encode = msgspec.json.Encoder().encode


class Followers:
    """The waiting of one process's callers."""

    def __init__(
        self, db: Database, still_valid: Callable[[Caller], Awaitable[bool]], show: Callable[[Shown], rest.Invocation]
    ) -> None:
        self._db = db
        self._still_valid = still_valid
        self._show = show
        self._wakes: dict[str, set[asyncio.Event]] = {}
        self._places: dict[str, int] = {}
        self._closing = False

    async def watch(self, bus: Bus) -> None:
        """Let hints wake those who wait."""
        await bus.on_hint(subjects.ALL_INVOCATIONS, self._hinted)

    async def _hinted(self, subject: str, _: bytes) -> None:
        for wake in self._wakes.get(subjects.last_token(subject), ()):
            wake.set()

    def close(self) -> None:
        """End all waiting: clients come back to another process."""
        self._closing = True
        for wakes in self._wakes.values():
            for wake in wakes:
                wake.set()

    def admit(self, caller: Caller) -> None:
        """Pass if there is a place for one more."""
        mine, all_ = self._places.get(caller.project_id, 0), sum(self._places.values())
        if mine >= WAITERS_PER_PROJECT_MAX or all_ >= WAITERS_MAX:
            raise TooManyWaiters(f"max {WAITERS_PER_PROJECT_MAX} callers of a project wait here", retry_after_s=2)

    @contextmanager
    def _place(self, caller: Caller, invocation_id: str) -> Iterator[asyncio.Event]:
        wake = asyncio.Event()
        mine = self._wakes.setdefault(invocation_id, set())
        mine.add(wake)
        self._places[caller.project_id] = self._places.get(caller.project_id, 0) + 1
        try:
            yield wake
        finally:
            mine.discard(wake)
            if not mine and self._wakes.get(invocation_id) is mine:
                del self._wakes[invocation_id]
            self._places[caller.project_id] -= 1
            if not self._places[caller.project_id]:
                del self._places[caller.project_id]

    async def wait(self, caller: Caller, invocation_id: str, wait_s: float) -> Shown:
        """The invocation when it has ended, or as it is when the time is over."""
        found = await self._get(caller, invocation_id)
        if found.row.ended or wait_s <= 0:
            return found
        self.admit(caller)
        deadline = time.monotonic() + min(wait_s, WAIT_S_MAX)
        with self._place(caller, invocation_id) as wake:
            while True:
                found = await self._get(caller, invocation_id)
                left_s = deadline - time.monotonic()
                if found.row.ended or self._closing or left_s <= 0:
                    return found
                await _wait(wake, min(left_s, _LOOK_S))
                if not await self._still_valid(caller):
                    raise Unauthenticated("the credential was revoked while its caller waited")

    async def _get(self, caller: Caller, invocation_id: str) -> Shown:
        async with self._db.read() as conn:
            return await invocations.get(conn, caller, invocation_id)

    async def follow(self, caller: Caller, invocation_id: str, after: tuple[int, int]) -> AsyncIterator[bytes]:
        """What the invocation says, as server-sent events, and its end as the last one. `id` is attempt and number."""
        with self._place(caller, invocation_id) as wake:
            yield b": connected\n\n"
            spoken, settled = time.monotonic(), False
            while await self._goes_on(caller):
                found = await self._get(caller, invocation_id)
                lines = await self._outputs(caller, invocation_id, after)
                if lines:
                    after = (lines[-1].attempt, lines[-1].seq)
                    yield b"".join(_event("output", f"{line.attempt}.{line.seq}", _encode(line)) for line in lines)
                    spoken, settled = time.monotonic(), False
                elif time.monotonic() - spoken >= _KEEP_ALIVE_S:
                    yield b": keep-alive\n\n"
                    spoken = time.monotonic()
                if len(lines) == BATCH:
                    continue
                if found.row.ended and settled:
                    yield _event("end", "end", _encode(self._show(found)))
                    return
                # Last words and the end come by different ways: the end is told when no more was said for a moment.
                settled = found.row.ended
                await _wait(wake, _SETTLE_S if settled else _LOOK_S)

    async def _outputs(self, caller: Caller, invocation_id: str, after: tuple[int, int]) -> list[OutputLine]:
        async with self._db.read() as conn:
            return await reads.outputs(conn, caller.project_id, invocation_id, after=after, limit=BATCH)

    async def follow_logs(self, caller: Caller, function_id: str, after: int) -> AsyncIterator[bytes]:
        """What all invocations of a function say, for ever; `id` is the place."""
        with self._place(caller, function_id):
            yield b": connected\n\n"
            spoken = time.monotonic()
            while await self._goes_on(caller):
                async with self._db.read() as conn:
                    lines = await reads.logs(conn, function_id, Lines(), beyond=after, limit=BATCH)
                if lines:
                    after = lines[-1].place
                    yield b"".join(_event("output", str(line.place), _encode(line)) for line in lines)
                    spoken = time.monotonic()
                elif time.monotonic() - spoken >= _KEEP_ALIVE_S:
                    yield b": keep-alive\n\n"
                    spoken = time.monotonic()
                if len(lines) < BATCH:
                    await asyncio.sleep(_LOOK_S)

    async def _goes_on(self, caller: Caller) -> bool:
        return not self._closing and await self._still_valid(caller)


async def _wait(wake: asyncio.Event, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await wake.wait()
    wake.clear()


def _event(name: str, place: str, data: bytes) -> bytes:
    """One server-sent event. JSON has no line ends, so the data is one line."""
    return f"id: {place}\nevent: {name}\ndata: ".encode() + data + b"\n\n"
