"""The rows of budgets, and what was spent before a budget was made.

A new budget counts what the meter charged and what leases spent since its period began, and the leases that still run.
It waits for the meter's turn and for whoever has a lease of the project in hand, so that nothing is counted twice or
missed: the meter's next run sees the budget, and so does the settling of each lease.
"""

from datetime import datetime, timedelta
from typing import Final

import asyncpg

from penstock.billing.budgetmodel import Action, Budget, Period, Setting
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.errors import Unavailable

_WAIT: Final = "10s"
#: Longer than any period, and than any meter that is behind.
_KEEP: Final = timedelta(days=62)

#: What the meter charged to a project or key since a time; leases have counted their own part. Hours do not stand in
#: the days, so they are summed up from windows.
_CHARGED_DAYS: Final = """
    select coalesce(sum(d.amount_microusd), 0)::bigint
    from billing.daily d join billing.series s on s.id = d.series_id
    where d.organisation_id = $1 and d.day >= ($4 at time zone 'UTC')::date
        and s.project_id = $2 and ($3::text is null or s.key_id = $3) and not s.leased
"""
_CHARGED_WINDOWS: Final = """
    select coalesce(sum(w.amount), 0)::bigint
    from billing.series s cross join lateral (
        select sum(u.amount_microusd) as amount from billing.usage u
        where u.series_id = s.id and u.window_start >= $4) w
    where s.project_id = $2 and ($3::text is null or s.key_id = $3) and not s.leased and s.id in (
        select d.series_id from billing.daily d
        where d.organisation_id = $1 and d.day >= ($4 at time zone 'UTC')::date)
"""
_BEGIN: Final = """
    with living as (
        select id, amount_microusd, expires_at from billing.leases
        where project_id = $2 and ($3::text is null or key_id = $3) and created_at >= $4
    ), parts as (
        insert into billing.lease_parts (lease_id, budget_id, period_start, amount_microusd, expires_at)
        select id, $1, $4, amount_microusd, expires_at from living
    ), charged as (
        insert into billing.spending (budget_id, period_start, spent_microusd) values ($1, $4, $5)
    )
    insert into billing.budget_periods (budget_id, period_start, settled_microusd, reserved_microusd)
    select $1, $4, coalesce((
            select sum(amount_microusd) from billing.settled
            where project_id = $2 and hour >= $4 and ($3::text is null or key_id = $3)), 0),
        coalesce((select sum(amount_microusd) from living), 0)
"""


async def await_meter(tx: Tx) -> None:
    """Take the meter's turn: no run that does not know of this transaction is under way, and none begins."""
    await tx.execute(f"set local lock_timeout = '{_WAIT}'")
    try:
        await tx.execute("select 1 from billing.progress for update")
    except asyncpg.LockNotAvailableError as error:
        raise Unavailable("usage is being charged just now; try again", retry_after_s=5) from error
    await tx.execute("set local lock_timeout to default")


async def lock_project(tx: Tx, project_id: str) -> int:
    """Whoever has a lease of the project in hand is done; how many budgets the project has."""
    rows = await tx.fetch(
        "select deleted_at from billing.budgets where project_id = $1 order by id for no key update", project_id
    )
    return sum(row["deleted_at"] is None for row in rows)


async def change(tx: Tx, to: Setting) -> str | None:
    """Set the limit of a budget that is there; its id. A higher one is warned of anew."""
    row = await tx.fetchrow(
        "select id, limit_microusd from billing.budgets where project_id = $1 and coalesce(key_id, '') = $2"
        " and period = $3 and deleted_at is null for no key update",
        to.project_id,
        to.key_id or "",
        to.period,
    )
    if row is None:
        return None
    await tx.execute(
        "update billing.budgets set limit_microusd = $2, action = $3, updated_at = clock_timestamp() where id = $1",
        row["id"],
        to.limit_microusd,
        to.action,
    )
    if to.limit_microusd > row["limit_microusd"]:
        await tx.execute(
            "update billing.budget_periods set warned_at = null, exhausted_at = null, released_at = null"
            " where budget_id = $1",
            row["id"],
        )
    return row["id"]


async def insert(tx: Tx, budget_id: str, to: Setting, *, at: datetime | None = None) -> None:
    """A new budget; the caller has the meter's turn and the project's lock."""
    starts_at: datetime = await tx.fetchval(
        """
        insert into billing.budgets (id, organisation_id, project_id, key_id, period, limit_microusd, action,
            created_at)
        values ($1, $2, $3, $4, $5, $6, $7, coalesce($8::timestamptz, clock_timestamp()))
        returning billing.period_start(period, created_at)
        """,
        budget_id,
        to.organisation_id,
        to.project_id,
        to.key_id,
        to.period,
        to.limit_microusd,
        to.action,
        at,
    )
    query = _CHARGED_WINDOWS if to.period is Period.HOURLY else _CHARGED_DAYS
    charged = await tx.fetchval(query, to.organisation_id, to.project_id, to.key_id, starts_at)
    await tx.execute(_BEGIN, budget_id, to.project_id, to.key_id, starts_at, charged)


async def find(conn: Reader, project_id: str, budget_id: str, *, at: datetime | None = None) -> Budget | None:
    """One of the project's budgets as it stands."""
    row = await conn.fetchrow(
        "select * from billing.budgets_at(coalesce($3, statement_timestamp())) where project_id = $1 and id = $2",
        project_id,
        budget_id,
        at,
    )
    return as_budget(row) if row else None


async def page(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Budget]:
    """The project's budgets as they stand, by id."""
    rows = await conn.fetch(
        "select * from billing.budgets_at(statement_timestamp()) where project_id = $1 and id > $2"
        " order by id limit $3",
        project_id,
        after,
        limit,
    )
    return [as_budget(row) for row in rows]


async def delete(tx: Tx, project_id: str, budget_id: str) -> bool:
    """It applies no more; leases under it run on. Whether there was such a budget."""
    return bool(
        await tx.fetchval(
            "update billing.budgets set deleted_at = clock_timestamp()"
            " where project_id = $1 and id = $2 and deleted_at is null returning true",
            project_id,
            budget_id,
        )
    )


async def prune(tx: Tx) -> None:
    """Forget deleted budgets that no lease is part of, and periods that nobody asks for any more; the caller has the
    meter's turn."""
    await tx.execute(
        "delete from billing.budgets b where deleted_at is not null"
        " and not exists (select 1 from billing.lease_parts p where p.budget_id = b.id)"
    )
    for table, column in (("spending", "period_start"), ("budget_periods", "period_start"), ("settled", "hour")):
        await tx.execute(f"delete from billing.{table} where {column} < clock_timestamp() - $1::interval", _KEEP)  # noqa: S608


def as_budget(row: Row) -> Budget:
    """From a row that has the columns of `billing.budgets_at`."""
    values = {name: row[name] for name in Budget.__dataclass_fields__}
    return Budget(period=Period(values.pop("period")), action=Action(values.pop("action")), **values)
