"""What a call can fail with. Every failure is a `SdkError` that carries the server's code, field and correlation id.

`ApiError` means that the server answered and refused; `Unreachable` and `BadAnswer` that there was no usable answer;
`InvalidArgument` and `NotConfigured` that nothing was sent at all.
"""

from typing import Final


class SdkError(Exception):
    """Base of all failures of a call."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "client_error",
        field: str | None = None,
        correlation_id: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field
        self.correlation_id = correlation_id
        self.status = status


class InvalidArgument(SdkError):
    """Refused here, before any request."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message, code="invalid_argument", field=field)


class NotConfigured(SdkError):
    """Neither an argument, a variable, a profile nor a local instance says which server to call, or with which key."""


class Unreachable(SdkError):
    """No answer came. `sent` says whether the server may have acted; `passing` whether trying again may help."""

    def __init__(self, message: str, *, sent: bool, passing: bool = True) -> None:
        super().__init__(message, code="unreachable")
        self.sent = sent
        self.passing = passing


class BadAnswer(SdkError):
    """An answer that is not the API's: not JSON, of another shape, a redirect, or too large."""

    def __init__(self, message: str, *, status: int | None = None, correlation_id: str | None = None) -> None:
        super().__init__(message, code="bad_answer", status=status, correlation_id=correlation_id)


class WaitTimeout(SdkError):
    """What was waited for did not happen in time; it may still happen."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="wait_timeout")


class ApiError(SdkError):
    """The server refused, in its error envelope."""


class InvalidRequest(ApiError):
    """The request is wrong; `field` says where."""


class Unauthenticated(ApiError):
    """The key is missing, unknown, expired or revoked."""


class Denied(ApiError):
    """The role does not allow this."""


class NotFound(ApiError):
    """No such object, or none that this key may know of."""


class Conflict(ApiError):
    """The object's state does not allow this."""


class Exhausted(ApiError):
    """A limit is reached: quota, capacity or rate."""


class ServerError(ApiError):
    """The server failed; the correlation id finds it in the server's logs."""


_BY_STATUS: Final[dict[int, type[ApiError]]] = {
    401: Unauthenticated,
    403: Denied,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    429: Exhausted,
}


def for_status(status: int) -> type[ApiError]:
    """The class of error that an HTTP status stands for."""
    if status >= 500:
        return ServerError
    return _BY_STATUS.get(status, InvalidRequest)
