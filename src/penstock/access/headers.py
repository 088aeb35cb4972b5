"""Which headers pass between a client and a unit.

What concerns one connection only stays on it; credentials of ours never reach a unit; a unit cannot speak for the
gateway's whole origin (cookies and redirects are kept under its own path).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]

_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
#: From the client: ours to read, or ours to write.
_NOT_TO_UNIT: Final = _HOP | {
    b"authorization",
    b"expect",
    b"forwarded",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-prefix",
    b"x-forwarded-proto",
    b"x-real-ip",
    b"x-correlation-id",
}
#: From the unit: what would act on the whole origin, and ours to write.
_NOT_TO_CLIENT: Final = _HOP | {
    b"alt-svc",
    b"clear-site-data",
    b"public-key-pins",
    b"service-worker-allowed",
    b"strict-transport-security",
    b"x-correlation-id",
}
_OURS: Final = b"penstock-"
_OUR_COOKIE: Final = re.compile(rb"(?:__Host-|__Secure-)?penstock", re.IGNORECASE)
#: `Connection` may not declare these away: the message would be read differently on both sides.
_KEPT: Final = frozenset({b"content-length", b"host", b"cookie"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """What the unit is told about the request's way."""

    client: str
    scheme: str
    host: bytes
    prefix: bytes
    correlation_id: str


def request_head(method: str, target: bytes, headers: Headers, forwarded: Forwarded, *, upgrade: bool) -> bytes:
    """The head of the request as the unit gets it; the body's framing is the client's own."""
    parts = [method.encode("ascii"), b" ", target, b" HTTP/1.1\r\n"]
    dropped = _NOT_TO_UNIT | _named_by_connection(headers)
    chunked = False
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"transfer-encoding":
            chunked = True
        elif lowered == b"cookie":
            _add_cookies(parts, value)
        elif lowered not in dropped and not lowered.startswith(_OURS):
            parts += (name, b": ", value, b"\r\n")
    if chunked:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    if upgrade:
        parts.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    parts += (
        b"X-Forwarded-For: ",
        forwarded.client.encode("latin-1", "replace"),
        b"\r\nX-Forwarded-Proto: ",
        forwarded.scheme.encode(),
        b"\r\nX-Forwarded-Host: ",
        forwarded.host,
        b"\r\nX-Forwarded-Prefix: ",
        forwarded.prefix,
        b"\r\nX-Correlation-Id: ",
        forwarded.correlation_id.encode(),
        b"\r\n\r\n",
    )
    return b"".join(parts)


def response_head(status: int, reason: str, headers: Headers, forwarded: Forwarded, extra: Iterable[bytes]) -> bytes:
    """The head of the response as the client gets it. `extra` are whole lines: framing and the connection's fate."""
    parts = [f"HTTP/1.1 {status} ".encode(), reason.encode("utf-8", "surrogateescape"), b"\r\n"]
    dropped = _NOT_TO_CLIENT | _named_by_connection(headers)
    for name, value in headers:
        lowered = name.lower()
        if lowered in dropped or lowered.startswith(_OURS) or (lowered == b"set-cookie" and _OUR_COOKIE.match(value)):
            continue
        if lowered == b"set-cookie":
            parts += (b"Set-Cookie: ", _scoped(value, forwarded.prefix), b"\r\n")
        elif lowered == b"location":
            parts += (b"Location: ", _within(value, forwarded), b"\r\n")
        else:
            parts += (name, b": ", value, b"\r\n")
    parts += (b"X-Correlation-Id: ", forwarded.correlation_id.encode(), b"\r\n")
    parts += extra
    parts.append(b"\r\n")
    return b"".join(parts)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Headers that `Connection` declares to be of this connection only."""
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name.lower() == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")}
    return named - _KEPT


def _add_cookies(parts: list[bytes], value: bytes) -> None:
    kept = [pair.strip() for pair in value.split(b";") if pair.strip() and not _OUR_COOKIE.match(pair.strip())]
    if kept:
        parts += (b"Cookie: ", b"; ".join(kept), b"\r\n")


def _scoped(cookie: bytes, prefix: bytes) -> bytes:
    """The cookie, for the unit's own path on this host only."""
    pair, *attributes = (part.strip() for part in cookie.split(b";"))
    kept = [part for part in attributes if not part.lower().startswith((b"domain", b"path"))]
    return b"; ".join([pair, *kept, b"Path=" + prefix + b"/"])


def _within(location: bytes, forwarded: Forwarded) -> bytes:
    """A redirect to the unit's own root leads to where that root is seen from outside."""
    for own in (b"http://" + forwarded.host, b"https://" + forwarded.host):
        if location.startswith(own + b"/"):
            location = location[len(own) :]
    if not location.startswith(b"/") or location.startswith(b"//"):
        return location
    if location == forwarded.prefix or location.startswith(forwarded.prefix + b"/"):
        return location
    return forwarded.prefix + location
