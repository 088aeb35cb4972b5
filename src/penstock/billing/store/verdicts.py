"""Which budgets have something to tell, or to ask for; all of them in one look."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.billing.budgetmodel import Budget
from penstock.billing.store.budgets import as_budget
from penstock.kit.db import Reader, Tx

#: $1 the moment, $2 until when time is foreseen, $3 the budgets, if not all, $4 whether the moment is now: of a
#: period that is over only its end is told. Warnings are given at four fifths.
_JUDGE: Final = """
    with looked as materialized (
        select b.*, p.warned_at, p.exhausted_at, p.held_microusd as held_before,
            case when $4 then coalesce(running.cost, 0)::bigint else b.held_microusd end as held,
            b.spent_microusd > 0 and b.spent_microusd >= b.limit_microusd as used_up,
            $4 and b.action = 'reject' and running.price > 0
                and b.spent_microusd + b.reserved_microusd + running.cost >= b.limit_microusd
                and (p.released_at is null or running.newest > p.released_at)
                and not exists (
                    select 1 from billing.release_requests r where r.done_at is null and r.project_id = b.project_id
                    and r.key_id is not distinct from b.key_id) as release
        from billing.budgets_at($1) b
        left join billing.budget_periods p on p.budget_id = b.id and p.period_start = b.starts_at
        left join lateral (
            select sum(a.price_microusd_per_hour) filter (where a.billing_ended_at is null) as price,
                max(a.active_at) filter (where a.billing_ended_at is null) as newest,
                ceil(sum(a.price_microusd_per_hour * greatest(0, extract(epoch from
                    least(case when a.until_at < $1 then a.until_at
                        else coalesce(a.billing_ended_at, $2::timestamptz) end, b.ends_at)
                        - greatest(a.since, b.starts_at)))) / 3600) as cost
            from (select m.*, billing.counted_until(m.billing_ended_at, m.heard_until, $1) as until_at
                from billing.metered m) a
            where a.organisation_id = b.organisation_id and a.project_id = b.project_id
                and (b.key_id is null or a.key_id = b.key_id)
        ) running on $4 and b.action = 'reject'
        where {which} and b.starts_at >= billing.period_start(b.period, b.created_at)
    ), judged as (
        select l.*, coalesce(release, false) as asks,
            exhausted_at is null and (used_up or coalesce(release, false)) as exhausts,
            warned_at is null and (used_up or coalesce(release, false)
                or spent_microusd > 0 and spent_microusd * 5 >= limit_microusd * 4) as warns
        from looked l
    )
    select * from judged where asks or exhausts or warns or held <> coalesce(held_before, 0) order by id
"""
_JUDGE_ALL: Final = _JUDGE.format(which="$3::text[] is null")
_JUDGE_SOME: Final = _JUDGE.format(which="b.id = any($3::text[])")
_MARK: Final = """
    insert into billing.budget_periods as p (budget_id, period_start, held_microusd, warned_at,
        exhausted_at, released_at)
    select id, starts_at, held, case when warns then $7::timestamptz end, case when exhausts then $7 end,
        case when asks then $7 end
    from unnest($1::text[], $2::timestamptz[], $3::bigint[], $4::boolean[], $5::boolean[], $6::boolean[])
        v (id, starts_at, held, warns, exhausts, asks)
    on conflict (budget_id, period_start) do update set held_microusd = excluded.held_microusd,
        warned_at = coalesce(p.warned_at, excluded.warned_at),
        exhausted_at = coalesce(p.exhausted_at, excluded.exhausted_at),
        released_at = coalesce(excluded.released_at, p.released_at)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is new about a budget. `held` is what allocations that run need until the next look, with a margin."""

    budget: Budget
    held_microusd: int
    warns: bool
    exhausts: bool
    asks: bool

    @property
    def facts(self) -> int:
        """How many it makes."""
        return self.warns + self.exhausts + self.asks


async def clock(conn: Reader) -> tuple[datetime, datetime]:
    """The database's time, and until when time is charged."""
    row = await conn.fetchrow("select clock_timestamp() as now, accrued_until from billing.progress")
    assert row is not None
    return row["now"], row["accrued_until"]


async def judge(
    conn: Reader, *, at: datetime, foreseen: datetime, budget_ids: Sequence[str] | None, current: bool
) -> list[Verdict]:
    """What is to be told and done about these budgets, or all, in the period of a moment."""
    rows = await conn.fetch(_JUDGE_ALL if budget_ids is None else _JUDGE_SOME, at, foreseen, budget_ids, current)
    return [
        Verdict(
            budget=as_budget(row),
            held_microusd=row["held"],
            warns=row["warns"],
            exhausts=row["exhausts"],
            asks=row["asks"],
        )
        for row in rows
    ]


async def lock(tx: Tx, budget_ids: Sequence[str]) -> None:
    """Whoever else judges, leases or settles under these budgets waits."""
    await tx.execute("select 1 from billing.budgets where id = any($1) order by id for no key update", list(budget_ids))


async def mark(tx: Tx, verdicts: Sequence[Verdict], at: datetime) -> None:
    """It is told and asked for; the caller has locked the budgets."""
    await tx.execute(
        _MARK,
        [verdict.budget.id for verdict in verdicts],
        [verdict.budget.starts_at for verdict in verdicts],
        [verdict.held_microusd for verdict in verdicts],
        [verdict.warns for verdict in verdicts],
        [verdict.exhausts for verdict in verdicts],
        [verdict.asks for verdict in verdicts],
        at,
    )


async def number(tx: Tx, facts: Mapping[str, int]) -> dict[str, int]:
    """Take so many versions of each budget; the first of them."""
    rows = await tx.fetch(
        "update billing.budgets b set version = version + n from unnest($1::text[], $2::bigint[]) f (id, n)"
        " where b.id = f.id returning b.id, b.version - n + 1 as first",
        list(facts),
        list(facts.values()),
    )
    return {row["id"]: row["first"] for row in rows}
