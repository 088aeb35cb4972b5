"""An ASGI application behind a `Listener`: one request, its scope, its body on demand, its answer.

An answer of one piece is one write, without the response objects of aiohttp: this is the api's hot path.
"""

import asyncio
import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.client_exceptions import ClientPayloadError
from aiohttp.http_exceptions import HttpProcessingError

from penstock.kit.listener import Connection
from penstock.kit.sent import CLOSED, KEPT

_ASGI: Final = {"version": "3.0", "spec_version": "2.3"}
_GONE: Final = {"type": "http.disconnect"}
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
#: Bodies up to this size are copied to leave with their head.
_JOINED_BYTES_MAX: Final = 64 << 10
#: A body that breaks off or is malformed.
_BROKEN: Final = (OSError, ClientPayloadError, HttpProcessingError, web.RequestPayloadError)


class Bridge:
    """Hands requests to an ASGI application."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request."""
        exchange = _Exchange(request)
        try:
            await self._app(scope_of(request), exchange.receive, exchange.send)
        finally:
            exchange.connection.watch(None)
        return exchange.result()


def scope_of(request: web.BaseRequest) -> dict[str, Any]:
    """The request as ASGI describes it."""
    target, _, query = request.raw_path.partition("?")
    if not target.startswith("/"):
        target = _path(target)
    protocol = request.protocol
    return {
        "type": "http",
        "asgi": _ASGI,
        "http_version": "1.1" if request.version == HttpVersion11 else "1.0",
        "scheme": "http" if protocol.ssl_context is None else "https",
        "method": request.method,
        "path": _decoded(target) if "%" in target else target,
        "raw_path": target.encode(errors="surrogateescape"),
        "query_string": query.encode(errors="surrogateescape"),
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "client": _address(protocol.peername),
        "server": _address(protocol.sockname),
    }


def _path(target: str) -> str:
    """The path in a target of absolute form. Other targets stay as they are, and no route has them."""
    scheme, mark, rest = target.partition("://")
    if not mark or scheme.lower() not in ("http", "https"):
        return target
    return "/" + rest.partition("/")[2]


def _decoded(target: str) -> str:
    """Bytes that are no text stay recognisable as such; the edge refuses them."""
    return unquote_to_bytes(target.encode(errors="surrogateescape")).decode(errors="surrogateescape")


def _address(name: object) -> tuple[str, int] | None:
    return (name[0], name[1]) if isinstance(name, tuple) else None


