"""Units' output on its way to the gateway: whole lines, bounded in length, in rate and in what is kept.

Output beyond the rate is dropped and counted; a line says how much. Logs never slow a unit down.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import Final

from penstock.kit.clock import utc_now
from penstock.wire.link import LOG_LINE_BYTES_MAX, LogLine

_BYTES_PER_S: Final = 1 << 20
_BURST_BYTES: Final = 4 << 20
_QUEUE_BYTES_MAX: Final = 8 << 20
_BATCH_BYTES: Final = 1 << 20
#: What a line costs beside its text, in memory and in a frame: empty ones must not be for nothing.
_LINE_BYTES: Final = 160
#: Of one read of a unit's output, which has 32 KiB at most.
_CHUNK_LINES_MAX: Final = 2048


class Lines:
    """Cuts one stream of a unit into lines. What is longer than a line may be is split and flagged."""

    def __init__(self, unit_id: str, stream: str, now: Callable[[], datetime] = utc_now) -> None:
        self._unit_id = unit_id
        self._stream = stream
        self._now = now
        self._rest = b""
        self._continued = False

    def feed(self, chunk: bytes) -> list[LogLine]:
        """The lines that are complete now."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        if len(whole) > _CHUNK_LINES_MAX:
            # Empty lines by the thousand would cost the agent more than the unit that prints them.
            dropped = len(whole) - _CHUNK_LINES_MAX
            whole = [*whole[:_CHUNK_LINES_MAX], f"[{dropped} lines dropped]".encode()]
        lines = [line for part in whole for line in self._cut(_pieces(part), ended=True)]
        *full, self._rest = _pieces(self._rest)
        return lines + (self._cut(full, ended=False) if full else [])

    def end(self) -> list[LogLine]:
        """What is left without a line's end."""
        rest, self._rest = self._rest, b""
        return self._cut(_pieces(rest), ended=True) if rest else []

    def _cut(self, pieces: list[bytes], *, ended: bool) -> list[LogLine]:
        split = self._continued or len(pieces) > 1 or not ended
        self._continued = not ended
        return [self._line(piece, split=split) for piece in pieces]

    def _line(self, piece: bytes, *, split: bool) -> LogLine:
        try:
            text, lossy = piece.decode(), False
        except UnicodeDecodeError:
            text, lossy = piece.decode(errors="replace"), True
        return LogLine(unit_id=self._unit_id, stream=self._stream, at=self._now(), text=text, split=split, lossy=lossy)


def _pieces(content: bytes) -> list[bytes]:
    """Parts that each fit a line, never cut within a character; at least one."""
    pieces: list[bytes] = []
    while len(content) > LOG_LINE_BYTES_MAX:
        end = LOG_LINE_BYTES_MAX
        while end > LOG_LINE_BYTES_MAX - 4 and content[end] & 0xC0 == 0x80:
            end -= 1
        pieces.append(content[:end])
        content = content[end:]
    return [*pieces, content]


def _size(line: LogLine) -> int:
    return _LINE_BYTES + (len(line.text) if line.text.isascii() else len(line.text.encode()))


class Forwarder:
    """Lines of all units that wait for the link, each unit held to its own rate."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._queue: deque[LogLine] = deque()
        self._queued_bytes = 0
        self._allowance: dict[str, tuple[float, float]] = {}
        self._dropped: dict[str, int] = {}
        self._ready = asyncio.Event()

    def put(self, *lines: LogLine) -> None:
        """Take lines, or drop and count them."""
        for line in lines:
            self._put(line)

    def _put(self, line: LogLine) -> None:
        size = _size(line)
        if not self._allowed(line.unit_id, size) or self._queued_bytes + size > _QUEUE_BYTES_MAX:
            self._dropped[line.unit_id] = self._dropped.get(line.unit_id, 0) + 1
            return
        self._tell_dropped(line)
        self._append(line)

    def _append(self, line: LogLine) -> None:
        self._queue.append(line)
        self._queued_bytes += _size(line)
        self._ready.set()

    def _tell_dropped(self, line: LogLine) -> None:
        dropped = self._dropped.pop(line.unit_id, 0)
        if dropped:
            text = f"[{dropped} lines dropped: output exceeds {_BYTES_PER_S} bytes/s]"
            self._append(LogLine(unit_id=line.unit_id, stream="penstock", at=line.at, text=text, lossy=True))

    def _allowed(self, unit_id: str, size: int) -> bool:
        now = self._monotonic()
        left, at = self._allowance.get(unit_id, (float(_BURST_BYTES), now))
        left = min(_BURST_BYTES, left + (now - at) * _BYTES_PER_S)
        allowed = left >= size
        self._allowance[unit_id] = (left - size if allowed else left, now)
        return allowed

    def forget(self, unit_id: str) -> None:
        """The unit is gone."""
        self._allowance.pop(unit_id, None)
        self._dropped.pop(unit_id, None)

    async def take(self) -> list[LogLine]:
        """Wait for lines and take a batch that fits a frame."""
        await self._ready.wait()
        batch: list[LogLine] = []
        size = 0
        while self._queue and size < _BATCH_BYTES:
            line = self._queue.popleft()
            batch.append(line)
            size += _size(line)
        self._queued_bytes -= size
        if not self._queue:
            self._ready.clear()
        return batch
