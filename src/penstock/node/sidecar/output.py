"""What one attempt's handler says before its end, sent in batches, in order, and no more than is fair.

Lines and progress beyond the pace or the total are dropped, and one line says so. Chunks are the function's own answer:
beyond the pace they wait, which makes the handler wait.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from prometheus_client import Counter

from penstock.kit.clock import utc_now
from penstock.node.sidecar.answers import check_json
from penstock.wire.serverless import (
    INLINE_BYTES_MAX,
    VERSION,
    WORKER_MESSAGE_BYTES_MAX,
    Frame,
    Output,
    OutputKind,
    OutputMessage,
    WorkerDispatchMessage,
)

_encode: Final = msgspec.json.Encoder().encode
_cut = Counter("penstock_sidecar_output_cut_total", "Attempts whose output was cut.")
_ITEMS_MAX: Final = 1000
#: The batch in hand and one more piece of so many bytes fit into a message, with every character escaped.
_SMALL_BYTES_MAX: Final = 128 << 10
#: What goes with a single piece.
_ENVELOPE_BYTES: Final = 16 << 10
_CUT: Final = "[output was cut: it is too much]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How much one attempt may say."""

    bytes_per_s: int = 1 << 20
    burst_bytes: int = 4 << 20
    bytes_max: int = 16 << 20
    batch_bytes: int = 64 << 10
    every_s: float = 0.02


class Voice:
    """Collects for one attempt. `publish` takes the encoded batches."""

    def __init__(
        self, dispatch: WorkerDispatchMessage, publish: Callable[[bytes], Awaitable[None]], pace: Pace
    ) -> None:
        self._dispatch = dispatch
        self._publish = publish
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._items: list[Output] = []
        self._held_bytes = 0
        self._seq = 0
        self._total = 0
        self._allowed = float(pace.burst_bytes)
        self._allowed_at = self._loop.time()
        self._was_cut = False
        self._flusher: asyncio.Task[None] | None = None

    async def say(self, frame: Frame) -> None:
        """Pass a frame on; waits only for a chunk's turn."""
        if frame.stdout is not None:
            await self._line(OutputKind.STDOUT, frame.stdout)
        elif frame.stderr is not None:
            await self._line(OutputKind.STDERR, frame.stderr)
        elif progress := bytes(frame.progress):
            check_json(frame.progress, what="progress")
            await self._line(OutputKind.PROGRESS, progress.decode())
        elif chunk := bytes(frame.chunk):
            check_json(frame.chunk, what="chunk")
            await self._chunk(chunk.decode())
        if self._held_bytes >= self._pace.batch_bytes or len(self._items) >= _ITEMS_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Send what is held."""
        if self._flusher is not None and self._flusher is not asyncio.current_task():
            self._flusher.cancel()
        self._flusher = None
        if not self._items:
            return
        items, self._items, self._held_bytes = self._items, [], 0
        given = self._dispatch
        message = OutputMessage(
            version=VERSION,
            projectID=given.projectID,
            invocationID=given.invocationID,
            workerName=given.workerName,
            attempt=given.attempt,
            token=given.token,
            items=items,
        )
        await self._publish(_encode(message))

    async def _line(self, kind: OutputKind, text: str) -> None:
        text = text[:INLINE_BYTES_MAX]
        size = len(text.encode(errors="replace"))
        if self._total + size > self._pace.bytes_max or size > self._budget():
            self._cut()
            return
        await self._add(kind, text, size)

    async def _chunk(self, text: str) -> None:
        size = len(text.encode())
        if size > INLINE_BYTES_MAX or self._total + size > self._pace.bytes_max:
            self._cut()
            return
        while (short := size - self._budget()) > 0:
            await self.flush()
            await asyncio.sleep(short / self._pace.bytes_per_s)
        await self._add(OutputKind.CHUNK, text, size)

    async def _add(self, kind: OutputKind, text: str, size: int) -> None:
        """A large piece goes in a message of its own, which the stream takes only up to a size."""
        if size > _SMALL_BYTES_MAX:
            await self.flush()
            if len(_encode(text)) > WORKER_MESSAGE_BYTES_MAX - _ENVELOPE_BYTES:
                self._cut()
                return
        self._put(kind, text, size)

    def _budget(self) -> float:
        now = self._loop.time()
        earned = (now - self._allowed_at) * self._pace.bytes_per_s
        self._allowed = min(float(self._pace.burst_bytes), self._allowed + earned)
        self._allowed_at = now
        return self._allowed

    def _cut(self) -> None:
        if not self._was_cut:
            self._was_cut = True
            _cut.inc()
            self._put(OutputKind.STDERR, _CUT, 0)

    def _put(self, kind: OutputKind, text: str, size: int) -> None:
        self._items.append(Output(seq=self._seq, kind=kind, text=text, at=utc_now()))
        self._seq += 1
        self._total += size
        self._held_bytes += size
        self._allowed -= size
        if self._flusher is None:
            self._flusher = self._loop.create_task(self._flush_soon())

    async def _flush_soon(self) -> None:
        await asyncio.sleep(self._pace.every_s)
        await self.flush()
