"""A transport over a socket that a unit passed to the agent, and of which it may have kept a copy.

Both copies are one open file: whoever holds the other can make it blocking at any moment, and a loop that relies on the
flag then stands still, with every other tenant behind it. So each call here says itself that it must not wait.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Final

_NOW: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
#: Larger blocks come from the kernel one by one, which costs more than a second read.
_CHUNK_BYTES: Final = 96 << 10
_HIGH_BYTES: Final = 64 << 10


class ForeignTransport(asyncio.Transport):
    """Reads and writes a connected stream socket that is not ours alone."""

    def __init__(self, connection: socket.socket, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._protocol = protocol
        self._pending = bytearray()
        self._reading = self._closing = self._eof_out = self._full = self._over = False
        self._eof_in = False
        protocol.connection_made(self)
        self.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # noqa: ARG002 (as transports have it)
        """Nothing is known of it that could be believed."""
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        """Who is told."""
        return self._protocol

    def is_closing(self) -> bool:
        """Whether it is over, or about to be."""
        return self._closing

    def is_reading(self) -> bool:
        """Whether what comes is taken."""
        return self._reading

    def pause_reading(self) -> None:
        """Leave what comes where it is."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def resume_reading(self) -> None:
        """Take what comes."""
        if not (self._reading or self._closing or self._eof_in):
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_CHUNK_BYTES, _NOW)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._protocol.data_received(data)
            return
        self.pause_reading()
        self._eof_in = True
        if not self._protocol.eof_received():
            self.close()

    def write(self, data: "bytes | bytearray | memoryview") -> None:
        """Send, or keep what the unit does not take yet. After the end it is dropped, as sockets do."""
        if self._closing or self._eof_out or not data:
            return
        if not self._pending:
            sent = self._try(lambda: self._socket.send(data, _NOW)) or 0
            if self._closing or sent == len(data):
                return
            data = memoryview(data)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._pending += data
        if len(self._pending) > _HIGH_BYTES and not self._full:
            self._full = True
            self._protocol.pause_writing()

    def _writable(self) -> None:
        sent = self._try(lambda: self._socket.send(self._pending, _NOW))
        if not sent:
            return
        del self._pending[:sent]
        if self._full and len(self._pending) <= _HIGH_BYTES // 4:
            self._full = False
            self._protocol.resume_writing()
        if not self._pending:
            self._loop.remove_writer(self._socket.fileno())
            self._drained()

    def _drained(self) -> None:
        if self._eof_out and not self._closing:
            self._try(lambda: self._socket.shutdown(socket.SHUT_WR))
        elif self._closing:
            self._end(None)

    def can_write_eof(self) -> bool:
        """It can be half-closed."""
        return True

    def write_eof(self) -> None:
        """Nothing more follows what was written."""
        if not self._eof_out:
            self._eof_out = True
            if not self._pending:
                self._drained()

    def get_write_buffer_size(self) -> int:
        """How much the unit has not taken."""
        return len(self._pending)

    def close(self) -> None:
        """End it once what was written has left."""
        if self._closing:
            return
        self.pause_reading()
        self._closing = True
        if not self._pending:
            self._end(None)

    def abort(self) -> None:
        """End it now."""
        self._end(None)

    def _try(self, call: "Callable[[], Any]") -> Any:
        """The call's result; none when it would have to wait, or has failed, which ends the connection."""
        try:
            return call()
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self._end(error)
            return None

    def _end(self, error: OSError | None) -> None:
        if self._over:
            return
        self.pause_reading()
        self._over = self._closing = True
        if self._pending:
            self._pending.clear()
            self._loop.remove_writer(self._socket.fileno())
        self._loop.call_soon(self._lost, error)

    def _lost(self, error: OSError | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()


def open_streams(connection: socket.socket, *, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The same as a reader and a writer."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=limit, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    return reader, asyncio.StreamWriter(ForeignTransport(connection, protocol), protocol, reader, loop)
