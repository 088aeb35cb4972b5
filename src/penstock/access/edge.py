"""The gateway's public listener: `/u/<allocation>/<port>/…`, `/ws/exec/<allocation>`, health, and what other domains
serve below prefixes of their own.

aiohttp's low-level server, without its router: two prefixes need none, and this is the hot path. Everything that is
refused leaves in the same envelope as the api's, and what could be read in two ways closes the connection.
"""

import itertools
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

import asyncpg
from aiohttp import HttpVersion11, hdrs, web
from prometheus_client import Counter

from penstock.access import credentials
from penstock.access.answers import refusal
from penstock.access.errors import OriginRefused, TooLarge
from penstock.access.execution import Executions
from penstock.access.headers import Forwarded
from penstock.access.proxy import Exchange, Proxy
from penstock.access.service import Access
from penstock.access.sessions import Sessions
from penstock.access.upstream import PortKey
from penstock.kit import queries
from penstock.kit.clients import Networks, client_address
from penstock.kit.errors import Invalid, NotFound, PenstockError, Unavailable
from penstock.kit.ids import is_id
from penstock.kit.listener import Listener, envelope, listener
from penstock.kit.telemetry import correlate, correlation_id, logger, span

_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_CORRELATION: Final = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_EXECUTE: Final = "/ws/exec/"
_ALIVE: Final = "/healthz"
_READY: Final = "/readyz"
_IDLE_S: Final = 75.0
_LINGER_S: Final = 2.0
_ONCE: Final = (hdrs.HOST, hdrs.AUTHORIZATION, hdrs.CONTENT_LENGTH, hdrs.TRANSFER_ENCODING)
#: Correlation ids of requests that bring none: 52 random bits of this process, then a count.
_PROCESS: Final = f"cor_{os.urandom(7).hex()[:13]}"
_requests: Final = itertools.count()

_log = logger(__name__)
_answers = Counter("penstock_gateway_requests", "Requests by kind and how they ended", ["kind", "outcome"])


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """What the public listener was told."""

    allowed_origins: frozenset[str] = frozenset()
    trusted_proxies: Networks = ()
    upload_bytes_max: int = 64 << 30


