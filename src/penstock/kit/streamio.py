"""Streams of a tunnel joined to other things: a protocol, a transport, another stream. None of it needs a task."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from penstock.kit.stream import Stream, StreamAborted


class StreamTransport(asyncio.Transport):
    """A stream as the transport of a protocol, so that aiohttp's HTTP runs over it. Uses channel 0 only."""

    def __init__(self, stream: Stream, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.stream = stream
        self._protocol: asyncio.Protocol | None = protocol
        self._closing = False
        protocol.connection_made(self)
        stream.attach(self)

    def data(self, channel: int, payload: bytes) -> None:  # noqa: ARG002 (the stream has one channel)
        """Bytes for the protocol."""
        if self._protocol is not None:
            self._protocol.data_received(payload)

    def ended(self) -> None:
        """The other side is done; so are we unless the protocol wants to go on."""
        if self._protocol is not None and not self._protocol.eof_received():
            self.close()

    def aborted(self, error: StreamAborted) -> None:
        """Tell the protocol at once: it is called from the reading loop, never from within the protocol."""
        self._closing = True
        self._lost(error)

    def blocked(self) -> None:
        """Too much is unsent."""
        if self._protocol is not None:
            self._protocol.pause_writing()

    def writable(self) -> None:
        """Go on."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Queue bytes; what comes after the end is dropped, as sockets do."""
        if not self._closing:
            with suppress(StreamAborted):
                self.stream.write(data if type(data) is bytes else bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Queue all; they leave as one frame anyway."""
        for data in list_of_data:
            self.write(data)

    def write_eof(self) -> None:
        """Half-close."""
        self.stream.end()

    def can_write_eof(self) -> bool:
        """Streams half-close."""
        return True

    def pause_reading(self) -> None:
        """The sender stops when its window is used up."""
        self.stream.pause()

    def resume_reading(self) -> None:
        """Go on."""
        if not self._closing:
            self.stream.resume()

    def is_closing(self) -> bool:
        """Whether it is closed or about to be."""
        return self._closing

    def close(self) -> None:
        """End the stream, or abort it when the other side has not ended yet: nobody would read the rest."""
        if self._closing:
            return
        self._closing = True
        if self.stream.remote_ended:
            self.stream.end()
        else:
            self.stream.abort("cancelled")
        asyncio.get_running_loop().call_soon(self._lost, None)

    def abort(self) -> None:
        """Drop everything."""
        if not self._closing:
            self._closing = True
            self.stream.abort("cancelled")
            asyncio.get_running_loop().call_soon(self._lost, None)

    def detach(self) -> Stream:
        """The bare stream; the protocol hears nothing more."""
        self._closing = True
        self._protocol = None
        return self.stream

    def get_write_buffer_size(self) -> int:
        """Bytes unsent."""
        return self.stream.pending_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002
        """A stream knows no addresses."""
        return default

    def _lost(self, error: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(error)


class Pump(asyncio.Protocol):
    """A connection joined to a stream: the connection's protocol and the stream's sink in one. Half-closes pass."""

    def __init__(self, stream: Stream, *, lost: Callable[[Exception | None], None] | None = None) -> None:
        self._stream = stream
        self._lost = lost
        self._transport = cast("asyncio.Transport", None)
        self._eof_in = False
        self._eof_out = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ours."""
        self._transport = cast("asyncio.Transport", transport)
        self._stream.attach(self)

    def data_received(self, data: bytes) -> None:
        """From the connection to the stream."""
        with suppress(StreamAborted):
            self._stream.write(data)

    def eof_received(self) -> bool:
        """The connection half-closed; keep the other half until the stream ends too."""
        self._eof_in = True
        self._stream.end()
        return not self._eof_out

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone. What was read before its end still reaches the stream; the rest of the stream is dropped."""
        if not self._eof_in:
            self._stream.abort("cancelled", "the connection was closed")
        self._stream.resume()
        if self._lost is not None:
            self._lost(exc)

    def pause_writing(self) -> None:
        """The connection's reader is slow."""
        self._stream.pause()

    def resume_writing(self) -> None:
        """It reads again."""
        self._stream.resume()

    def data(self, channel: int, payload: bytes) -> None:  # noqa: ARG002 (a connection has one channel)
        """From the stream to the connection."""
        if not self._transport.is_closing():
            self._transport.write(payload)

    def ended(self) -> None:
        """The stream has no more."""
        self._eof_out = True
        if self._eof_in:
            self._transport.close()
        elif self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def aborted(self, error: StreamAborted) -> None:  # noqa: ARG002
        """Drop the connection."""
        self._transport.abort()

    def blocked(self) -> None:
        """The stream's reader is slow."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def writable(self) -> None:
        """It reads again."""
        if not self._transport.is_closing():
            self._transport.resume_reading()


class _Half:
    """Carries one direction of a splice: what comes from one stream is written to the other."""

    def __init__(self, source: Stream, target: Stream) -> None:
        self._source = source
        self._target = target

    def data(self, channel: int, payload: bytes) -> None:
        """Pass on."""
        self._target.write(payload, channel)

    def ended(self) -> None:
        """Half-close the other."""
        self._target.end()

    def aborted(self, error: StreamAborted) -> None:
        """Both are over, for the same reason."""
        self._target.abort(error.code, error.detail)

    def blocked(self) -> None:
        """The source cannot send: stop reading the target, whose data goes there."""
        self._target.pause()

    def writable(self) -> None:
        """Go on."""
        self._target.resume()


def splice(left: Stream, right: Stream) -> None:
    """Join two streams into one, with flow control end to end."""
    left.attach(_Half(left, right))
    right.attach(_Half(right, left))
