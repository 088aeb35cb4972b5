"""HTTP/1.1 to a framework, on a connection of its own: strict about what ends an answer, bounded in everything.

A connection carries one exchange at a time. It is used again only if the answer said so, was complete, and nothing came
after it: a second answer that nobody asked for is never taken for the next one.
"""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from penstock.node.sidecar.errors import BrokenAnswer, LostConnection

_HEAD_BYTES_MAX: Final = 64 << 10
_BUFFER_BYTES: Final = 256 << 10
_PIECE_BYTES: Final = 256 << 10
_STATUS: Final = re.compile(rb"HTTP/(1\.[01]) ([1-5][0-9]{2})(?: [^\r\n\0]*)?")
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?\r\n")
_INFORMATION: Final = range(100, 200)
_NO_BODY: Final = (204, 304)
_SWITCHING: Final = 101


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers (names in lower case) of an answer. `length` is None when chunks or the end say it."""

    status: int
    content_type: str
    length: int | None
    chunked: bool
    stays: bool


class Connection:
    """One connection to a framework."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._complete = True
        self._begun = False
        self._stays = True

    @classmethod
    async def over(cls, connection: socket.socket) -> "Connection":
        """On a socket that is connected; it is closed with the connection."""
        try:
            return cls(*await asyncio.open_unix_connection(sock=connection, limit=_BUFFER_BYTES))
        except BaseException:
            connection.close()
            raise

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow: all was read, and nothing came that nobody asked for."""
        buffered: bytearray = self._reader._buffer  # type: ignore[attr-defined]  # noqa: SLF001 (no other way to see it)
        return self._complete and self._stays and not buffered and not self._reader.at_eof() and self._alive

    @property
    def _alive(self) -> bool:
        return not self._writer.is_closing() and self._reader.exception() is None

    def close(self) -> None:
        """End it, whatever is under way."""
        self._writer.close()

    async def send(self, method: str, path: str, body: bytes = b"") -> Head:
        """Ask, and read the head of the final answer. `100 Continue` and its kind are read over."""
        self._complete = self._begun = False
        request = (
            f"{method} {path} HTTP/1.1\r\nHost: framework\r\nAccept: application/json, application/x-ndjson\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        try:
            self._writer.writelines([request.encode("latin-1"), body])
            # A framework that answers before it has read everything closes; its answer counts.
            await self._writer.drain()
        except OSError:
            pass
        while (head := _parse_head(await self._read_head())).status in _INFORMATION:
            if head.status == _SWITCHING:
                raise BrokenAnswer("bad_answer", "the framework switches protocols")
        self._stays = head.stays
        self._complete = head.length == 0
        return head

    async def body(self, head: Head) -> AsyncIterator[bytes]:
        """The answer's body in pieces."""
        if head.chunked:
            async for piece in self._chunks():
                yield piece
        elif head.length is None:
            while piece := await self._read(_PIECE_BYTES):
                yield piece
        else:
            left = head.length
            while left:
                piece = await self._read(min(left, _PIECE_BYTES))
                if not piece:
                    raise LostConnection(f"the body ended {left} bytes before its Content-Length", begun=True)
                left -= len(piece)
                yield piece
        self._complete = True

    async def _chunks(self) -> AsyncIterator[bytes]:
        while left := _chunk_size(await self._line()):
            while left:
                piece = await self._read(min(left, _PIECE_BYTES))
                if not piece:
                    raise LostConnection("the body ended within a chunk", begun=True)
                left -= len(piece)
                yield piece
            if await self._line() != b"\r\n":
                raise BrokenAnswer("bad_answer", "a chunk is longer than its size says")
        trailer_bytes = 0
        while (line := await self._line()) != b"\r\n":
            trailer_bytes += len(line)
            if trailer_bytes > _HEAD_BYTES_MAX:
                raise BrokenAnswer("bad_answer", "the trailer is too large")

    async def _read(self, most: int) -> bytes:
        try:
            return await self._reader.read(most)
        except OSError as error:
            raise LostConnection(f"the connection broke: {error.strerror}", begun=self._begun) from error

    async def _read_head(self) -> list[bytes]:
        """Status line and headers, without their ends."""
        lines: list[bytes] = []
        head_bytes = 0
        while (line := await self._line()) != b"\r\n":
            head_bytes += len(line)
            if head_bytes > _HEAD_BYTES_MAX:
                raise BrokenAnswer("bad_answer", f"the answer's head is larger than {_HEAD_BYTES_MAX} bytes")
            lines.append(line[:-2])
        return lines

    async def _line(self) -> bytes:
        """Up to a line feed, with a carriage return before it."""
        try:
            found = await self._reader.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            begun = self._begun or bool(error.partial)
            detail = "the answer is truncated" if begun else "the framework closed the connection without an answer"
            raise LostConnection(detail, begun=begun) from None
        except asyncio.LimitOverrunError:
            raise BrokenAnswer("bad_answer", "a line or head of the answer is too long") from None
        except OSError as error:
            raise LostConnection(f"the connection broke: {error.strerror}", begun=self._begun) from error
        self._begun = True
        if not found.endswith(b"\r\n"):
            raise BrokenAnswer(
                "bad_answer", "a line of the answer ends without a carriage return (a bad head or chunk)"
            )
        return found


def _parse_head(lines: list[bytes]) -> Head:
    match = _STATUS.fullmatch(lines[0]) if lines else None
    if match is None:
        raise BrokenAnswer("bad_answer", "the answer does not begin with an HTTP/1 status line")
    status = int(match[2])
    headers = _parse_headers(lines[1:])
    encodings = headers.get(b"transfer-encoding", b"").lower()
    if encodings not in {b"", b"chunked"}:
        raise BrokenAnswer("bad_answer", "the answer has a Transfer-Encoding other than chunked")
    chunked = encodings == b"chunked" and status not in _NO_BODY
    length = 0 if status in _NO_BODY or status in _INFORMATION else _length(headers, chunked=chunked)
    options = headers.get(b"connection", b"").lower()
    persistent = b"close" not in options if match[1] == b"1.1" else b"keep-alive" in options
    content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    return Head(status, content_type, length, chunked, persistent and (chunked or length is not None))


def _parse_headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or b"\0" in value or b"\n" in value or b"\r" in value:
            raise BrokenAnswer("bad_answer", "a header of the answer is malformed")
        name, value = name.lower(), value.strip(b" \t")
        if name in {b"content-length", b"transfer-encoding"} and headers.get(name, value) != value:
            raise BrokenAnswer("bad_answer", "Content-Length or Transfer-Encoding come twice")
        headers[name] = value
    return headers


def _length(headers: dict[bytes, bytes], *, chunked: bool) -> int | None:
    raw = headers.get(b"content-length")
    if raw is None:
        return None
    if chunked:
        raise BrokenAnswer("bad_answer", "Content-Length and Transfer-Encoding exclude each other")
    if not _LENGTH.fullmatch(raw):
        raise BrokenAnswer("bad_answer", "bad Content-Length")
    return int(raw)


def _chunk_size(line: bytes) -> int:
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise BrokenAnswer("bad_answer", "bad size of a chunk")
    return int(match[1], 16)
