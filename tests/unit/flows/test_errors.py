"""Failures as Temporal sees them."""

import asyncpg
import pytest
from temporalio.exceptions import ApplicationError

from penstock.compute.errors import OutOfCapacity
from penstock.flows.errors import application_error, is_outage, translated
from penstock.kit.errors import Invalid, NotFound, PenstockError, StaleRow, Unavailable


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (Invalid("x"), False),
        (NotFound("x"), False),
        (StaleRow("x"), True),
        (Unavailable("x"), True),
        (OutOfCapacity("x"), True),
    ],
)
def test_only_what_may_pass_is_tried_again(error: PenstockError, retried: bool) -> None:
    translation = application_error(error)
    assert (translation.type, translation.non_retryable) == (error.code, not retried)


async def test_a_database_that_is_away_is_no_verdict_on_the_step() -> None:
    @translated
    async def away() -> None:
        raise asyncpg.ConnectionDoesNotExistError("gone")

    @translated
    async def wrong() -> None:
        raise Invalid("no")

    with pytest.raises(ApplicationError) as caught:
        await away()
    assert is_outage(caught.value)
    with pytest.raises(ApplicationError) as caught:
        await wrong()
    assert not is_outage(caught.value)
