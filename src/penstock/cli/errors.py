"""How a failure ends a command: one line on standard error and an exit code.

0 ok, 1 usage or client error, 2 server, 3 authentication or permission, 4 not found, 5 conflict. As shells have it: 126
and 127 for a command in a unit that cannot be run or is not there, 130 after Ctrl-C, 141 when the reader of the output
went away.
"""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.sdk.errors import SdkError

OK: Final = 0
USAGE: Final = 1
SERVER: Final = 2
AUTH: Final = 3
NOT_FOUND: Final = 4
CONFLICT: Final = 5
NOT_RUNNABLE: Final = 126
NO_COMMAND: Final = 127
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141

LOGIN_AGAIN: Final = "login again: run `penstock login`"


class CliError(Exception):
    """A command cannot go on; the message is for the person at the keyboard."""

    def __init__(self, message: str, *, code: str = "usage", field: str | None = None, exit_code: int = USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field
        self.exit_code = exit_code


def exit_code(error: "SdkError") -> int:
    """What a failed call means for the shell."""
    from penstock.sdk import errors

    codes: dict[type[errors.SdkError], int] = {
        errors.InvalidArgument: USAGE,
        errors.Unreachable: SERVER,
        errors.BadAnswer: SERVER,
        errors.WaitTimeout: SERVER,
        errors.Unauthenticated: AUTH,
        errors.Denied: AUTH,
        errors.NotFound: NOT_FOUND,
        errors.Conflict: CONFLICT,
        errors.ServerError: SERVER,
    }
    return codes.get(type(error), USAGE)