class Edge:
    """Answers requests."""

    def __init__(
        self,
        access: Access,
        sessions: Sessions,
        proxy: Proxy,
        executions: Executions,
        *,
        config: EdgeConfig,
        ready: Callable[[], Awaitable[bool]],
        others: Mapping[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] | None = None,
    ) -> None:
        self._access = access
        self._sessions = sessions
        self._proxy = proxy
        self._executions = executions
        self._config = config
        self._ready = ready
        self._others = others or {}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request. It has a task of its own, and so a context of its own."""
        given = request.headers.get("X-Correlation-Id")
        correlate(given if given and _CORRELATION.fullmatch(given) else f"{_PROCESS}{next(_requests):013x}")
        try:
            with span("gateway.request", method=request.method):
                return await self._route(request)
        except PenstockError as error:
            return _refuse(request, error)
        except web.HTTPBadRequest:
            # The only one that aiohttp raises by itself here.
            return _refuse(request, Invalid("not a proper WebSocket handshake", field="Sec-WebSocket-Key"))
        except (asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            _log.warning("database_away", error=repr(error))
            return _refuse(request, Unavailable("the database cannot answer now; try again", retry_after_s=1))

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        _check(request)
        if (other := self._others.get(path[: path.find("/", 1) + 1])) is not None:
            return await other(request)
        if path.startswith("/u/"):
            return await self._unit_port(request, path)
        return await self._plain(request, *path.split("?", 1))

    async def _plain(self, request: web.BaseRequest, path: str, query: str = "") -> web.StreamResponse:
        """Routes without query parameters."""
        if not path.startswith(_EXECUTE) and path not in (_ALIVE, _READY):
            raise NotFound("no such route")
        queries.read(query, ())
        if path == _ALIVE:
            return web.json_response({"ok": True})
        if path == _READY:
            ready = await self._ready()
            return web.json_response({"ok": ready}, status=200 if ready else 503)
        return await self._execute(request, path.removeprefix(_EXECUTE))

    async def _unit_port(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        place, mark, query = path.partition("?")
        pieces = place.split("/", 4)
        if len(pieces) < 4:
            raise NotFound("no such route")
        prefix = "/".join(pieces[:4])
        if len(pieces) == 4:
            return web.Response(status=308, headers={hdrs.LOCATION: f"{prefix}/{mark}{query}"})
        upgrade = _wants_websocket(request)
        if upgrade:
            self._check_origin(request)
        credential = credentials.for_port(request.headers, prefix, upgrade=upgrade)
        grant = await self._access.authorise(credential.authorization, credential.project, pieces[2])
        key = PortKey(grant.node_id, grant.unit_id, port_number(pieces[3]))
        await self._welcome_body(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError
        session = self._sessions.begin(grant, lambda _: transport.abort())
        try:
            return await self._proxy.carry(
                Exchange(
                    request=request,
                    key=key,
                    target=f"/{pieces[4]}{mark}{query}",
                    forwarded=self._forwarded(request, prefix),
                    upgrade=upgrade,
                )
            )
        finally:
            self._sessions.finish(session)

    async def _execute(self, request: web.BaseRequest, allocation_id: str) -> web.StreamResponse:
        if not _wants_websocket(request):
            return _upgrade_required("connect with a WebSocket")
        if request.headers.get(hdrs.SEC_WEBSOCKET_VERSION) != "13":
            return _upgrade_required("only version 13 of WebSocket is understood")
        self._check_origin(request)
        credential = credentials.for_command(request.headers)
        return await self._executions.serve(request, credential.authorization, credential.project, allocation_id)

    def _check_origin(self, request: web.BaseRequest) -> None:
        """Browsers send Origin on every WebSocket: only our own and allowed pages may connect."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or origin in self._config.allowed_origins:
            return
        if origin.partition("://")[2].lower() != request.headers[hdrs.HOST].lower():
            raise OriginRefused("this origin may not open WebSockets here", field="Origin")

    async def _welcome_body(self, request: web.BaseRequest) -> None:
        """Refuse a body that is too large before it comes; tell a client that waits for our word to go on."""
        length = request.headers.get(hdrs.CONTENT_LENGTH)
        if length is not None and int(length) > self._config.upload_bytes_max:
            raise TooLarge(f"body: max {self._config.upload_bytes_max} bytes", field="body")
        expected = request.headers.get(hdrs.EXPECT)
        if expected is None or request.version < HttpVersion11:
            return
        if expected.lower() != "100-continue":
            raise Invalid("Expect: only 100-continue is understood", field="Expect")
        if request.transport is not None and not request.content.is_eof():
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _forwarded(self, request: web.BaseRequest, prefix: str) -> Forwarded:
        headers = request.headers
        peer = request.protocol.peername
        client = address = peer[0] if isinstance(peer, tuple) else ""
        scheme = "https" if request.protocol.ssl_context is not None else "http"
        if chain := ",".join(headers.getall("X-Forwarded-For", ())):
            client = client_address(address, chain.encode(), self._config.trusted_proxies)
            if client != address and headers.get("X-Forwarded-Proto") in ("http", "https"):
                scheme = headers["X-Forwarded-Proto"]
        return Forwarded(client, scheme, headers[hdrs.HOST], prefix, correlation_id())


def port_number(text: str) -> int:
    """The port in a path."""
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 1 <= int(text) <= 65535:
        raise Invalid("port must be a number from 1 to 65535", field="port")
    return int(text)


def realm(path: str) -> str:
    """One per unit: a browser that was given the key for one of them asks before it gives it to another."""
    unit = path.removeprefix("/u/").partition("/")[0]
    return f"Penstock {unit}" if is_id("alc", unit) else "Penstock"


def _upgrade_required(message: str) -> web.Response:
    headers = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    return envelope(426, "upgrade_required", message, headers=headers)


def _wants_websocket(request: web.BaseRequest) -> bool:
    return request.headers.get(hdrs.UPGRADE, "").lower() == "websocket" and request.method == hdrs.METH_GET


def _check(request: web.BaseRequest) -> None:
    """What the parser lets pass and we do not."""
    headers = request.headers
    if not _HOST.fullmatch(headers.get(hdrs.HOST, "")):
        raise Invalid("bad Host header", field="Host")
    for name in _ONCE:
        if name in headers and len(headers.getall(name)) > 1:
            raise Invalid(f"{name} may come once only", field=str(name))
    if hdrs.TRANSFER_ENCODING in headers and headers[hdrs.TRANSFER_ENCODING].lower() != "chunked":
        raise Invalid("Transfer-Encoding: only chunked is understood", field="Transfer-Encoding")


def _refuse(request: web.BaseRequest, error: PenstockError) -> web.Response:
    """The error's answer. One that has begun already can only be broken off."""
    _answers.labels("refused", error.code).inc()
    if request.writer.output_size > 0:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError from error
    response = refusal(error, realm=realm(request.raw_path))
    if isinstance(error, Invalid | TooLarge) or not request.content.is_eof():
        # What follows on this connection may be a body that nobody will read, or worse.
        response.force_close()
    return response


def server(edge: Edge) -> Listener:
    """The server of the public listener."""
    return listener(edge.handle, idle_s=_IDLE_S, linger_s=_LINGER_S, cancels=True)
