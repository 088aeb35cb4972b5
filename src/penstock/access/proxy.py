"""Requests to unit ports: streams them to the unit and the answer back, whatever their size, holding little of either.

A client that leaves cancels its exchange. A response that breaks off in the middle breaks off for the client too, and
never looks complete.
"""

import asyncio
from dataclasses import dataclass
from typing import Final

from aiohttp import ClientError, HttpVersion11, SocketTimeoutError, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from penstock.access.errors import BadResponse, TooLarge, UnitTimeout, from_abort
from penstock.access.headers import Forwarded, request_head, response_head
from penstock.access.sent import Sent
from penstock.access.upstream import Collected, Connection, Connections, PortKey
from penstock.kit.errors import PenstockError
from penstock.kit.stream import StreamAborted
from penstock.kit.streamio import Pump
from penstock.kit.telemetry import logger

_log = logger(__name__)

_REPEATABLE: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_NO_BODY: Final = frozenset({204, 304})
_FAILURES: Final = (ClientError, HttpProcessingError, StreamAborted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One request and where it goes."""

    request: web.BaseRequest
    key: PortKey
    target: bytes
    forwarded: Forwarded
    upgrade: bool

    @property
    def head(self) -> bytes:
        """What the unit gets before the body."""
        request = self.request
        return request_head(request.method, self.target, request.raw_headers, self.forwarded, upgrade=self.upgrade)


class Proxy:
    """Carries exchanges out."""

    def __init__(self, connections: Connections, *, idle_s: float, upload_bytes_max: int) -> None:
        self._connections = connections
        self._idle_s = idle_s
        self._upload_bytes_max = upload_bytes_max

    async def carry(self, exchange: Exchange) -> web.StreamResponse:
        """The whole exchange; the response has been sent when this returns."""
        body = exchange.request.content
        repeatable = exchange.request.method in _REPEATABLE and body.is_eof() and not exchange.upgrade
        connection = await self._connections.acquire(exchange.key, repeatable=repeatable)
        buffered = body.read_nowait() if body.is_eof() else b""
        try:
            return await self._attempt(exchange, connection, buffered)
        except _Stale as stale:
            if not repeatable:
                raise stale.failure from stale
        connection = await self._connections.fresh(exchange.key)
        return await self._attempt(exchange, connection, buffered)

    async def _attempt(self, exchange: Exchange, connection: Connection, buffered: bytes) -> web.StreamResponse:
        """Send the request and relay the response. Only a connection on which both are complete is kept."""
        request = exchange.request
        connection.begin(without_body=request.method == hdrs.METH_HEAD, idle_s=self._idle_s)
        connection.write(exchange.head)
        if not request.content.is_eof():
            return await self._attempt_uploading(exchange, connection)
        _write_body(connection, request, buffered)
        try:
            response = await self._finish(exchange, connection)
        except BaseException:
            connection.close()
            raise
        self._connections.release(connection)
        return response

    async def _attempt_uploading(self, exchange: Exchange, connection: Connection) -> web.StreamResponse:
        """The same while the body still comes in; the unit may answer before it has all of it."""
        uploading = asyncio.create_task(self._upload(connection, exchange.request))
        keep = False
        try:
            response = await self._finish(exchange, connection)
            keep = uploading.done() and uploading.exception() is None
        except PenstockError:
            if uploading.done():
                uploading.result()
            raise
        else:
            return response
        finally:
            uploading.cancel()
            await asyncio.gather(uploading, return_exceptions=True)
            if keep:
                self._connections.release(connection)
            else:
                connection.close()

    async def _finish(self, exchange: Exchange, connection: Connection) -> web.StreamResponse:
        message, payload = await self._response(connection)
        if message.code == 101:
            return await _splice(exchange, connection, message)
        return await _relay(exchange, connection, message, payload)

    async def _response(self, connection: Connection) -> tuple[RawResponseMessage, StreamReader]:
        try:
            return await connection.response()
        except SocketTimeoutError as error:
            raise UnitTimeout(f"the unit did not answer within {self._idle_s:g} s") from error
        except _FAILURES as error:
            failure = _failure(connection)
            if connection.reused and isinstance(failure, BadResponse):
                raise _Stale(failure) from error
            raise failure from error

    async def _upload(self, connection: Connection, request: web.BaseRequest) -> None:
        chunked = hdrs.CONTENT_LENGTH not in request.headers
        size = 0
        async for chunk in request.content.iter_any():
            size += len(chunk)
            if size > self._upload_bytes_max:
                connection.close()
                raise TooLarge(f"body: max {self._upload_bytes_max} bytes", field="body")
            connection.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
            await connection.drain()
        if chunked:
            connection.write(b"0\r\n\r\n")


class _Stale(Exception):
    """A kept connection was closed before the unit answered: it may not have seen the request."""

    def __init__(self, failure: PenstockError) -> None:
        super().__init__(failure.detail)
        self.failure = failure


def _failure(connection: Connection) -> PenstockError:
    """Why there was no response."""
    if connection.error is not None:
        return from_abort(connection.error, port=connection.key.port)
    return BadResponse("the unit closed the connection or did not answer in HTTP")


def _write_body(connection: Connection, request: web.BaseRequest, body: bytes) -> None:
    if hdrs.TRANSFER_ENCODING in request.headers:
        connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")
    elif body:
        connection.write(body)


async def _relay(
    exchange: Exchange, connection: Connection, message: RawResponseMessage, payload: StreamReader
) -> web.StreamResponse:
    """Send the response on. The first bytes of the body leave together with the head."""
    request = exchange.request
    empty = request.method == hdrs.METH_HEAD or message.code in _NO_BODY
    sized = empty or hdrs.CONTENT_LENGTH in message.headers
    chunked = not sized and request.version >= HttpVersion11
    keep_alive = request.keep_alive and (sized or chunked)
    extra = [b"Connection: keep-alive\r\n" if keep_alive else b"Connection: close\r\n"]
    if chunked:
        extra.append(b"Transfer-Encoding: chunked\r\n")
    out = response_head(message.code, message.reason, message.raw_headers, exchange.forwarded, extra)
    writer = request.writer
    try:
        while not empty and (chunk := await payload.readany()):
            await writer.write(out + (b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk))
            out = b""
        if not sized and not message.chunked and connection.error is not None:
            raise connection.error
        await writer.write(out + (b"0\r\n\r\n" if chunked else b""))
    except (*_FAILURES, TimeoutError) as error:
        # It cannot be completed, and the client must see that.
        _log.info("response_broke_off", error=repr(error))
        connection.close()
        if request.transport is not None:
            request.transport.abort()
    return Sent(keep_alive=keep_alive)


async def _splice(exchange: Exchange, connection: Connection, message: RawResponseMessage) -> web.StreamResponse:
    """From here on bytes pass both ways untouched: pings, close codes and extensions are between client and unit."""
    request, handler = exchange.request, exchange.request.protocol
    stream, from_unit = connection.upgrade()
    if not exchange.upgrade or request.transport is None:
        stream.abort("cancelled")
        raise BadResponse("the unit switched protocols without being asked")
    lines = [b"Connection: Upgrade\r\n", b"Upgrade: websocket\r\n"]
    head = response_head(101, message.reason, message.raw_headers, exchange.forwarded, lines)
    early = Collected()
    handler.set_parser(early)  # pyright: ignore[reportArgumentType]
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def lost(error: Exception | None) -> None:
        if not over.done():
            over.set_result(None)
        handler.connection_lost(error)

    transport = request.transport
    transport.write(head + from_unit)
    pump = Pump(stream, lost=lost)
    transport.set_protocol(pump)
    pump.connection_made(transport)
    if early.data:
        pump.data_received(bytes(early.data))
    try:
        await over
    finally:
        transport.abort()
        stream.abort("cancelled")
    return Sent(keep_alive=False)
