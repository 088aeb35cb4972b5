"""Failures as Temporal sees them; the only translation of kinds into `ApplicationError`."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import asyncpg
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

from penstock.kit.errors import Kind, PenstockError, StaleRow, StorageFull, Unavailable

P = ParamSpec("P")
T = TypeVar("T")

#: Trying again may help; everything else fails the same way again.
RETRYABLE: Final = frozenset({Kind.UNAVAILABLE, Kind.EXHAUSTED})
_DATABASE_AWAY: Final = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.PostgresSystemError,
    asyncpg.DeadlockDetectedError,
)
#: Failures that say nothing of the step itself.
_OUTAGES: Final = frozenset({Unavailable.code, StorageFull.code})


def application_error(error: PenstockError) -> ApplicationError:
    """The same failure for a workflow; its type is our code."""
    retryable = error.kind in RETRYABLE or isinstance(error, StaleRow)
    return ApplicationError(error.detail, type=error.code, non_retryable=not retryable)


def translated(function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """An activity that raises `ApplicationError` for expected failures and for a database that is away."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await function(*args, **kwargs)
        except PenstockError as error:
            raise application_error(error) from error
        except _DATABASE_AWAY as error:
            raise application_error(Unavailable(f"the database cannot be reached: {error!r}")) from error

    return call


def cause_of(error: FailureError) -> BaseException:
    """What went wrong in an activity. Temporal wraps the failures of remote activities, but not those of local ones."""
    return error.cause or error if isinstance(error, ActivityError) else error


def is_outage(error: FailureError) -> bool:
    """Whether the activity failed only because something was away: no verdict on the step itself."""
    cause = cause_of(error)
    return isinstance(cause, ApplicationError) and cause.type in _OUTAGES
