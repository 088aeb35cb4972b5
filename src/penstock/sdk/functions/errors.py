"""What a call of a function can fail with, and what ends a handler that is not wanted any more."""


class FunctionError(Exception):
    """A function cannot be called so, or not from here."""


class ObjectError(FunctionError):
    """An object could not be read or written; `code` says why, such as `storage.quota_exceeded`."""

    def __init__(self, message: str, *, code: str = "object_error") -> None:
        super().__init__(message)
        self.code = code


class ObjectNotFound(ObjectError):
    """The project has no object of this key."""


class ResultTimeout(FunctionError, TimeoutError):
    """The result did not come in time; the invocation goes on."""


class RemoteError(FunctionError):
    """The invocation ended without a result. `traceback` has the frames of the handler's own code, if there are any."""

    def __init__(
        self,
        message: str,
        *,
        invocation_id: str = "",
        error_type: str = "",
        traceback: str = "",
        failure_class: str = "",
    ) -> None:
        super().__init__(message)
        self.invocation_id = invocation_id
        self.error_type = error_type
        self.traceback = traceback
        self.failure_class = failure_class


class FunctionFailed(RemoteError):
    """The handler failed, with an exception that could not be brought here."""


class FunctionExpired(RemoteError):
    """It took longer than it may."""


class FunctionCancelled(RemoteError):
    """Somebody cancelled it."""


class FunctionDeadLettered(RemoteError):
    """It was given up after too many attempts; the dead letters have it."""


class RemoteTraceback(Exception):
    """Stands as the cause of an exception that a handler raised elsewhere, and shows where."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the function:\n{self.text}"


class InvocationCancelled(BaseException):
    """Raised in the thread of a handler whose invocation was cancelled. Not an Exception: nothing should catch it."""
