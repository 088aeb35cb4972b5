"""What operators change: the turn of the meter, and terms."""

from typing import Final

import asyncpg

from penstock.billing.errors import MeterBusy
from penstock.kit.db import Reader, Tx

_WAIT: Final = "10s"


async def wait_for_turn(tx: Tx) -> None:
    """Charges are not written meanwhile: what is left of them, and of credit, stays as it is."""
    before = await tx.fetchval("select current_setting('lock_timeout')")
    try:
        await tx.execute("select set_config('lock_timeout', $1, true)", _WAIT)
        await tx.execute("select 1 from billing.progress for update")
    except asyncpg.LockNotAvailableError as error:
        raise MeterBusy("usage is being charged at this moment; try again", retry_after_s=5) from error
    await tx.execute("select set_config('lock_timeout', $1, true)", before)


async def credit_limit(conn: Reader, organisation_id: str) -> int:
    """How far the organisation may go below zero."""
    found = await conn.fetchval(
        "select credit_limit_microusd from billing.customers where organisation_id = $1", organisation_id
    )
    return found or 0


async def set_credit_limit(tx: Tx, organisation_id: str, credit_limit_microusd: int) -> None:
    """How far the organisation may go below zero."""
    await tx.execute(
        "update billing.customers set credit_limit_microusd = $2 where organisation_id = $1",
        organisation_id,
        credit_limit_microusd,
    )
