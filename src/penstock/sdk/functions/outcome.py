"""Makes a value or an exception of how an invocation ended."""

from typing import Any

from penstock.sdk.functions import errors, values
from penstock.sdk.functions.transport import Answer

_ENDS = {
    "expired": errors.FunctionExpired,
    "cancelled": errors.FunctionCancelled,
    "dead_lettered": errors.FunctionDeadLettered,
}


def value(answer: Answer, module: str = "") -> Any:
    """The result; the handler's own exception where it can be brought here, otherwise a RemoteError."""
    if answer.state == "succeeded":
        return values.decode_result(answer.content_type, answer.body, answer.encoding, module)
    raise failure(answer, module)


def failure(answer: Answer, module: str = "") -> BaseException:
    """Why there is no result."""
    original = _original(answer.body, module)
    if original is not None:
        original.__cause__ = errors.RemoteTraceback(answer.traceback)
        return original
    kind = _ENDS.get(answer.state, errors.FunctionFailed)
    made = kind(
        _message(answer),
        invocation_id=answer.invocation_id,
        error_type=answer.error_type,
        traceback=answer.traceback,
        failure_class=answer.failure_class,
    )
    if answer.traceback:
        made.__cause__ = errors.RemoteTraceback(answer.traceback)
    return made


def _original(body: Any, module: str) -> "BaseException | None":
    text = body.get("exception") if isinstance(body, dict) else None
    found = values.decode_exception(text, module) if isinstance(text, str) else None
    # Others would end this program or its loop instead of the call.
    return found if isinstance(found, Exception) else None


def _message(answer: Answer) -> str:
    what = answer.error or answer.failure_class or f"it ended {answer.state}"
    named = f"{answer.error_type}: " if answer.error_type and not what.startswith(answer.error_type) else ""
    return f"{answer.invocation_id}: {named}{what}" if answer.invocation_id else f"{named}{what}"
