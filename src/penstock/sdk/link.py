"""A byte stream in an event loop. What was received before the connection broke is still read."""

import asyncio
from typing import Final, cast

_UNREAD_BYTES_MAX: Final = 256 << 10


class Link(asyncio.Protocol):
    """One connection; at most one task receives and one sends at a time."""

    def __init__(self) -> None:
        self._transport = cast("asyncio.Transport", None)
        self._unread = bytearray()
        self._ended = False
        self._error: Exception | None = None
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def quiet(self) -> bool:
        """Whether it is open and nothing waits to be received."""
        return not (self._ended or self._unread or self._transport.is_closing())

    async def send(self, data: bytes) -> None:
        """Send, and wait while much is unsent."""
        await self._writable.wait()
        if self._closed.is_set():
            raise self._error or ConnectionResetError("the connection was closed")
        self._transport.write(data)
        await self._writable.wait()

    async def receive(self) -> bytes:
        """The next bytes; none after the end."""
        await self._readable.wait()
        if not self._unread and self._error is not None:
            raise self._error
        data = bytes(self._unread)
        self._unread.clear()
        if not self._ended:
            self._readable.clear()
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        """End at once."""
        self._transport.abort()

    async def close(self) -> None:
        """End, and wait until it has."""
        self._transport.abort()
        await self._closed.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        """Keep the bytes; beyond the limit the other side has to wait."""
        self._unread += data
        self._readable.set()
        if len(self._unread) > _UNREAD_BYTES_MAX:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """The other side sends no more."""
        self._ended = True
        self._readable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._error, self._ended = exc, True
        for event in (self._readable, self._writable, self._closed):
            event.set()

    def pause_writing(self) -> None:
        """Much is unsent."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Little is unsent."""
        self._writable.set()
