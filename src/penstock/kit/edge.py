"""What happens to a request before any route sees it, as one ASGI layer around the application.

It refuses ambiguous requests (bad Host, Transfer-Encoding, too large a body), gives every request a correlation id that
is echoed and logged, reads the few headers that the rest needs in one pass, and bounds the body in size and time.
"""

import asyncio
import ipaddress
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, cast
from urllib.parse import unquote_to_bytes

import msgspec
from litestar import Request
from litestar.types import ASGIApp, Empty, Message, Receive, Scope, Send
from prometheus_client import Histogram

from penstock.kit import jsonbody
from penstock.kit.clients import client_address
from penstock.kit.errors import Invalid, Unauthenticated
from penstock.kit.exchanges import Exchange, Exchanges
from penstock.kit.telemetry import correlate, span
from penstock.wire.rest import ErrorBody, ErrorDetail

BODY_BYTES_MAX: Final = 1 << 20
#: Of those who are not known yet.
PUBLIC_BODY_BYTES_MAX: Final = 64 << 10
BODY_TIMEOUT_S: Final = 8.0

_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_CORRELATION: Final = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"})
_seconds = Histogram(
    "penstock_http_request_seconds",
    "Requests by method and status",
    ["method", "status"],
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
)
_decoders: dict[object, msgspec.json.Decoder[Any]] = {}


