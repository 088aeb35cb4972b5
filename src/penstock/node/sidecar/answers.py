"""What a framework's reply means. Pure: whatever the reply says, the outcome is within the contract."""

import binascii
import codecs
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.node.sidecar.errors import BrokenAnswer, TooLarge
from penstock.wire.serverless import (
    ERROR_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    INLINE_BYTES_MAX,
    STRIPPED_HEADERS,
    FailureClass,
    FrameworkReply,
    State,
)

BASE64: Final = "base64"
BAD_GATEWAY: Final = 502
GATEWAY_TIMEOUT: Final = 504
UNAVAILABLE: Final = 503
CANCELLED: Final = 499
_STATUSES: Final = range(100, 600)
_FIRST_ERROR: Final = 400
_HANDLER_FAILED: Final = 500
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[^\r\n\0]*")
_CONTENT_TYPE: Final = re.compile(r"[!-~](?:[ -~]{0,254})")
_CONTENT_TYPE_DEFAULT: Final = "application/json"
#: Levels of lists and objects. Readers stop at about 1,000, with the message around it and what they are called by.
DEPTH_MAX: Final = 500
#: Up to its end, or to the end of all: no quote is looked at twice.
_STRING: Final = re.compile(rb'(?s)"(?:[^"\\]++|\\.)*+"?')
_NO_BRACKETS: Final = bytes(each for each in range(256) if each not in b"[]{}")
_NULL: Final = b"null"
#: A multiple of four characters, each four of which are three bytes.
_BASE64_PIECE: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20
#: Text must be taken out of its JSON as a whole; base64 is the way for more.
_TEXT_BYTES_MAX: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended. `body` is JSON; with `encoding` base64 it is a string of bytes."""

    state: State
    status: int
    failure: FailureClass | None = None
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    content_type: str = _CONTENT_TYPE_DEFAULT
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: msgspec.Raw = field(default_factory=lambda: msgspec.Raw(_NULL))
    encoding: str = ""


def failed(failure: FailureClass, error: str, *, status: int = BAD_GATEWAY) -> Outcome:
    """An attempt that came to nothing."""
    return Outcome(state=State.FAILED, status=status, failure=failure, error=shortened(error))


def expired(timeout_s: float) -> Outcome:
    """The handler took too long."""
    error = f"the handler did not answer within {timeout_s:g} s"
    return Outcome(state=State.EXPIRED, status=GATEWAY_TIMEOUT, failure=FailureClass.FRAMEWORK_TIMEOUT, error=error)


def cancelled() -> Outcome:
    """Nobody wants it any more; whether the invocation is cancelled, others decide."""
    return failed(FailureClass.CANCELLED, "the attempt was called off", status=CANCELLED)


def judged(reply: FrameworkReply) -> Outcome:
    """The reply's outcome. What is not by the contract is BrokenAnswer."""
    status = reply.statusCode or 200
    if status not in _STATUSES:
        raise BrokenAnswer("bad_reply", f"statusCode must be 100 to 599, not {status}")
    content_type = reply.contentType or _CONTENT_TYPE_DEFAULT
    if not _CONTENT_TYPE.fullmatch(content_type):
        raise BrokenAnswer("bad_reply", "contentType must be visible ASCII, 255 characters at most")
    _check_encoding(reply)
    check_json(reply.body, what="body")
    if reply.error and status < _FIRST_ERROR:
        status = _HANDLER_FAILED
    well = status < _FIRST_ERROR
    return Outcome(
        state=State.SUCCEEDED if well else State.FAILED,
        status=status,
        failure=None if well else FailureClass.HANDLER_ERROR,
        error="" if well else shortened(reply.error or f"the handler answered with status {status}"),
        error_type=reply.errorType[:255],
        traceback=shortened(reply.traceback),
        content_type=content_type,
        headers=_headers(reply.headers),
        body=reply.body,
        encoding=reply.encoding,
    )


def shortened(text: str) -> str:
    """At most what an error may be long, in bytes."""
    if len(text) * 4 <= ERROR_BYTES_MAX:
        return text
    return text.encode(errors="replace")[:ERROR_BYTES_MAX].decode(errors="ignore")


