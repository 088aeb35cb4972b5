"""One stream of a tunnel: bytes on channels, both ways, with credit-based flow control, half-close and abort.

Invariants: never more than `WINDOW_BYTES` are unread at the receiving end; the end is told once, after the last byte;
after an abort nothing is delivered any more.
"""

import asyncio
import struct
from collections import deque
from typing import Final, Protocol

import msgspec

from penstock.wire import tunnel as wire
from penstock.wire.tunnel import Abort, Credit, End, Frame

#: Written and not yet sent: above the first a writer should stop, below the second it may go on.
PENDING_HIGH_BYTES: Final = 256 << 10
PENDING_LOW_BYTES: Final = 64 << 10
#: Credit goes back in pieces of this size: few frames, and the sender never waits for the last byte.
_CREDIT_BYTES: Final = wire.WINDOW_BYTES // 4
_ABORT_DETAIL_MAX: Final = 512

encode: Final = msgspec.msgpack.Encoder().encode
#: A data frame up to its payload, as msgspec decodes it: [2, uint32, channel, bin32].
_data_head: Final = struct.Struct(">BBBIBBI").pack


class StreamAborted(ConnectionError):
    """The stream is over. Codes as in `wire.tunnel.Abort`."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail


class Sink(Protocol):
    """Where a stream's events go. Called from the reading loop of the tunnel: must be quick, must not block."""

    def data(self, channel: int, payload: bytes) -> None:
        """Bytes, which count as read once this returns."""
        ...

    def ended(self) -> None:
        """No more data will come."""
        ...

    def aborted(self, error: StreamAborted) -> None:
        """The stream is over for both directions."""
        ...

    def blocked(self) -> None:
        """Too much is written and unsent: stop writing."""
        ...

    def writable(self) -> None:
        """Go on writing."""
        ...


class Carrier(Protocol):
    """What a stream asks of its tunnel."""

    def schedule(self, stream: "Stream") -> None:
        """The stream has something to send."""
        ...

    def control(self, frame: Frame) -> None:
        """Send this before any data."""
        ...

    def buffered(self, size: int) -> None:
        """So many more bytes wait to be read."""
        ...

    def forget(self, stream: "Stream") -> None:
        """Both directions are over."""
        ...


