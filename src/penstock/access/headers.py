"""Which headers pass between a client and a unit.

What concerns one connection only stays on it; credentials of ours never reach a unit; a unit cannot speak for the
gateway's whole origin (cookies and redirects are kept under its own path).
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

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
_CONNECTION_LENGTH: Final = len(b"connection")
_USUAL: Final = frozenset({b"keep-alive", b"close", b"upgrade"})
#: `Connection` may not declare these away: the message would be read differently on both sides.
_KEPT: Final = frozenset({b"content-length", b"host", b"cookie"})


#: A whole head of HTTP/1.1, without its last empty line, that cannot be read in two ways and has a body (204 has none).
_HEAD: Final = re.compile(
    rb"HTTP/1\.1 (?!204|205|304)[2-5]\d\d [\t\x20-\x7e\x80-\xff]*"
    rb"(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*)*"
)
_NOT_SIMPLE: Final = re.compile(
    rb"(?i)\r\n(?:(?:%b):|penstock-)" % b"|".join(sorted(_NOT_TO_CLIENT | {b"set-cookie", b"location"}))
)
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length:([^\r]*)")
_LENGTH_DIGITS_MAX: Final = 18
#: What many servers say about their connection, and what may simply be left out.
_KEPT_ALIVE: Final = re.compile(rb"(?i)\r\n(?:connection:[ \t]*keep-alive[ \t]*|keep-alive:[^\r]*)(?=\r\n|\Z)")


class Forwarded(NamedTuple):
    """What the unit is told about the request's way."""

    client: str
    scheme: str
    host: str
    prefix: str
    correlation_id: str


class SimpleHead(NamedTuple):
    """The head of a response whose body has a known length: its lines without the last empty one."""

    lines: bytes
    length: int


def simple_head(head: bytes) -> SimpleHead | None:
    """The head, if it is well-formed, gives the body's length in the one simple way and has nothing that must not pass
    as it is; none for all others, which are read and rewritten with care."""
    head = _KEPT_ALIVE.sub(b"", head)
    if _HEAD.fullmatch(head) is None or _NOT_SIMPLE.search(head) is not None:
        return None
    lengths = _LENGTH.findall(head)
    if len(lengths) != 1 or not (digits := lengths[0].strip(b" \t")).isdigit() or len(digits) > _LENGTH_DIGITS_MAX:
        return None
    return SimpleHead(head, int(digits))


def request_head(method: str, target: str, headers: Headers, forwarded: Forwarded, *, upgrade: bool) -> bytes:
    """The head of the request as the unit gets it; the body's framing is the client's own."""
    parts = [f"{method} {target} HTTP/1.1\r\n".encode("utf-8", "surrogateescape")]
    named = _named_by_connection(headers)
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"transfer-encoding":
            parts.append(b"Transfer-Encoding: chunked\r\n")
        elif lowered == b"cookie":
            _add_cookies(parts, value)
        elif lowered not in _NOT_TO_UNIT and lowered not in named and not lowered.startswith(_OURS):
            parts.append(b"%b: %b\r\n" % (name, value))
    if upgrade:
        parts.append(b"Connection: Upgrade\r\nUpgrade: websocket\r\n")
    parts.append(
        f"X-Forwarded-For: {forwarded.client}\r\nX-Forwarded-Proto: {forwarded.scheme}\r\n"
        f"X-Forwarded-Host: {forwarded.host}\r\nX-Forwarded-Prefix: {forwarded.prefix}\r\n"
        f"X-Correlation-Id: {forwarded.correlation_id}\r\n\r\n".encode("utf-8", "surrogateescape")
    )
    return b"".join(parts)


def response_head(status: int, reason: bytes, headers: Headers, forwarded: Forwarded, framing: bytes) -> bytes:
    """The head of the response as the client gets it. `framing` are whole lines: how body and connection end."""
    parts = [b"HTTP/1.1 %d %b\r\n" % (status, reason)]
    named = _named_by_connection(headers)
    for name, value in headers:
        lowered = name.lower()
        if lowered in _NOT_TO_CLIENT or lowered in named or lowered.startswith(_OURS):
            continue
        if lowered == b"set-cookie":
            if not _OUR_COOKIE.match(value):
                parts.append(b"Set-Cookie: %b\r\n" % _scoped(value, forwarded.prefix.encode()))
        elif lowered == b"location":
            parts.append(b"Location: %b\r\n" % _within(value, forwarded))
        else:
            parts.append(b"%b: %b\r\n" % (name, value))
    parts.append(b"X-Correlation-Id: %b\r\n%b\r\n" % (forwarded.correlation_id.encode(), framing))
    return b"".join(parts)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Headers that `Connection` declares to be of this connection only."""
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if len(name) == _CONNECTION_LENGTH and name.lower() == b"connection" and value.lower() not in _USUAL:
            named |= {token.strip().lower() for token in value.split(b",")} - _KEPT
    return named


def _add_cookies(parts: list[bytes], value: bytes) -> None:
    kept = [pair.strip() for pair in value.split(b";") if pair.strip() and not _OUR_COOKIE.match(pair.strip())]
    if kept:
        parts.append(b"Cookie: %b\r\n" % b"; ".join(kept))


def _scoped(cookie: bytes, prefix: bytes) -> bytes:
    """The cookie, for the unit's own path on this host only."""
    pair, *attributes = (part.strip() for part in cookie.split(b";"))
    kept = [part for part in attributes if not part.lower().startswith((b"domain", b"path"))]
    return b"; ".join([pair, *kept, b"Path=%b/" % prefix])


def _within(location: bytes, forwarded: Forwarded) -> bytes:
    """A redirect to the unit's own root leads to where that root is seen from outside."""
    prefix = forwarded.prefix.encode()
    for scheme in (b"http://", b"https://"):
        own = scheme + forwarded.host.encode()
        if location.startswith(own + b"/"):
            location = location[len(own) :]
    inside = location == prefix or location.startswith(prefix + b"/")
    if inside or not location.startswith(b"/") or location.startswith(b"//"):
        return location
    return prefix + location
