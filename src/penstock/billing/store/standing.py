"""How organisations stand: what they own and spend, and the state that follows. Only `enter` writes the state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.billing.model import Standing, State
from penstock.kit.db import Reader, Row, Tx

_STANDINGS: Final = """
    select c.organisation_id, c.state, c.version, c.credit_limit_microusd,
        balance.microusd as balance_microusd, credit.microusd as credit_microusd, holds.microusd as holds_microusd,
        coalesce(burn.price, 0)::bigint as burn_microusd_per_hour,
        coalesce(ceil(burn.cost), 0)::bigint as unbilled_microusd, p.accrued_until, clock_timestamp() as now
    from billing.progress p cross join billing.customers c
    cross join lateral (
        select sum(u.price_microusd_per_hour) filter (where u.billing_ended_at is null) as price,
            sum(u.cost_microusd) as cost
        from billing.unbilled u where u.organisation_id = c.organisation_id
    ) burn
    cross join lateral billing.balances(c.organisation_id || '/balance') balance
    cross join lateral billing.balances(c.organisation_id || '/credit') credit
    cross join lateral billing.balances(c.organisation_id || '/holds') holds
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Purse:
    """What a create is measured by. `budgeted` says whether the project has budgets."""

    funds_microusd: int
    committed_microusd_per_hour: int
    budgeted: bool


async def find(conn: Reader, organisation_id: str) -> Standing | None:
    """One organisation's; none when it never had or owed anything."""
    row = await conn.fetchrow(f"{_STANDINGS} where c.organisation_id = $1", organisation_id)
    return _standing(row) if row else None


async def everyone(conn: Reader, *, after: str, limit: int) -> Sequence[Standing]:
    """All of them, page by page."""
    rows = await conn.fetch(
        f"{_STANDINGS} where c.organisation_id > $1 order by c.organisation_id limit $2", after, limit
    )
    return [_standing(row) for row in rows]


async def burning(conn: Reader, *, after: str, limit: int) -> Sequence[Standing]:
    """Those that pay for something now, page by page."""
    rows = await conn.fetch(
        f"{_STANDINGS} where c.organisation_id > $1 and burn.price > 0 order by c.organisation_id limit $2",
        after,
        limit,
    )
    return [_standing(row) for row in rows]


async def lock(tx: Tx, organisation_id: str) -> Standing | None:
    """One organisation's; whoever else decides by it waits."""
    await tx.execute("select 1 from billing.customers where organisation_id = $1 for update", organisation_id)
    return await find(tx, organisation_id)


async def lock_purse(tx: Tx, organisation_id: str, project_id: str) -> Purse | None:
    """What a create is measured by, one create after the other; none for whoever never had anything."""
    row = await tx.fetchrow("select * from billing.lock_purse($1, $2)", organisation_id, project_id)
    return Purse(**dict(row)) if row and row["funds_microusd"] is not None else None


async def enter(tx: Tx, standing: Standing, state: State) -> int:
    """Write the state; the row is locked. Its new version."""
    return await tx.fetchval(
        "update billing.customers set state = $2, version = version + 1, changed_at = clock_timestamp()"
        " where organisation_id = $1 returning version",
        standing.organisation_id,
        state,
    )


async def counts(conn: Reader) -> dict[str, int]:
    """How many organisations stand how."""
    rows = await conn.fetch("select state, count(*) as n from billing.customers group by state")
    return {row["state"]: row["n"] for row in rows}


def _standing(row: Row) -> Standing:
    values = dict(row)
    state = State(values.pop("state"))
    return Standing(state=state, **values)
