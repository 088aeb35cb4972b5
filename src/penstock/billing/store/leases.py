"""Tranches of budgets, and what they leave in the periods that they were reserved in.

Budgets are locked in the order of their ids, then leases, then periods. Of a lease that is over nothing counts any
more, from the moment on that somebody looks under its budgets' locks.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from penstock.billing.budgetmodel import Budget, Lease
from penstock.billing.store.budgets import as_budget
from penstock.kit.db import Reader, Tx

_INSERT: Final = """
    with lease as (
        insert into billing.leases (id, project_id, key_id, amount_microusd, holder, created_at, expires_at)
        values ($1, $2, $3, $4, $5, $6::timestamptz, $6 + make_interval(secs => $7)) returning expires_at
    ), under as (
        select budget_id, period_start from unnest($8::text[], $9::timestamptz[]) u (budget_id, period_start)
    ), parts as (
        insert into billing.lease_parts (lease_id, budget_id, period_start, amount_microusd, expires_at)
        select $1, budget_id, period_start, $4, expires_at from under cross join lease
    ), counted as (
        insert into billing.budget_periods as p (budget_id, period_start, reserved_microusd)
        select budget_id, period_start, $4 from under
        on conflict (budget_id, period_start) do update
            set reserved_microusd = p.reserved_microusd + excluded.reserved_microusd
    )
    select expires_at from lease
"""
_LOCK_OF: Final = """
    select 1 from billing.budgets where id in (select budget_id from billing.lease_parts where lease_id = any($1))
    order by id for no key update
"""
#: Refused when it is over, or when more was spent than leased.
_SETTLE: Final = """
    with ended as (
        delete from billing.leases where id = $1 and amount_microusd >= $2 and lapsed_at is null
            and expires_at > coalesce($3, clock_timestamp())
        returning project_id, coalesce(key_id, '') as key_id, amount_microusd, created_at
    ), counted as (
        update billing.budget_periods p set reserved_microusd = p.reserved_microusd - e.amount_microusd,
            settled_microusd = p.settled_microusd + $2
        from ended e, billing.lease_parts l
        where l.lease_id = $1 and p.budget_id = l.budget_id and p.period_start = l.period_start
    ), kept as (
        insert into billing.settled as s (project_id, key_id, hour, amount_microusd)
        select project_id, key_id, billing.period_start('hourly', created_at), $2 from ended where $2 > 0
        on conflict (project_id, hour, key_id) do update
            set amount_microusd = s.amount_microusd + excluded.amount_microusd
    )
    select exists (select 1 from ended)
"""
_EXPIRE: Final = """
    with ended as (
        delete from billing.leases where id = any($1) and expires_at <= coalesce($2, clock_timestamp()) returning id
    ), counted as (
        update billing.budget_periods p set reserved_microusd = p.reserved_microusd - l.amount
        from (
            select budget_id, period_start, sum(amount_microusd)::bigint as amount
            from billing.lease_parts where lease_id in (select id from ended) group by 1, 2
        ) l
        where p.budget_id = l.budget_id and p.period_start = l.period_start
    )
    select count(*) from ended
"""
#: The first budget that has no room for so long of all that its project or key has asked for, and for one more.
_LACKING: Final = """
    select b.* from billing.budgets_at(coalesce($5, statement_timestamp())) b
    cross join lateral (
        select coalesce(sum(c.price_microusd_per_hour), 0) + $3::bigint as price from compute.commitments c
        where c.organisation_id = b.organisation_id and c.project_id = b.project_id
            and (b.key_id is null or c.key_id = b.key_id)
    ) rate
    cross join lateral (
        select coalesce(sum(a.price_microusd_per_hour * greatest(0, extract(epoch from
            billing.counted_until(a.billing_ended_at, a.heard_until, coalesce($5, statement_timestamp()))
                - greatest(a.since, b.starts_at)))), 0) as microusd_s
        from billing.metered a
        where a.organisation_id = b.organisation_id and a.project_id = b.project_id
            and (b.key_id is null or a.key_id = b.key_id)
    ) unbilled
    where b.project_id = $1 and (b.key_id is null or b.key_id = $2) and b.action = 'reject'
        and b.limit_microusd - b.spent_microusd - b.reserved_microusd
            < (rate.price * $4::double precision + unbilled.microusd_s) / 3600
    order by b.limit_microusd - b.spent_microusd - b.reserved_microusd, b.id limit 1
"""


async def lock_budgets(
    tx: Tx, *, project_id: str, key_id: str | None, at: datetime | None = None
) -> tuple[datetime | None, list[Budget]]:
    """Everything that applies to this project and key, locked, and the moment at which it was looked at."""
    rows = await tx.fetch("select * from billing.lock_budgets($1, $2, $3)", project_id, key_id, at)
    return (rows[0]["moment"] if rows else None), [as_budget(row) for row in rows]


async def insert(
    tx: Tx,
    lease_id: str,
    budgets: Sequence[Budget],
    *,
    project_id: str,
    key_id: str | None,
    amount_microusd: int,
    holder: str,
    at: datetime,
    ttl_s: float,
) -> Lease:
    """A lease under all these budgets, which the caller has locked."""
    expires_at = await tx.fetchval(
        _INSERT,
        lease_id,
        project_id,
        key_id,
        amount_microusd,
        holder,
        at,
        ttl_s,
        [budget.id for budget in budgets],
        [budget.starts_at for budget in budgets],
    )
    return Lease(id=lease_id, amount_microusd=amount_microusd, expires_at=expires_at)


async def lock_budgets_of(tx: Tx, lease_ids: Sequence[str]) -> None:
    """The budgets that these leases are part of."""
    await tx.execute(_LOCK_OF, list(lease_ids))


async def settle(tx: Tx, lease_id: str, spent_microusd: int, *, at: datetime | None = None) -> bool:
    """Count what was spent and give the rest back; whether the lease still ran."""
    return await tx.fetchval(_SETTLE, lease_id, spent_microusd, at)


async def amount(conn: Reader, lease_id: str) -> int | None:
    """How much a lease is of; none when there is no such lease."""
    return await conn.fetchval("select amount_microusd from billing.leases where id = $1", lease_id)


async def over(conn: Reader, *, limit: int, at: datetime | None = None) -> list[str]:
    """Leases that are over, the longest first."""
    rows = await conn.fetch(
        "select id from billing.leases where expires_at <= coalesce($1, clock_timestamp())"
        " order by expires_at limit $2",
        at,
        limit,
    )
    return [row["id"] for row in rows]


async def expire(tx: Tx, lease_ids: Sequence[str], *, at: datetime | None = None) -> int:
    """Give back what these have of their budgets, if they are over; how many were."""
    return await tx.fetchval(_EXPIRE, list(lease_ids), at)


async def lacking(
    conn: Reader,
    *,
    project_id: str,
    key_id: str | None,
    price_microusd_per_hour: int,
    minimum_s: float,
    at: datetime | None = None,
) -> Budget | None:
    """The budget that has no room for one more allocation, if any."""
    row = await conn.fetchrow(_LACKING, project_id, key_id, price_microusd_per_hour, minimum_s, at)
    return as_budget(row) if row else None
