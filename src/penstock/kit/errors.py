"""Expected failures. They know no transport: `kit/statuses.py` and `flows/errors.py` are the only translators."""

from enum import StrEnum
from typing import ClassVar, Final

_NAME_CHARS_MAX: Final = 100


class Kind(StrEnum):
    """What the caller can do about it."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    DENIED = "denied"
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    EXHAUSTED = "exhausted"
    UNAVAILABLE = "unavailable"


class PenstockError(Exception):
    """Base of all expected failures. `detail` is for the customer, `context` for the logs."""

    kind: ClassVar[Kind] = Kind.INVALID
    code: ClassVar[str] = "invalid_request"

    def __init__(
        self, detail: str, *, field: str | None = None, retry_after_s: int | None = None, **context: object
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.retry_after_s = retry_after_s
        self.context = context


class Invalid(PenstockError):
    """The request itself is wrong; `field` says where."""

    kind = Kind.INVALID
    code = "invalid_request"


class Unauthenticated(PenstockError):
    """No valid credential came with the request."""

    kind = Kind.UNAUTHENTICATED
    code = "unauthenticated"


class Denied(PenstockError):
    """The caller is known and may not do this."""

    kind = Kind.DENIED
    code = "permission_denied"


class NotFound(PenstockError):
    """No such object, or none that this caller may know of: both look alike."""

    kind = Kind.NOT_FOUND
    code = "not_found"


def missing(kind: str, name: str, *, field: str | None = None) -> NotFound:
    """The NotFound that names the thing that was asked for, which may be any text."""
    return NotFound(f"no {kind} {brief(name)}", field=field)


def brief(name: str) -> str:
    """A caller's text as it may stand in a message: of bounded length."""
    return name if len(name) <= _NAME_CHARS_MAX else name[: _NAME_CHARS_MAX - 1] + "…"


class Conflict(PenstockError):
    """The object is not in a state that allows this."""

    kind = Kind.CONFLICT
    code = "conflict"


class StaleRow(Conflict):
    """Another writer moved the row first; read it again."""

    code = "stale_row"


class Unavailable(PenstockError):
    """A dependency cannot answer now; trying again later may help."""

    kind = Kind.UNAVAILABLE
    code = "unavailable"


class StorageFull(Unavailable):
    """A disk of ours has no space; everything goes on when there is some."""

    code = "storage_full"
