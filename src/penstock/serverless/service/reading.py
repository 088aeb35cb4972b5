"""What sidecars send, read with care: an ending out of whatever a result message holds, or why there is none.

A message that names its attempt always ends it, even if the rest of it is rubbish: the work was done once and is not
done again for that.
"""

import hashlib
from typing import Any, Final

import msgspec

from penstock.serverless.model import Ending, State
from penstock.serverless.service.burying import Unreadable
from penstock.wire.serverless import (
    ERROR_BYTES_MAX,
    HEADERS_MAX,
    INLINE_BYTES_MAX,
    VERSION,
    FailureClass,
    InvocationResultMessage,
)
from penstock.wire.unreadable import UNREADABLE

_decode = msgspec.json.Decoder(InvocationResultMessage).decode
_TOKEN_BYTES: Final = 16
#: How attempts may end; all else is for others to decide.
_ENDS: Final = frozenset({State.SUCCEEDED, State.FAILED, State.EXPIRED})


def result(data: bytes) -> InvocationResultMessage:
    """The message; one with a mistake in it becomes a failure of its attempt."""
    try:
        message = _decode(data)
    except msgspec.ValidationError as error:
        return _mended(data, str(error))
    except UNREADABLE as error:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, f"not JSON: {error}") from error
    if message.version != VERSION:
        raise Unreadable(FailureClass.UNSUPPORTED_VERSION, f"version {message.version[:32]!r} is not understood")
    return _checked(_named(message))


def _mended(data: bytes, complaint: str) -> InvocationResultMessage:
    """The same attempt, failed with the complaint, if it can be told which one it is."""
    try:
        raw: Any = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, complaint)
    if isinstance(version := raw.get("version"), str) and version != VERSION:
        raise Unreadable(FailureClass.UNSUPPORTED_VERSION, f"version {version[:32]!r} is not understood")
    told: dict[str, Any] = raw
    headers = told.get("headers")
    kept: dict[str, Any] = {
        **{name: value for name, value in told.items() if name in _IDENTITY},
        "state": State.FAILED,
        "statusCode": 502,
        "failureClass": FailureClass.FRAMEWORK_ERROR,
        "error": complaint,
        "headers": dict(list(headers.items())[:HEADERS_MAX]) if isinstance(headers, dict) else {},
        "durationMs": told.get("durationMs", 0),
    }
    try:
        return _checked(_named(msgspec.convert(kept, InvocationResultMessage)))
    except msgspec.ValidationError as error:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, complaint) from error


_IDENTITY: Final = (
    *("version", "invocationID", "serverlessRequestID", "mode", "workerName", "workerNamespace", "startedAt"),
    *("completedAt", "projectID", "attempt", "token"),
)


def _named(message: InvocationResultMessage) -> InvocationResultMessage:
    """Names that Postgres can look for."""
    if any("\0" in name for name in (message.invocationID, message.projectID, message.workerName)):
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, "a name has a zero byte")
    return message


def _checked(message: InvocationResultMessage) -> InvocationResultMessage:
    if message.state not in _ENDS:
        return failed(message, FailureClass.FRAMEWORK_ERROR, f"{message.state} is no end of an attempt")
    if bad := [name for name, value in message.headers.items() if _has_break(name + value)]:
        message = msgspec.structs.replace(message, headers={k: v for k, v in message.headers.items() if k not in bad})
        return failed(message, FailureClass.FRAMEWORK_ERROR, f"header {bad[0][:64]!r} has a line break")
    if message.bodyRef is not None and "\0" in message.bodyRef.key:
        return failed(message, FailureClass.FRAMEWORK_ERROR, "the result's key has a zero byte")
    if not _is_text(bytes(message.body)):
        return failed(message, FailureClass.FRAMEWORK_ERROR, "the body is not UTF-8")
    if message.bodySHA256 and hashlib.sha256(bytes(message.body)).hexdigest() != message.bodySHA256:
        return failed(message, FailureClass.INTEGRITY, "the body is not what the worker sent")
    if len(bytes(message.body)) > INLINE_BYTES_MAX + ERROR_BYTES_MAX:
        return failed(message, FailureClass.RESULT_TOO_LARGE, f"body: max {INLINE_BYTES_MAX} bytes in a message")
    return message


def failed(message: InvocationResultMessage, failure: FailureClass, error: str) -> InvocationResultMessage:
    """The same attempt, failed."""
    return msgspec.structs.replace(
        message,
        state=State.FAILED,
        statusCode=502,
        failureClass=failure,
        error=error,
        body=msgspec.Raw(b"null"),
        bodyRef=None,
        bodySHA256="",
        encoding="",
    )


def _has_break(text: str) -> bool:
    return "\r" in text or "\n" in text or "\0" in text


def _is_text(body: bytes) -> bool:
    """A value that is passed on as it came is not decoded by anybody else before it is answered."""
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def ending(message: InvocationResultMessage) -> Ending | None:
    """What the rows are told; none when its token cannot be one, as in what we publish ourselves."""
    try:
        token = bytes.fromhex(message.token)
    except ValueError:
        return None
    if len(token) != _TOKEN_BYTES:
        return None
    return Ending(
        project_id=message.projectID,
        id=message.invocationID,
        token=token,
        worker_id=message.workerName,
        state=message.state,
        status_code=message.statusCode,
        content_type=_text(message.contentType)[:255],
        headers=message.headers,
        body=bytes(message.body),
        body_ref=msgspec.to_builtins(message.bodyRef) if message.bodyRef else None,
        encoding=_text(message.encoding)[:32],
        failure_class=message.failureClass or "",
        error=_text(message.error),
        error_type=_text(message.errorType)[:255],
        traceback=_text(message.traceback),
        duration_ms=message.durationMs,
    )


def _text(value: str) -> str:
    """Postgres keeps no zero bytes."""
    return value[:ERROR_BYTES_MAX].replace("\0", "�")