def content(outcome: Outcome, bytes_max: int) -> tuple[int, Iterator[bytes]]:
    """The very bytes that a caller gets, for a body that is kept out of line: how many, and in pieces."""
    raw = memoryview(outcome.body)
    if outcome.encoding == BASE64:
        text = raw[1:-1]
        padding = sum(1 for end in text[-2:] if end == ord("="))
        length, pieces = len(text) // 4 * 3 - padding, _decoded(text)
    elif _is_text(raw) and not is_json(outcome.content_type):
        if len(raw) > _TEXT_BYTES_MAX:
            raise TooLarge(_TEXT_BYTES_MAX)
        plain = msgspec.json.decode(raw, type=str).encode()
        length, pieces = len(plain), _pieces(memoryview(plain))
    else:
        length, pieces = len(raw), _pieces(raw)
    if length > bytes_max:
        raise TooLarge(bytes_max)
    return length, pieces


def _is_text(raw: memoryview) -> bool:
    return bytes(raw[:1]) == b'"'


def is_json(content_type: str) -> bool:
    """Whether the bytes of such a body are JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == _CONTENT_TYPE_DEFAULT or kind.endswith("+json")


def _pieces(raw: memoryview) -> Iterator[bytes]:
    for start in range(0, len(raw), _PIECE_BYTES):
        yield bytes(raw[start : start + _PIECE_BYTES])


def _decoded(text: memoryview) -> Iterator[bytes]:
    for start in range(0, len(text), _BASE64_PIECE):
        yield binascii.a2b_base64(text[start : start + _BASE64_PIECE])


def _check_encoding(reply: FrameworkReply) -> None:
    if not reply.encoding:
        return
    if reply.encoding != BASE64:
        raise BrokenAnswer("bad_reply", "encoding must be empty or base64")
    raw = memoryview(reply.body)
    if len(raw) % 4 != 2 or not _is_text(raw):
        raise BrokenAnswer("bad_reply", "body must be a string in base64, as encoding says")
    try:
        for start in range(1, len(raw) - 1, _BASE64_PIECE):
            piece = raw[start : min(start + _BASE64_PIECE, len(raw) - 1)]
            binascii.a2b_base64(piece, strict_mode=True)
    except binascii.Error:
        raise BrokenAnswer("bad_reply", "body is not valid base64, as encoding says") from None


def check_json(raw: msgspec.Raw, *, what: str) -> None:
    """Pass if others can read it: it is JSON already, and must be UTF-8. What travels within a message is read again as
    a part of that, so it must not be nested to the end of what a reader takes."""
    content = memoryview(raw)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(content), _PIECE_BYTES):
            decoder.decode(content[start : start + _PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise BrokenAnswer("bad_reply", f"{what} is not UTF-8") from None
    if len(content) <= INLINE_BYTES_MAX and not _is_shallow(bytes(content)):
        raise BrokenAnswer("bad_reply", f"{what} is nested more than {DEPTH_MAX} levels deep")


def _is_shallow(content: bytes) -> bool:
    """Whether at most `DEPTH_MAX` levels are left when the strings are gone; each turn takes the innermost away."""
    if content.count(b"[") + content.count(b"{") <= DEPTH_MAX:
        return True
    left = _STRING.sub(b"", content).translate(None, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):
        left = left.replace(b"[]", b"").replace(b"{}", b"")
        if not left:
            return True
    return False


def _headers(given: dict[str, str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for name, value in given.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BrokenAnswer("bad_reply", "a header has a bad name, or a line break or NUL in its value")
        if len(name) + len(value.encode()) > HEADER_BYTES_MAX:
            raise BrokenAnswer("bad_reply", f"a header is larger than {HEADER_BYTES_MAX} bytes")
        if name.lower() not in STRIPPED_HEADERS:
            kept[name] = value
    if len(kept) > HEADERS_MAX:
        raise BrokenAnswer("bad_reply", f"there are more than {HEADERS_MAX} headers")
    return kept
