"""Proves the ledger from its entries, and says where it does not hold. Asking changes nothing."""

from typing import Final

import asyncpg

from penstock.billing.errors import TooMuchToVerify
from penstock.billing.periods import Period
from penstock.billing.store import verification
from penstock.kit.caller import Caller
from penstock.kit.db import Row, Tx
from penstock.wire import rest

PROBLEMS_MAX: Final = 100
_STATEMENT: Final = "25s"


async def verify(tx: Tx, caller: Caller, organisation_id: str | None, period: Period | None) -> rest.LedgerReport:
    """All of it, or what belongs to an organisation or a time. The transaction is this question's own."""
    caller.require("billing.adjust")
    await tx.execute("set transaction isolation level repeatable read, read only")
    await tx.execute("select set_config('statement_timeout', $1, true)", _STATEMENT)
    return await look(tx, organisation_id, period)


async def look(tx: Tx, organisation_id: str | None, period: Period | None) -> rest.LedgerReport:
    """What each check finds."""
    since, until = (period.since, period.until) if period else (None, None)
    checks: list[rest.LedgerCheck] = []
    problems: list[rest.LedgerProblem] = []
    for name in verification.CHECKS:
        try:
            rows = await verification.look(tx, name, organisation_id, since, until, PROBLEMS_MAX)
        except asyncpg.QueryCanceledError as error:
            raise TooMuchToVerify(
                f"{name} takes more than {_STATEMENT}: ask for one organisation_id, or for fewer days (from, to)"
            ) from error
        checks.append(rest.LedgerCheck(name=name, looked_at=rows[0]["looked_at"], problems=rows[0]["problems"]))
        problems += _problems(name, rows)
    return rest.LedgerReport(holds=not problems, at=await tx.fetchval("select now()"), checks=checks, problems=problems)


def _problems(check: str, rows: list[Row]) -> list[rest.LedgerProblem]:
    return [
        rest.LedgerProblem(check=check, subject=row["subject"], detail=row["detail"])
        for row in rows
        if row["subject"] is not None
    ]
