"""Expected failures of processes' own commands, as the command line tells them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from penstock.cli.errors import AUTH, CONFLICT, EXHAUSTED, FAILED, NOT_FOUND, SERVER, CliError
from penstock.kit.errors import Kind, PenstockError

_EXIT: Final = {
    Kind.INVALID: FAILED,
    Kind.UNAUTHENTICATED: AUTH,
    Kind.DENIED: AUTH,
    Kind.NOT_FOUND: NOT_FOUND,
    Kind.CONFLICT: CONFLICT,
    Kind.EXHAUSTED: EXHAUSTED,
    Kind.UNAVAILABLE: SERVER,
}


@contextmanager
def told() -> Iterator[None]:
    """Expected failures become the command line's own."""
    try:
        yield
    except PenstockError as error:
        raise CliError(error.detail, code=error.code, field=error.field, exit_code=_EXIT[error.kind]) from error