class _Exchange:
    """The two directions of one request."""

    __slots__ = ("_begun", "_end", "_ended", "_keeps", "_read", "_request", "_start", "_welcomed", "connection")

    def __init__(self, request: web.BaseRequest) -> None:
        assert isinstance(request.protocol, Connection)
        self.connection = request.protocol
        self._request = request
        self._start: Any = None
        self._keeps = False
        #: The body was read, an interim response was sent, the response has begun, it has ended.
        self._read = False
        self._welcomed = False
        self._begun = False
        self._ended = False
        self._end: asyncio.Event | None = None

    def result(self) -> web.StreamResponse:
        """How the connection goes on."""
        if not self._ended and self.connection.connected:
            raise RuntimeError("the application ended without a whole response")
        return KEPT if self._keeps else CLOSED

    async def receive(self) -> dict[str, Any]:
        """The next piece of the body, then the end: of the response, or the client's leave."""
        if self._read:
            await self._until_end()
            return _GONE
        if not self.connection.connected:
            return _GONE
        self._welcome()
        content = self._request.content
        try:
            piece = await content.readany()
        except _BROKEN:
            self._read = True
            return _GONE
        self._read = content.at_eof()
        return {"type": "http.request", "body": piece, "more_body": not self._read}

    async def _until_end(self) -> None:
        if self._ended or not self.connection.connected:
            return
        if self._end is None:
            self._end = asyncio.Event()
            self.connection.watch(self._end.set)
        await self._end.wait()

    def _welcome(self) -> None:
        """Tell a client that waits with its body to go on: whoever asks for the body wants it."""
        if self._welcomed:
            return
        self._welcomed = True
        transport = self.connection.transport
        if self._expects() and not self._begun and transport is not None:
            transport.write(_CONTINUE)

    def _expects(self) -> bool:
        """Whether the client waits with its body for an interim response."""
        request = self._request
        expected = request.headers.get(hdrs.EXPECT)
        return (
            expected is not None
            and expected.lower() == "100-continue"
            and request.version >= HttpVersion11
            and not request.content.is_eof()
        )

    async def send(self, message: Any) -> None:
        """The head, held back until the body begins; then the body. A client that is gone is told nothing."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self.connection.connected:
            # An application that waits for nothing else must not keep the loop.
            await asyncio.sleep(0)
            return
        piece, more = message.get("body", b""), message.get("more_body", False)
        try:
            if self._begun:
                await self._go_on(piece, more=more)
            elif more:
                await self._begin(piece)
            else:
                await self._answer(piece)
        except OSError:
            self._keeps = False

    async def _answer(self, body: bytes) -> None:
        """A response of one piece."""
        head, length = self._head(len(body))
        if self._bodiless():
            body = b""
        elif length != len(body):
            raise RuntimeError(f"the body has {len(body)} bytes, its head says {length}")
        transport = self.connection.transport
        if transport is None:
            return
        self._begun = True
        if len(body) > _JOINED_BYTES_MAX:
            transport.write(head)
            transport.write(body)
        else:
            transport.write(head + body)
        self._request.writer.output_size += len(head) + len(body)
        await self._finish()

    async def _begin(self, piece: bytes) -> None:
        """The head of a response of many pieces, and the first of them."""
        head, length = self._head(None)
        transport, writer = self.connection.transport, self._request.writer
        if transport is None:
            return
        self._begun = True
        transport.write(head)
        writer.output_size += len(head)
        if self._bodiless():
            writer.length = 0
        elif length is not None:
            writer.length = length
        elif self._request.version >= HttpVersion11:
            writer.enable_chunking()
        await self._go_on(piece, more=True)

    async def _go_on(self, piece: bytes, *, more: bool) -> None:
        writer = self._request.writer
        if piece:
            await writer.write(piece)
        if not more:
            await writer.write_eof()
            if writer.length:
                self._keeps = False
            await self._finish()

    async def _finish(self) -> None:
        self._ended = True
        if self._end is not None:
            self._end.set()
        if self.connection.writing_paused:
            await self._request.writer.drain()

    def _bodiless(self) -> bool:
        status = self._start["status"]
        return self._request.method == hdrs.METH_HEAD or status in (204, 304)

    def _head(self, size: int | None) -> tuple[bytes, int | None]:
        """The head of a response whose body has this size, if that is known, and the length that it announces."""
        status, length, keeps = self._start["status"], None, self._request.keep_alive
        lines = [_status_line(status)]
        for name, value in self._start["headers"]:
            if name == b"connection":
                keeps = keeps and value.lower() != b"close"
                continue
            if name == b"content-length":
                if status == 204:
                    continue
                length = int(value)
            lines.append(b"%b: %b" % (name, value))
        if length is None and not self._bodiless():
            length = self._frame(lines, size)
            keeps = keeps and (length is not None or self._request.version >= HttpVersion11)
        self._keeps = keeps = keeps and self._in_step()
        if not keeps:
            lines.append(b"connection: close")
        elif self._request.version < HttpVersion11:
            lines.append(b"connection: keep-alive")
        return _joined(lines) + _stamp(int(time.time())), length

    def _in_step(self) -> bool:
        """Whether it is certain where the next request begins: not after a malformed body, after one that the client
        may leave out because it was not asked for, nor after a request for another protocol."""
        request = self._request
        if request.content.exception() is not None or hdrs.UPGRADE in request.headers:
            return False
        return self._welcomed or not self._expects()

    def _frame(self, lines: list[bytes], size: int | None) -> int | None:
        """Announce where the body ends; without a length and chunks the end of the connection says it."""
        if size is not None:
            lines.append(b"content-length: %d" % size)
        elif self._request.version >= HttpVersion11:
            lines.append(b"transfer-encoding: chunked")
        return size


def _joined(lines: list[bytes]) -> bytes:
    """These lines of a head. A line break within one of them would be somebody's forgery."""
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
        raise ValueError("a control character in a header of the response")
    return head


@lru_cache(maxsize=128)
def _status_line(status: int) -> bytes:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = ""
    return f"HTTP/1.1 {status} {reason}".encode()


@lru_cache(maxsize=1)
def _stamp(now_s: int) -> bytes:
    """The end of every head."""
    return f"\r\nserver: penstock\r\ndate: {formatdate(now_s, usegmt=True)}\r\n\r\n".encode()
