"""Many byte streams over one WebSocket (frames: `wire/tunnel.py`).

A message is a msgpack array of frames: what was written in one tick of the loop leaves as one message. One side opens
streams, the other accepts them. Invariants: streams take turns, so a busy one never holds back another; a reader that
stalls stops its own sender only; at most `BUFFER_BYTES_MAX` wait to be read; when the socket goes, every stream ends
with `lost`. A peer that breaks the protocol of a stream loses the stream, of the framing the socket (4400).
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec
from aiohttp import WSMsgType

from penstock.kit.errors import Kind, PenstockError
from penstock.kit.stream import Stream, StreamAborted, encode
from penstock.kit.telemetry import logger
from penstock.wire import tunnel as wire
from penstock.wire.link import Close
from penstock.wire.tunnel import Abort, Credit, Data, End, Frame, Open, Target

_log = logger(__name__)

#: Received and not yet read, of all streams together; beyond it the fullest stream is aborted.
BUFFER_BYTES_MAX: Final = 128 << 20
#: One message stays well below `FRAME_BYTES_MAX`.
_BATCH_BYTES_MAX: Final = 256 << 10
_OPEN_BYTES_MAX: Final = 512 << 10
_STREAM_ID_MAX: Final = 0xFFFFFFFF

_decode: Final = msgspec.msgpack.Decoder(list[Frame]).decode
#: An array of frames: array32 and their number.
_batch_head: Final = struct.Struct(">BI").pack


class Socket(Protocol):
    """Either end of an aiohttp WebSocket."""

    async def receive(self) -> Any:
        """The next message."""
        ...

    async def send_bytes(self, data: bytes) -> None:
        """Send, waiting while the transport is full."""
        ...

    async def close(self, *, code: int = 1000, message: bytes = b"") -> Any:
        """Say why and close."""
        ...


class TunnelFull(PenstockError):
    """No further stream fits."""

    kind = Kind.UNAVAILABLE
    code = "tunnel.full"


class _Violation(Exception):
    """The other side broke the framing."""


class Mux:
    """One end of a tunnel. `accept` is called for each stream that the other side opens; without it none may be."""

    def __init__(self, socket: Socket, *, accept: Callable[[Stream, Open], None] | None = None) -> None:
        self.streams: dict[int, Stream] = {}
        self.buffered_bytes = 0
        self.closed = False
        self._socket = socket
        self._accept = accept
        self._last_id = 0
        self._control: deque[bytes] = deque()
        self._ready: deque[Stream] = deque()
        self._idle: asyncio.Future[None] | None = None

    def open(self, target: Target, node_id: str = "") -> Stream:
        """A new stream, to be used at once: a refusal arrives as its abort."""
        if self.closed:
            raise StreamAborted("lost", "the tunnel is closed")
        if len(self.streams) >= wire.STREAMS_MAX or self._last_id >= _STREAM_ID_MAX:
            raise TunnelFull(f"the tunnel carries {wire.STREAMS_MAX} streams already; try again", retry_after_s=1)
        frame = encode(Open(self._last_id + 1, target, node_id))
        if len(frame) > _OPEN_BYTES_MAX:
            raise TunnelFull(f"the stream's description is larger than {_OPEN_BYTES_MAX} bytes")
        self._last_id += 1
        stream = self.streams[self._last_id] = Stream(self, self._last_id)
        self._control.append(frame)
        self._wake()
        return stream

    async def run(self) -> None:
        """Carry streams until the socket ends, whoever ends it."""
        sender = asyncio.create_task(self._send(), name="tunnel-send")
        try:
            await self._receive()
        except _Violation as error:
            _log.warning("tunnel_violation", detail=str(error))
            await self.close(Close.MALFORMED, str(error))
        finally:
            self._lose()
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the socket, saying why; all streams are lost."""
        self._lose()
        with suppress(ConnectionError, TimeoutError):
            await self._socket.close(code=code, message=reason.encode()[:120])

    def schedule(self, stream: Stream) -> None:
        """The stream has something to send (for `Stream`)."""
        self._ready.append(stream)
        self._wake()

    def control(self, frame: Frame) -> None:
        """Send this before any data (for `Stream`)."""
        if not self.closed:
            self._control.append(encode(frame))
            self._wake()

    def buffered(self, size: int) -> None:
        """So many more bytes wait to be read (for `Stream`)."""
        self.buffered_bytes += size
        if self.buffered_bytes > BUFFER_BYTES_MAX:
            fullest = max(self.streams.values(), key=lambda stream: stream.unread_bytes)
            self._abort(fullest, StreamAborted("exhausted", "too much is unread on this tunnel"))

    def forget(self, stream: Stream) -> None:
        """Both directions of the stream are over (for `Stream`)."""
        self.streams.pop(stream.id, None)

    def _abort(self, stream: Stream, error: StreamAborted) -> None:
        self.control(Abort(stream.id, error.code, error.detail))
        stream.feed_abort(error)

    def _lose(self) -> None:
        self.closed = True
        self._ready.clear()
        self._control.clear()
        for stream in list(self.streams.values()):
            try:
                stream.feed_abort(StreamAborted("lost", "the tunnel is closed"))
            except Exception:  # noqa: BLE001 (supervises the sinks: all are told)
                _log.exception("tunnel_sink_failed", stream=stream.id)

    def _wake(self) -> None:
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _send(self) -> None:
        try:
            await self._send_batches()
        except ConnectionError:
            await self.close(1001)
        except Exception:  # noqa: BLE001 (supervises the sinks: without a sender the tunnel is of no use)
            _log.exception("tunnel_send_failed")
            await self.close(1011)

    async def _send_batches(self) -> None:
        loop = asyncio.get_running_loop()
        while not self.closed:
            if not self._control and not self._ready:
                self._idle = loop.create_future()
                await self._idle
            if message := self._gather():
                await self._socket.send_bytes(message)

    def _gather(self) -> bytes:
        """What is to be sent now, in turns of one frame per stream, as one message; empty when there is nothing."""
        parts: list[bytes | memoryview] = [b""]
        count = size = 0
        while self._control and size < _BATCH_BYTES_MAX:
            parts.append(self._control.popleft())
            size += len(parts[-1])
            count += 1
        while self._ready and size < _BATCH_BYTES_MAX:
            first = len(parts)
            count += self._ready.popleft().take(parts)
            size += sum(len(part) for part in parts[first:])
        if not count:
            return b""
        parts[0] = _batch_head(0xDD, count)
        return b"".join(parts)

    async def _receive(self) -> None:
        while not self.closed:
            message = await self._socket.receive()
            if message.type is not WSMsgType.BINARY:
                if message.type is WSMsgType.TEXT:
                    raise _Violation("text where frames are expected")
                return
            try:
                frames = _decode(message.data)
            except msgspec.DecodeError as error:
                raise _Violation(f"not a list of frames: {error}") from error
            for frame in frames:
                self._dispatch(frame)

    def _dispatch(self, frame: Frame) -> None:
        if isinstance(frame, Open):
            self._opened(frame)
            return
        stream = self.streams.get(frame.stream)
        if stream is None:
            # It ended here while this frame was on its way. What never existed is another matter.
            if not 0 < frame.stream <= self._last_id:
                raise _Violation(f"no stream {frame.stream}")
            return
        try:
            self._feed(stream, frame)
        except StreamAborted as error:
            self._abort(stream, error)
        except Exception:  # noqa: BLE001 (supervises the sinks: one that fails ends its own stream only)
            _log.exception("tunnel_sink_failed", stream=stream.id)
            self._abort(stream, StreamAborted("cancelled", "internal error"))

    def _feed(self, stream: Stream, frame: Data | Credit | End | Abort) -> None:
        if type(frame) is Data:
            if len(frame.payload) > wire.DATA_BYTES_MAX:
                raise StreamAborted("protocol", f"a data frame larger than {wire.DATA_BYTES_MAX} bytes")
            stream.feed(frame.channel, frame.payload)
        elif type(frame) is Credit:
            stream.feed_credit(frame.bytes)
        elif type(frame) is End:
            stream.feed_end()
        elif type(frame) is Abort:
            stream.feed_abort(StreamAborted(frame.code, frame.detail))

    def _opened(self, frame: Open) -> None:
        if self._accept is None or not self._last_id < frame.stream <= _STREAM_ID_MAX:
            raise _Violation(f"stream {frame.stream} may not be opened")
        self._last_id = frame.stream
        if len(self.streams) >= wire.STREAMS_MAX:
            self.control(Abort(frame.stream, "exhausted", f"more than {wire.STREAMS_MAX} streams"))
            return
        stream = self.streams[frame.stream] = Stream(self, frame.stream)
        try:
            self._accept(stream, frame)
        except Exception:  # noqa: BLE001 (supervises the acceptor)
            _log.exception("tunnel_accept_failed")
            self._abort(stream, StreamAborted("cancelled", "internal error"))
