"""Many byte streams over one WebSocket (frames: `wire/tunnel.py`).

A message is a msgpack array of frames: what was written in one tick of the loop leaves as few messages. One side opens
streams, the other accepts them. Invariants: streams take turns, so a busy one never holds back another; a reader that
stalls stops its own sender only; at most `BUFFER_BYTES_MAX` wait to be read; when the socket goes, every stream ends
with `lost`. A peer that breaks the protocol of a stream loses the stream, of the framing the socket (4400).
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec

from penstock.kit.errors import Kind, PenstockError
from penstock.kit.stream import Stream, StreamAborted, encode
from penstock.kit.telemetry import logger
from penstock.kit.websocket import INTERNAL, Receiver, Violation
from penstock.wire import tunnel as wire
from penstock.wire.link import Close
from penstock.wire.tunnel import Abort, Credit, Data, End, Frame, Open, Target
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)

#: Received and not yet read, of all streams together; beyond it the fullest stream is aborted.
BUFFER_BYTES_MAX: Final = 128 << 20
#: A message gets no more frames once it is this large: larger ones gain nothing and leave the processor's cache.
_BATCH_BYTES_MAX: Final = 64 << 10
_OPEN_BYTES_MAX: Final = 512 << 10
_STREAM_ID_MAX: Final = 0xFFFFFFFF

_decode: Final = msgspec.msgpack.Decoder(list[Frame]).decode
#: An array of frames: array32 and their number.
_ARRAY: Final = 0xDD
_batch_head: Final = struct.Struct(">BI")
#: A data frame up to its payload as `Stream` writes it. Such frames are read without a copy of the whole message.
_data_head: Final = struct.Struct(">HBIBBI")
_DATA: Final = (0x9402, 0xCE, 0xC6)


class Socket(Protocol):
    """A WebSocket that carries whole messages."""

    @property
    def full(self) -> bool:
        """Whether too much is unsent; `Receiver.writable` tells when that ends."""
        ...

    @property
    def closed(self) -> "asyncio.Future[None]":
        """Done when the socket is gone."""
        ...

    def receive(self, receiver: Receiver) -> None:
        """Begin to hand messages over."""
        ...

    def send(self, parts: Sequence[bytes | memoryview], size: int) -> None:
        """Send a message."""
        ...

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Say why and close."""
        ...


class TunnelFull(PenstockError):
    """No further stream fits."""

    kind = Kind.UNAVAILABLE
    code = "tunnel.full"


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
        self._flushing = False
        self._loop = asyncio.get_running_loop()

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
        self._socket.receive(self)
        try:
            await asyncio.shield(self._socket.closed)
        finally:
            # Bounded: a peer that does not answer the close is cut off.
            self.close()
            await asyncio.shield(self._socket.closed)

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Close the socket, saying why; all streams are lost."""
        self.lost()
        self._socket.close(code, reason)

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

    def writable(self) -> None:
        """The socket takes more (for the socket)."""
        self._wake()

    def lost(self) -> None:
        """The socket is gone, or soon will be (for the socket)."""
        self.closed = True
        self._ready.clear()
        self._control.clear()
        for stream in list(self.streams.values()):
            try:
                stream.feed_abort(StreamAborted("lost", "the tunnel is closed"))
            except Exception:  # noqa: BLE001 (supervises the sinks: all are told)
                _log.exception("tunnel_sink_failed", stream=stream.id)

    def message(self, data: memoryview) -> None:
        """Frames came in (for the socket)."""
        if len(data) < _batch_head.size or data[0] != _ARRAY:
            self._decode(bytes(data))
            return
        _, count = _batch_head.unpack_from(data)
        place = _batch_head.size
        while count and (after := self._quick_data(data, place)):
            place = after
            count -= 1
        if count or place != len(data):
            self._decode(_batch_head.pack(_ARRAY, count) + bytes(data[place:]))

    def _quick_data(self, data: memoryview, place: int) -> int:
        """Handle a data frame of the usual form at `place`; where it ends, or zero when it is another frame."""
        begin = place + _data_head.size
        if begin > len(data):
            return 0
        kind, wide, stream_id, channel, binary, size = _data_head.unpack_from(data, place)
        if (kind, wide, binary) != _DATA or channel > 127 or begin + size > len(data):
            return 0
        stream = self.streams.get(stream_id)
        if stream is None:
            self._check_past(stream_id)
        else:
            self._feed(stream, Data(stream_id, channel, bytes(data[begin : begin + size])))
        return begin + size

    def _decode(self, message: bytes) -> None:
        try:
            frames = _decode(message)
        except UNREADABLE as error:
            raise Violation(Close.MALFORMED, f"not a list of frames: {error}") from error
        for frame in frames:
            if isinstance(frame, Open):
                self._opened(frame)
            elif (stream := self.streams.get(frame.stream)) is not None:
                self._feed(stream, frame)
            else:
                self._check_past(frame.stream)

    def _check_past(self, stream_id: int) -> None:
        """A stream that ended here while its frames were on their way is fine; one that never was is not."""
        if not 0 < stream_id <= self._last_id:
            raise Violation(Close.MALFORMED, f"no stream {stream_id}")

    def _feed(self, stream: Stream, frame: Data | Credit | End | Abort) -> None:
        try:
            if isinstance(frame, Data):
                if len(frame.payload) > wire.DATA_BYTES_MAX:
                    raise StreamAborted("protocol", f"a data frame larger than {wire.DATA_BYTES_MAX} bytes")
                stream.feed(frame.channel, frame.payload)
            elif isinstance(frame, Credit):
                stream.feed_credit(frame.bytes)
            elif isinstance(frame, End):
                stream.feed_end()
            else:
                stream.feed_abort(StreamAborted(frame.code, frame.detail))
        except StreamAborted as error:
            self._abort(stream, error)
        except Exception:  # noqa: BLE001 (supervises the sinks: one that fails ends its own stream only)
            _log.exception("tunnel_sink_failed", stream=stream.id)
            self._abort(stream, StreamAborted("cancelled", "internal error"))

    def _opened(self, frame: Open) -> None:
        if self._accept is None or not self._last_id < frame.stream <= _STREAM_ID_MAX:
            raise Violation(Close.MALFORMED, f"stream {frame.stream} may not be opened")
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

    def _abort(self, stream: Stream, error: StreamAborted) -> None:
        self.control(Abort(stream.id, error.code, error.detail))
        stream.feed_abort(error)

    def _wake(self) -> None:
        """Send at the end of this tick what the tick brings."""
        if not self._flushing and not self._socket.full:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        try:
            while (self._control or self._ready) and not self._socket.full and not self.closed:
                self._send_message()
        except Exception:  # noqa: BLE001 (supervises the sinks: a tunnel that cannot send is of no use)
            _log.exception("tunnel_send_failed")
            self.close(INTERNAL)

    def _send_message(self) -> None:
        """What is to be sent now, in turns of one frame per stream."""
        parts: list[bytes | memoryview] = [b""]
        count = size = 0
        while self._control and size < _BATCH_BYTES_MAX:
            parts.append(self._control.popleft())
            size += len(parts[-1])
            count += 1
        while self._ready and size < _BATCH_BYTES_MAX:
            frames, taken = self._ready.popleft().take(parts)
            count += frames
            size += taken
        if count:
            parts[0] = _batch_head.pack(_ARRAY, count)
            self._socket.send(parts, size + _batch_head.size)
