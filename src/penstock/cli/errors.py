"""How a failure ends a command: one line on standard error and an exit code.

Codes above 100 are as shells have them: 124 when a wait ran out, 126 and 127 for a command in a unit that cannot be run
or is not there, 130 after Ctrl-C, 141 when the reader of the output went away, 143 after a termination.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.sdk.errors import SdkError

OK: Final = 0
FAILED: Final = 1
SERVER: Final = 2
AUTH: Final = 3
NOT_FOUND: Final = 4
CONFLICT: Final = 5
YOUR_CODE: Final = 6
EXHAUSTED: Final = 7
TIMEOUT: Final = 124
NOT_RUNNABLE: Final = 126
NO_COMMAND: Final = 127
INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141
TERMINATED: Final = 143

#: The table of `penstock --help`; docs/guides/command-line.md has the same.
MEANINGS: Final[Mapping[int, str]] = {
    OK: "done",
    FAILED: "the command line, the configuration or the request is wrong, or the work failed",
    SERVER: "the server is away, or failed",
    AUTH: "no key, a key that is not valid, or a role that does not allow it",
    NOT_FOUND: "no such thing",
    CONFLICT: "its state does not allow it",
    YOUR_CODE: "your code failed: a function's handler, or a unit's command",
    EXHAUSTED: "no capacity, no quota or no funds, or a limit is reached",
    TIMEOUT: "--timeout ran out; the work goes on",
    NOT_RUNNABLE: "the command in the unit cannot be run",
    NO_COMMAND: "there is no such command in the unit",
    INTERRUPTED: "Ctrl-C",
    OUTPUT_CLOSED: "the reader of the output went away",
    TERMINATED: "terminated",
}


class CliError(Exception):
    """A command cannot go on; the message is for the person at the keyboard, and `next_step` what helps."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "usage",
        field: str | None = None,
        exit_code: int = FAILED,
        next_step: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.field = field
        self.exit_code = exit_code
        self.next_step = next_step


def exit_code(error: "SdkError") -> int:
    """What a failed call means for the shell."""
    from penstock.sdk import errors

    codes: dict[type[errors.SdkError], int] = {
        errors.InvalidArgument: FAILED,
        errors.Unreachable: SERVER,
        errors.BadAnswer: SERVER,
        errors.WaitTimeout: TIMEOUT,
        errors.Unauthenticated: AUTH,
        errors.Denied: AUTH,
        errors.NotFound: NOT_FOUND,
        errors.Conflict: CONFLICT,
        errors.Exhausted: EXHAUSTED,
        errors.ServerError: SERVER,
    }
    return codes.get(type(error), FAILED)
