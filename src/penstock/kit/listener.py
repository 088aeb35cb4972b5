"""HTTP/1.1 listeners on aiohttp's low-level server: one parser and one set of bounds for the api and the gateway.

Both must read the same bytes in the same way, or a request that one of them lets pass becomes two for the other. The
parser refuses what could be read in two ways; the refusal leaves in the usual envelope and the connection is closed.
"""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler

from penstock.kit.errors import Invalid
from penstock.kit.sent import CLOSED
from penstock.kit.telemetry import correlation_id, logger
from penstock.wire.rest import ErrorBody, ErrorDetail

#: A head must be complete so long after its first byte, and may have so many bytes in all.
HEAD_S: Final = 10.0
HEAD_BYTES_MAX: Final = 64 << 10
_FIELD_BYTES_MAX: Final = 16 << 10
_FIELDS_MAX: Final = 128
_BACKLOG: Final = 1024
_HANDSHAKE_S: Final = 10.0
#: After the time for a stop, a handler has so long to heed its cancellation.
_CANCELLED_S: Final = 1.0
_QUOTED: Final = re.compile(r"b['\"]|\n| when reading")
_MESSAGE_MAX: Final = 120

_log = logger(__name__)

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def envelope(
    status: int, code: str, message: str, *, field: str | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The one shape of every failure."""
    detail = ErrorDetail(code=code, message=message, field=field, correlation_id=correlation_id())
    return web.Response(
        status=status,
        body=msgspec.json.encode(ErrorBody(error=detail)),
        content_type="application/json",
        headers={
            "X-Correlation-Id": detail.correlation_id,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **(headers or {}),
        },
    )


class Connection(RequestHandler):
    """One client's connection."""

    __slots__ = ("_body", "_head_bytes", "_head_timer", "_listener", "_on_lost", "_stall_timer")

    def __init__(self, manager: "Listener", **options: Any) -> None:
        super().__init__(manager, **options)
        self._listener = manager
        #: Of the request that was read last.
        self._body: StreamReader = EMPTY_PAYLOAD
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] | None = None
        self._stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the client in, or end the connection if there are too many."""
        super().connection_made(transport)
        if self._listener.crowded:
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Bytes of the client. Those that complete no head, and belong to no body, are counted."""
        before, of_body = self._request_count, not self._body.is_eof()
        super().data_received(data)
        if self._request_count != before:
            self._end_head()
            self._follow_body(self._messages[-1][1])
        elif data and not of_body and not self._upgraded:
            self._count_head(len(data))

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._end_head()
        self._end_stall()
        if self._on_lost is not None:
            self._on_lost()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        if self._listener.stall_s is not None and self.transport is not None:
            self._watch_stall(self.transport, self._listener.stall_s)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._end_stall()

    def _watch_stall(self, transport: asyncio.Transport, stall_s: float, before: int | None = None) -> None:
        """End a connection whose client has read nothing since the last look."""
        waiting = transport.get_write_buffer_size()
        if before is not None and waiting >= before:
            transport.abort()
        else:
            self._stall_timer = self._loop.call_later(stall_s, self._watch_stall, transport, stall_s, waiting)

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def close(self) -> None:
        """Take no further request. One that is under way is read to its end."""
        if not self._request_in_progress:
            super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """Let the request under way end, its body included; then cancel it."""
        if self._request_in_progress:
            self._handler_waiter = self._loop.create_future()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(timeout):
                        await self._handler_waiter
            finally:
                self._handler_waiter = None
        await super().shutdown(_CANCELLED_S)

    def break_off(self) -> None:
        """End the connection at once, without what is not sent yet: the response never looks complete."""
        if self.transport is not None:
            self.transport.abort()

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Call this when the client is gone, instead of the callback before."""
        self._on_lost = on_lost

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Malformed requests and bugs; the connection is closed."""
        if request.writer.output_size > 0:
            if not isinstance(exc, ConnectionError):
                _log.error("request_failed", exc_info=exc)
            self.break_off()
            raise ConnectionError("the response has begun already") from exc
        if status < 500 or isinstance(exc, web.RequestPayloadError):
            self._refuse(min(status, 400), sentence(message or str(exc)))
            return CLOSED
        _log.error("request_failed", exc_info=exc)
        response = envelope(500, "internal", "something went wrong on our side; quote the correlation id")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Failures outside of handlers. A client's malformed body is none of ours."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _follow_body(self, body: StreamReader) -> None:
        """The parser has another message. If the body before it has not ended, that message is the parser's error, and
        whoever reads the body must hear of it."""
        if not self._body.is_eof():
            self._body.set_exception(web.RequestPayloadError("malformed body"))
        self._body = body

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_timer is None:
            self._head_timer = self._loop.call_later(HEAD_S, self._head_is_late)
        if self._head_bytes > HEAD_BYTES_MAX:
            if self._waiter is not None:
                self._refuse(431, f"the head of a request has at most {HEAD_BYTES_MAX} bytes")
            self.force_close()

    def _head_is_late(self) -> None:
        """End a connection that waits for nothing but this head."""
        self._head_timer = None
        if self._waiter is not None:
            self.force_close()

    def _end_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that could not be read, whatever its version says."""
        detail = ErrorDetail(code="invalid_request", message=message, correlation_id=correlation_id())
        body = msgspec.json.encode(ErrorBody(error=detail))
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"X-Correlation-Id: {detail.correlation_id}\r\nCache-Control: no-store\r\n"
            "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
        )
        if self.transport is not None:
            self.transport.write(head.encode() + body)


class Listener(web.Server):
    """aiohttp's server with our answer to requests that cannot be parsed, and a bound on connections."""

    def __init__(
        self, handle: Handle, *, connections_max: int | None = None, stall_s: float | None = None, **options: Any
    ) -> None:
        super().__init__(handle, **options)
        self._connections_max = connections_max
        self.stall_s = stall_s

    def __call__(self) -> Connection:
        """The protocol of one connection."""
        return Connection(self, loop=self._loop, **self._kwargs)

    @property
    def crowded(self) -> bool:
        """Whether there are more connections than may be."""
        return self._connections_max is not None and len(self._connections) > self._connections_max


