"""Requests to unit ports: streams them to the unit and the answer back, whatever their size, holding little of either.

A client that leaves cancels its exchange. A response that breaks off in the middle breaks off for the client too, and
never looks complete.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, NamedTuple

from aiohttp import ClientError, HttpVersion11, SocketTimeoutError, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from penstock.access.errors import BadResponse, TooLarge, UnitTimeout, from_abort
from penstock.access.headers import Forwarded, SimpleHead, request_head, response_head
from penstock.access.upstream import Collected, Connection, Connections, Disconnected, PortKey, Progress
from penstock.kit.errors import PenstockError
from penstock.kit.sent import CLOSED, KEPT
from penstock.kit.stream import StreamAborted
from penstock.kit.streamio import Pump
from penstock.kit.telemetry import logger

_log = logger(__name__)

_REPEATABLE: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_NO_BODY: Final = frozenset({204, 304})
_FAILURES: Final = (ClientError, HttpProcessingError, StreamAborted, Disconnected)


class Exchange(NamedTuple):
    """One request and where it goes."""

    request: web.BaseRequest
    key: PortKey
    target: str
    forwarded: Forwarded
    upgrade: bool


class Proxy:
    """Carries exchanges out."""

    def __init__(self, connections: Connections, *, upload_bytes_max: int) -> None:
        self._connections = connections
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
        head_only = request.method == hdrs.METH_HEAD
        relay = None if head_only or exchange.upgrade else _Relay(exchange)
        connection.begin(relay, without_body=head_only)
        connection.write(
            request_head(
                request.method, exchange.target, request.raw_headers, exchange.forwarded, upgrade=exchange.upgrade
            )
        )
        if not request.content.is_eof():
            return await self._attempt_uploading(exchange, connection, relay)
        _write_body(connection, request, buffered)
        try:
            response = await _finish(exchange, connection, relay)
        except BaseException:
            self._connections.discard(connection)
            raise
        self._connections.release(connection)
        return response

    async def _attempt_uploading(
        self, exchange: Exchange, connection: Connection, relay: "_Relay | None"
    ) -> web.StreamResponse:
        """The same while the body still comes in; the unit may answer before it has all of it."""
        uploading = asyncio.create_task(self._upload(connection, exchange.request))
        keep = False
        try:
            response = await _finish(exchange, connection, relay)
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
                self._connections.discard(connection)

    async def _upload(self, connection: Connection, request: web.BaseRequest) -> None:
        chunked = hdrs.CONTENT_LENGTH not in request.headers
        try:
            async for chunk in self._bounded(request.content):
                connection.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
                await connection.drain()
        except (TooLarge, web.RequestPayloadError):
            # The unit would wait for the rest.
            connection.close()
            raise
        if chunked:
            connection.write(b"0\r\n\r\n")

    async def _bounded(self, content: StreamReader) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in content.iter_any():
            size += len(chunk)
            if size > self._upload_bytes_max:
                raise TooLarge(f"body: max {self._upload_bytes_max} bytes", field="body")
            yield chunk


class _Stale(Exception):
    """A kept connection was closed before the unit answered: it may not have seen the request."""

    def __init__(self, failure: PenstockError) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class _Relay:
    """Writes a simple response to the client as it comes."""

    __slots__ = ("_exchange", "_transport", "begun", "keep_alive")

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._transport = exchange.request.transport
        self.begun = False
        self.keep_alive = exchange.request.keep_alive

    def head(self, head: SimpleHead) -> None:
        """Begin; the head leaves together with the first of the body."""
        self.begun = True
        correlation_id = self._exchange.forwarded.correlation_id.encode()
        fate = b"keep-alive" if self.keep_alive else b"close"
        self._write(b"%b\r\nX-Correlation-Id: %b\r\nConnection: %b\r\n\r\n" % (head.lines, correlation_id, fate))

    def body(self, data: bytes | memoryview) -> bool:
        """Go on."""
        self._write(data)
        return not self._exchange.request.protocol.writing_paused

    def _write(self, data: bytes | memoryview) -> None:
        # A client that has left cancels the exchange; until that is done there is nowhere to write to.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def _finish(exchange: Exchange, connection: Connection, relay: _Relay | None) -> web.StreamResponse:
    """Wait for the response and for its way to the client."""
    try:
        while (found := await connection.progress()) is Progress.CONGESTED:
            await exchange.request.writer.drain()
            connection.stream.resume()
        if found is Progress.PARSED:
            message, payload = await connection.parsed()
        else:
            return KEPT if relay is not None and relay.keep_alive else CLOSED
    except (*_FAILURES, TimeoutError) as error:
        if relay is not None and relay.begun:
            return _broken_off(exchange.request, error)
        raise _reason(connection, error) from error
    if message.code == 101:
        return await _splice(exchange, connection, message)
    return await _relay_parsed(exchange, connection, message, payload)


def _reason(connection: Connection, error: Exception) -> Exception:
    """Why there was no response."""
    if isinstance(error, SocketTimeoutError | TimeoutError):
        return UnitTimeout("the unit did not answer in time")
    abort = error.error if isinstance(error, Disconnected) else connection.error
    failure = BadResponse("the unit closed the connection or did not answer in HTTP")
    if abort is not None:
        failure = from_abort(abort, port=connection.key.port)
    return _Stale(failure) if connection.reused and isinstance(failure, BadResponse) else failure


def _broken_off(request: web.BaseRequest, error: Exception) -> web.StreamResponse:
    """The response cannot be completed, and the client must see that."""
    _log.info("response_broke_off", error=repr(error))
    if request.transport is not None:
        request.transport.abort()
    return CLOSED


def _write_body(connection: Connection, request: web.BaseRequest, body: bytes) -> None:
    if hdrs.TRANSFER_ENCODING in request.headers:
        connection.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")
    elif body:
        connection.write(body)


async def _relay_parsed(
    exchange: Exchange, connection: Connection, message: RawResponseMessage, payload: StreamReader
) -> web.StreamResponse:
    """Send a response on that aiohttp's parser reads."""
    request = exchange.request
    empty = request.method == hdrs.METH_HEAD or message.code in _NO_BODY
    sized = empty or hdrs.CONTENT_LENGTH in message.headers
    chunked = not sized and request.version >= HttpVersion11
    keep_alive = request.keep_alive and (sized or chunked)
    framing = b"Connection: keep-alive\r\n" if keep_alive else b"Connection: close\r\n"
    if chunked:
        framing += b"Transfer-Encoding: chunked\r\n"
    reason = message.reason.encode("utf-8", "surrogateescape")
    out = response_head(message.code, reason, message.raw_headers, exchange.forwarded, framing)
    writer = request.writer
    try:
        while not empty and (chunk := await payload.readany()):
            await writer.write(out + (b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk))
            out = b""
        if not sized and not message.chunked and connection.error is not None:
            raise connection.error
        await writer.write(out + (b"0\r\n\r\n" if chunked else b""))
    except (*_FAILURES, TimeoutError) as error:
        connection.close()
        return _broken_off(request, error)
    return KEPT if keep_alive else CLOSED


async def _splice(exchange: Exchange, connection: Connection, message: RawResponseMessage) -> web.StreamResponse:
    """From here on bytes pass both ways untouched: pings, close codes and extensions are between client and unit."""
    request, handler = exchange.request, exchange.request.protocol
    stream, from_unit = connection.upgrade()
    if not exchange.upgrade or request.transport is None:
        stream.abort("cancelled")
        raise BadResponse("the unit switched protocols without being asked")
    framing = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    head = response_head(101, b"Switching Protocols", message.raw_headers, exchange.forwarded, framing)
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
    return CLOSED