class Stream:
    """Write with `write` and `drain`; read with `read`, or attach a `Sink` that is called instead."""

    __slots__ = (
        "_blocked",
        "_carrier",
        "_credit_bytes",
        "_end_told",
        "_ending",
        "_incoming",
        "_owed_bytes",
        "_paused",
        "_pending",
        "_pending_bytes",
        "_scheduled",
        "_sink",
        "_unread_bytes",
        "_waiters",
        "error",
        "id",
        "local_ended",
        "remote_ended",
    )

    def __init__(self, carrier: Carrier, stream_id: int) -> None:
        self.id = stream_id
        self.error: StreamAborted | None = None
        self.local_ended = False
        self.remote_ended = False
        self._carrier = carrier
        self._pending: deque[tuple[int, bytes | memoryview]] = deque()
        self._pending_bytes = 0
        self._credit_bytes = wire.WINDOW_BYTES
        self._blocked = False
        self._ending = False
        self._scheduled = False
        self._incoming: deque[tuple[int, bytes]] = deque()
        self._unread_bytes = 0
        self._owed_bytes = 0
        self._paused = False
        self._end_told = False
        self._sink: Sink | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def pending_bytes(self) -> int:
        """Written and not yet sent."""
        return self._pending_bytes

    @property
    def unread_bytes(self) -> int:
        """Received and not yet read."""
        return self._unread_bytes

    @property
    def ending(self) -> bool:
        """Whether `end` was called."""
        return self._ending

    @property
    def over(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return self.error is not None or (self.local_ended and self.remote_ended)

    def write(self, payload: bytes, channel: int = 0) -> None:
        """Queue bytes; they leave as credit allows. Respect `Sink.blocked` or await `drain`."""
        if self.error is not None:
            raise self.error
        if self._ending:
            raise StreamAborted("protocol", "written after the end")
        if not payload:
            return
        self._pending.append((channel, payload))
        self._pending_bytes += len(payload)
        self._schedule()
        if self._pending_bytes > PENDING_HIGH_BYTES and not self._blocked:
            self._blocked = True
            if self._sink is not None:
                self._sink.blocked()

    async def drain(self) -> None:
        """Wait until little is unsent."""
        while self._blocked and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """No more data from this side, once what is written has left."""
        if self.error is None and not self._ending:
            self._ending = True
            self._schedule()

    def abort(self, code: str, detail: str = "") -> None:
        """End both directions at once; what is unsent or unread is dropped. The own sink is not called."""
        if not self.over:
            self._carrier.control(Abort(self.id, code, detail[:_ABORT_DETAIL_MAX]))
        self._sink = None
        self._fail(StreamAborted(code, detail))

    def attach(self, sink: Sink) -> None:
        """From now on `sink` gets everything, beginning with what is already here."""
        self._sink = sink
        self._paused = False
        self._end_told = False
        if self._blocked:
            sink.blocked()
        self._deliver()

    def pause(self) -> None:
        """Stop calling the sink; the sender stops when the window is full."""
        self._paused = True

    def resume(self) -> None:
        """Go on calling the sink."""
        if self._paused:
            self._paused = False
            self._deliver()

    async def read(self) -> tuple[int, bytes] | None:
        """The next bytes with their channel, or None at the end."""
        while not self._incoming:
            if self.error is not None:
                raise self.error
            if self.remote_ended:
                return None
            await self._wait()
        channel, payload = self._pop()
        self._consumed(len(payload))
        return channel, payload

    def take(self, parts: list[bytes | memoryview]) -> tuple[int, int]:
        """Move the next data frame or the end into `parts`; how many frames and bytes that made. For the tunnel."""
        self._scheduled = False
        if self.error is not None or self.local_ended:
            return 0, 0
        frames = size = 0
        if self._pending and self._credit_bytes:
            frames, size = 1, self._take_data(parts)
        if self._ending and not self._pending:
            parts.append(encode(End(self.id)))
            frames, size = frames + 1, size + len(parts[-1])
            self._half_closed(local=True)
        self._schedule()
        if self._blocked and self._pending_bytes <= PENDING_LOW_BYTES:
            self._unblock()
        return frames, size

    def feed(self, channel: int, payload: bytes) -> None:
        """Bytes came in. For the tunnel."""
        size = len(payload)
        self._unread_bytes += size
        if self.remote_ended or self._unread_bytes + self._owed_bytes > wire.WINDOW_BYTES:
            raise StreamAborted("protocol", "data beyond the window or after the end")
        if self._sink is not None and not self._paused and not self._incoming:
            self._sink.data(channel, payload)
            self._consumed(size)
            return
        self._incoming.append((channel, payload))
        self._carrier.buffered(size)
        self._wake()

    def feed_credit(self, count: int) -> None:
        """The other side has read so much. For the tunnel."""
        if not 0 < count <= wire.WINDOW_BYTES - self._credit_bytes:
            raise StreamAborted("protocol", "credit for more than was sent")
        self._credit_bytes += count
        self._schedule()

    def feed_end(self) -> None:
        """The other side has no more data. For the tunnel."""
        if self.remote_ended:
            raise StreamAborted("protocol", "ended twice")
        self._half_closed(local=False)
        self._wake()
        self._deliver()

    def feed_abort(self, error: StreamAborted) -> None:
        """The stream is over. For the tunnel."""
        sink, self._sink = self._sink, None
        if self.error is None:
            self._fail(error)
            if sink is not None:
                sink.aborted(error)

    def _schedule(self) -> None:
        ready = self._credit_bytes > 0 if self._pending else self._ending
        if ready and not self._scheduled and not self.local_ended:
            self._scheduled = True
            self._carrier.schedule(self)

    def _take_data(self, parts: list[bytes | memoryview]) -> int:
        channel = self._pending[0][0]
        room = min(self._credit_bytes, wire.DATA_BYTES_MAX)
        head = len(parts)
        parts.append(b"")
        size = 0
        while self._pending and self._pending[0][0] == channel and size < room:
            payload = self._pending.popleft()[1]
            if size + len(payload) > room:
                view = memoryview(payload)
                self._pending.appendleft((channel, view[room - size :]))
                payload = view[: room - size]
            parts.append(payload)
            size += len(payload)
        parts[head] = _data_head(0x94, 2, 0xCE, self.id, channel, 0xC6, size)
        self._credit_bytes -= size
        self._pending_bytes -= size
        return size + len(parts[head])

    def _unblock(self) -> None:
        self._blocked = False
        self._wake()
        if self._sink is not None:
            self._sink.writable()

    def _half_closed(self, *, local: bool) -> None:
        if local:
            self.local_ended = True
        else:
            self.remote_ended = True
        if self.local_ended and self.remote_ended:
            self._carrier.forget(self)

    def _fail(self, error: StreamAborted) -> None:
        self._carrier.forget(self)
        if self.error is None:
            self.error = error
        self._pending.clear()
        self._pending_bytes = 0
        while self._incoming:
            self._pop()
        self._wake()

    def _deliver(self) -> None:
        while self._sink is not None and self._incoming and not self._paused:
            channel, payload = self._pop()
            self._sink.data(channel, payload)
            self._consumed(len(payload))
        sink = self._sink
        if sink is None or self._incoming or self._paused or self._end_told:
            return
        if self.error is not None:
            self._sink = None
            sink.aborted(self.error)
        elif self.remote_ended:
            self._end_told = True
            sink.ended()

    def _pop(self) -> tuple[int, bytes]:
        channel, payload = self._incoming.popleft()
        self._carrier.buffered(-len(payload))
        return channel, payload

    def _consumed(self, size: int) -> None:
        self._unread_bytes -= size
        self._owed_bytes += size
        if self._owed_bytes >= _CREDIT_BYTES and self.error is None and not self.remote_ended:
            self._carrier.control(Credit(self.id, self._owed_bytes))
            self._owed_bytes = 0

    async def _wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