def sentence(message: str | None) -> str:
    """The parser's words without the bytes that it quotes, which may be a credential."""
    return f"malformed request: {_QUOTED.split((message or '')[:_MESSAGE_MAX], maxsplit=1)[0].rstrip(' :')}"


def listener(
    handle: Handle,
    *,
    idle_s: float,
    linger_s: float,
    cancels: bool = False,
    connections_max: int | None = None,
    stall_s: float | None = None,
) -> Listener:
    """A listener with its bounds. A connection may be idle for `idle_s`, and its client may read nothing of an answer
    for `stall_s`. After an answer the rest of the body is read and dropped for `linger_s`. `cancels` cancels the
    handling of a request whose client has gone."""
    return Listener(
        handle,
        connections_max=connections_max,
        stall_s=stall_s,
        handler_cancellation=cancels,
        loop=asyncio.get_running_loop(),
        access_log=None,
        keepalive_timeout=idle_s,
        max_line_size=_FIELD_BYTES_MAX,
        max_field_size=_FIELD_BYTES_MAX,
        max_headers=_FIELDS_MAX,
        lingering_time=linger_s,
        auto_decompress=False,
    )


async def listen(
    server: web.Server, host: str, port: int, *, tls: ssl.SSLContext | None, shared: bool = False
) -> asyncio.Server:
    """Open the sockets, or OSError. `shared` lets other processes of this user listen on the same port."""
    return await asyncio.get_running_loop().create_server(
        server,
        host,
        port,
        ssl=tls,
        ssl_handshake_timeout=_HANDSHAKE_S if tls else None,
        backlog=_BACKLOG,
        reuse_address=True,
        reuse_port=shared,
    )


def tls_context(cert: str, key: str, *, field: str) -> ssl.SSLContext | None:
    """The context of a public listener, None without a certificate; Invalid names the setting."""
    if not cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"{field} cannot be used: {error}", field=field) from error
    return context