class Rejected(Exception):
    """A request that HTTP itself has a status for; `close` ends the connection with the answer."""

    def __init__(self, status: int, code: str, message: str, *, close: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.close = close


@dataclass(slots=True)
class Head:
    """The headers that matter, read once."""

    client: str = ""
    #: As it was sent: routing folds slashes.
    path: str = ""
    host: bytes | None = None
    authorization: str | None = None
    project: str | None = None
    content_type: bytes = b""
    content_length: bytes | None = None
    transfer_encoding: bytes | None = None
    forwarded_for: bytes | None = None
    correlation_id: str = ""
    repeated: bool = False
    #: What a body may have on this path, and how long it may take.
    body_bytes_max: int = BODY_BYTES_MAX
    body_timeout_s: float = BODY_TIMEOUT_S

    def limit_body(self, bytes_max: int) -> None:
        """Take less of a body than elsewhere; Rejected if more is announced."""
        self.body_bytes_max = bytes_max
        if self.content_length is not None and int(self.content_length) > bytes_max:
            raise too_large(bytes_max)


def read_head(headers: Sequence[tuple[bytes, bytes]]) -> Head:
    """One pass over the headers. What may not come twice and does is noted."""
    head = Head()
    for name, value in headers:
        if name == b"host":
            head.repeated |= head.host is not None
            head.host = value
        elif name == b"authorization":
            head.repeated |= head.authorization is not None
            head.authorization = value.decode("latin-1")
        elif name == b"penstock-project":
            head.project = value.decode("latin-1")
        elif name == b"content-type":
            head.content_type = value
        elif name == b"content-length":
            head.repeated |= head.content_length is not None
            head.content_length = value
        elif name == b"transfer-encoding":
            head.repeated |= head.transfer_encoding is not None
            head.transfer_encoding = value
        elif name == b"x-forwarded-for":
            # Several lines are one list.
            head.forwarded_for = value if head.forwarded_for is None else head.forwarded_for + b"," + value
        elif name == b"x-correlation-id" and _CORRELATION.fullmatch(value):
            head.correlation_id = value.decode("ascii")
    return head


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """The paths whose PUTs stream: larger bodies, also of unknown length. Their routes read them piece by piece."""

    prefix: str
    bytes_max: int

    def take(self, scope: Scope) -> bool:
        """Whether this request is one."""
        return scope["type"] == "http" and scope["method"] == "PUT" and scope["path"].startswith(self.prefix)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeBodies:
    """The POSTs that take larger bodies than others, and longer for them."""

    path: re.Pattern[str]
    bytes_max: int
    timeout_s: float = 60.0

    def take(self, scope: Scope) -> bool:
        """Whether this request is one."""
        return scope["type"] == "http" and scope["method"] == "POST" and bool(self.path.fullmatch(scope["path"]))


def rejection(head: Head, *, bytes_max: int = BODY_BYTES_MAX, streams: bool = False) -> Rejected | None:
    """Why this request is refused before routing, if it is. `streams` allows a body of unknown length."""
    if head.host is None or not _HOST.fullmatch(head.host):
        return Rejected(400, "invalid_request", "bad Host header")
    if head.repeated:
        return Rejected(
            400, "invalid_request", "Host, Authorization, Content-Length and Transfer-Encoding may come once only"
        )
    if head.transfer_encoding is not None and not streams:
        return Rejected(400, "invalid_request", "Transfer-Encoding is not accepted; send Content-Length")
    if head.transfer_encoding is not None and head.transfer_encoding.lower() != b"chunked":
        return Rejected(400, "invalid_request", "Transfer-Encoding must be chunked")
    if head.transfer_encoding is not None and head.content_length is not None:
        return Rejected(400, "invalid_request", "Transfer-Encoding and Content-Length exclude each other")
    length = head.content_length
    if length is not None and (not length.isdigit() or len(length) > 18):
        return Rejected(400, "invalid_request", "bad Content-Length")
    if length is not None and int(length) > bytes_max:
        return too_large(bytes_max)
    return None


def bad_target(path: str, query: bytes) -> Rejected | None:
    """Paths and queries are text: no halves of characters, and no NUL, which databases cannot store."""
    try:
        text = path.encode().decode() + unquote_to_bytes(query).decode()
    except UnicodeError:
        return Rejected(400, "invalid_request", "path and query must be valid UTF-8", close=False)
    if "\0" in text:
        return Rejected(400, "invalid_request", "path and query may not contain NUL", close=False)
    return None


def too_large(bytes_max: int = BODY_BYTES_MAX) -> Rejected:
    """413."""
    return Rejected(413, "payload_too_large", f"body: max {bytes_max} bytes")


class Edge:
    """The outermost ASGI layer."""

    def __init__(
        self,
        app: ASGIApp,
        exchanges: Exchanges,
        *,
        trusted_proxies: Sequence[str] = (),
        uploads: Uploads | None = None,
        large: LargeBodies | None = None,
    ) -> None:
        self._app = app
        self._exchanges = exchanges
        self._uploads = uploads
        self._large = large
        self._trusted = [ipaddress.ip_network(text, strict=False) for text in trusted_proxies]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        head = read_head(scope["headers"])
        head.client = client_address((scope["client"] or ("",))[0], head.forwarded_for, self._trusted)
        head.path = scope["path"]
        correlation = head.correlation_id or f"cor_{os.urandom(13).hex()}"
        cast("dict[str, Any]", scope)["edge"] = head
        # The server runs each request in a task of its own, so nothing needs to be undone.
        correlate(correlation)
        refused = self._rejection(scope, head) or bad_target(scope["path"], scope["query_string"])
        with (
            self._exchanges.begin(lambda: cast("dict[str, Any]", scope).get("caller")) as exchange,
            span("api.request", method=scope["method"], path=scope["path"]),
        ):
            sender = _Sender(send, scope["method"], correlation, exchange)
            await self._answer(scope, _Receiver(receive, exchange), sender, refused)

    def _rejection(self, scope: Scope, head: Head) -> Rejected | None:
        if self._uploads is not None and self._uploads.take(scope):
            streams = scope["http_version"] != "1.0"
            return rejection(head, bytes_max=self._uploads.bytes_max, streams=streams)
        if self._large is not None and self._large.take(scope):
            head.body_bytes_max, head.body_timeout_s = self._large.bytes_max, self._large.timeout_s
        return rejection(head, bytes_max=head.body_bytes_max)

    async def _answer(self, scope: Scope, receive: Receive, sender: "_Sender", refused: Rejected | None) -> None:
        if refused is None:
            try:
                await self._app(scope, receive, sender)
            except Exception as error:
                if not sender.cut:
                    raise
                raise ConnectionAbortedError("the answer was cut") from error
            return
        detail = ErrorDetail(code=refused.code, message=refused.message, correlation_id=sender.correlation)
        body = msgspec.json.encode(ErrorBody(error=detail))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refused.close:
            headers.append((b"connection", b"close"))
        await sender({"type": "http.response.start", "status": refused.status, "headers": headers})
        await sender({"type": "http.response.body", "body": body, "more_body": False})


class _Receiver:
    """The body of a request. Waiting for more of it ends with the caller's credential."""

    __slots__ = ("_ended", "_exchange", "_receive")

    def __init__(self, receive: Receive, exchange: Exchange) -> None:
        self._receive = receive
        self._exchange = exchange
        self._ended = False

    async def __call__(self) -> Any:
        message = await (self._receive() if self._ended else self._exchange.wait(self._receive))
        self._ended = not message.get("more_body", False)
        return message


class _Sender:
    """Adds what every answer carries, and measures. A long answer ends with the caller's credential."""

    __slots__ = ("_exchange", "_method", "_send", "_started", "correlation", "cut")

    def __init__(self, send: Send, method: str, correlation: str, exchange: Exchange) -> None:
        self._send = send
        self._method = method
        self._exchange = exchange
        self._started = time.perf_counter()
        self.correlation = correlation
        self.cut = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("more_body", False):
            await self._pass_on(message)
            return
        if message["type"] == "http.response.start":
            message["headers"] = [
                *message["headers"],
                (b"x-correlation-id", self.correlation.encode()),
                (b"cache-control", b"no-store"),
                (b"x-content-type-options", b"nosniff"),
            ]
            _series(self._method, message["status"]).observe(time.perf_counter() - self._started)
        await self._send(message)

    async def _pass_on(self, message: Message) -> None:
        try:
            await self._exchange.wait(partial(self._send, message))
        except Unauthenticated:
            self.cut = True
            raise


@lru_cache(maxsize=256)
def _series(method: str, status: int) -> Histogram:
    return _seconds.labels(method if method in _METHODS else "other", str(status))


class EdgeRequest(Request[Any, Any, Any]):
    """Reads bodies within bounds and decodes them strictly into the handler's type."""

    __slots__ = ()

    async def body(self) -> bytes:
        """The whole body, once read."""
        if self._body is Empty:
            self._body = self._connection_state.body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        declared = "data" in self.route_handler.parsed_fn_signature.parameters
        head: Head = cast("dict[str, Any]", self.scope)["edge"]
        try:
            async with asyncio.timeout(head.body_timeout_s):
                body = await read_body(self.receive, bytes_max=head.body_bytes_max)
        except TimeoutError as error:
            message = f"the body did not arrive within {head.body_timeout_s:g} s"
            raise Rejected(408, "request_timeout", message) from error
        if declared and not body and not self.route_handler.parsed_fn_signature.parameters["data"].has_default:
            raise Invalid("body required", field="$")
        return body

    async def json(self) -> Any:
        """The body as the type of the handler's `data`."""
        head: Head = cast("dict[str, Any]", self.scope)["edge"]
        if head.content_type.partition(b";")[0].strip().lower() != b"application/json":
            raise Rejected(415, "unsupported_media_type", "Content-Type must be application/json", close=False)
        return await jsonbody.read(await self.body(), self._decoder())

    def _decoder(self) -> msgspec.json.Decoder[Any]:
        annotation: Any = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        decoder = _decoders.get(annotation)
        if decoder is None:
            decoder = _decoders[annotation] = msgspec.json.Decoder(annotation)
        return decoder


async def read_body(receive: Receive, *, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """All of the body, or Rejected as soon as it is larger than allowed."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Rejected(400, "invalid_request", "the client went away")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise too_large(bytes_max)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)
