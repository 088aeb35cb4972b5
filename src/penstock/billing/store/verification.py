"""The ledger recomputed from its entries: set by set, and only what differs comes back.

Every statement answers rows of `(looked_at, problems, subject, detail)`; the first two are the same on each, the others
are null where all is well. Where they are not null, `$1` limits them to an organisation, `$2` and `$3` to what was
posted or used in a time; `$4` is how many problems are listed.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from penstock.kit.db import Reader, Row

#: Wraps a query of `subject`, `wrong` and `detail` for everything that was looked at.
_REPORT: Final = """
    with looked as materialized ({looked})
    select t.looked_at, t.problems, p.subject, p.detail
    from (select count(*) as looked_at, count(*) filter (where wrong) as problems from looked) t
    left join lateral (select subject, detail from looked where wrong order by subject limit $4) p on true
"""
_POSTED: Final = """
    ($1::text is null or t.organisation_id = $1) and ($2::timestamptz is null or t.at >= $2)
    and ($3::timestamptz is null or t.at < $3)
"""
_WINDOWS: Final = """
    ($1::text is null or s.organisation_id = $1) and ($2::timestamptz is null or u.window_start >= $2)
    and ($3::timestamptz is null or u.window_start < $3)
"""

#: A checkpoint is of all entries before its transaction, whenever they were posted: time does not limit it.
_CHECKPOINTS: Final = """
    select c.account_id as subject,
        c.balance_microusd <> coalesce(e.amount, 0) or c.entries <> coalesce(e.entries, 0) as wrong,
        format('the checkpoint says %s in %s entries, the entries say %s in %s', c.balance_microusd, c.entries,
            coalesce(e.amount, 0), coalesce(e.entries, 0)) as detail
    from billing.checkpoints c join billing.accounts a on a.id = c.account_id left join lateral (
        select sum(amount_microusd) as amount, count(*) as entries
        from billing.entries where account_id = c.account_id and tx < c.tx
    ) e on true
    where c.tx <= pg_snapshot_xmin(pg_current_snapshot()) and ($1::text is null or a.organisation_id = $1)
        and ($2::timestamptz is null or c.taken_at >= $2) and ($3::timestamptz is null or true)
"""
_ZERO_SUM: Final = f"""
    select t.id as subject, coalesce(sum(e.amount_microusd), 0) <> 0 or count(e.*) = 0 as wrong,
        format('%s entries sum to %s', count(e.*), coalesce(sum(e.amount_microusd), 0)) as detail
    from billing.transfers t left join billing.entries e on e.transfer_id = t.id where {_POSTED} group by t.id
"""  # noqa: S608
#: Whole days only, as the days of the time that is asked for.
_DAYS: Final = """
    select coalesce(d.series_id, u.series_id) || ' on ' || coalesce(d.day, u.day) as subject,
        d.amount is distinct from u.amount or d.quantity is distinct from u.quantity as wrong,
        format('the day says %s for %s, its windows say %s for %s', d.amount, d.quantity, u.amount, u.quantity)
            as detail
    from (
        select series_id, day, amount_microusd::numeric as amount, quantity::numeric as quantity from billing.daily
        where ($1::text is null or organisation_id = $1)
            and ($2::timestamptz is null or day >= ($2 at time zone 'UTC')::date)
            and ($3::timestamptz is null or day < ($3 at time zone 'UTC')::date)
    ) d full join (
        select u.series_id, (u.window_start at time zone 'UTC')::date as day, sum(u.amount_microusd) as amount,
            sum(u.quantity) as quantity
        from billing.usage u join billing.series s on s.id = u.series_id
        where {windows} group by 1, 2
    ) u on u.series_id = d.series_id and u.day = d.day
"""
#: What windows say was charged in a run, and what the transfer of that run took.
_CHARGES: Final = """
    select coalesce(t.id, 'usage of ' || u.organisation_id || ' at ' || billing.stamp(u.window_start)) as subject,
        coalesce(u.amount, 0) <> coalesce(t.amount, 0) as wrong,
        format('its windows say %s, the ledger took %s', coalesce(u.amount, 0), coalesce(t.amount, 0)) as detail
    from (
        select s.organisation_id, u.window_start, u.run_at, sum(u.amount_microusd) as amount
        from billing.usage u join billing.series s on s.id = u.series_id
        where u.nth = 0 and {windows} group by 1, 2, 3
    ) u full join (
        select t.id, t.organisation_id, t.window_start, t.run_at, e.amount_microusd as amount
        from billing.transfers t
        left join billing.entries e on e.transfer_id = t.id and e.account_id = 'platform/revenue'
        where t.kind = 'usage' and ($1::text is null or t.organisation_id = $1)
            and ($2::timestamptz is null or t.window_start >= $2) and ($3::timestamptz is null or t.window_start < $3)
    ) t on t.organisation_id = u.organisation_id and t.window_start = u.window_start and t.run_at = u.run_at
"""
#: What the meter took back of windows, and what the ledger gave back for it; where an operator had given back a part
#: already, it may be less.
_GIVEN_BACK: Final = """
    select u.organisation_id || ' at ' || billing.stamp(u.window_start) as subject,
        u.amount <> g.amount and not (g.adjusted and g.amount < u.amount) as wrong,
        format('its windows say %s, the ledger gave back %s', u.amount, g.amount) as detail
    from (
        select s.organisation_id, u.window_start, u.run_at, -sum(u.amount_microusd) as amount
        from billing.usage u join billing.series s on s.id = u.series_id
        where u.nth = 1 and {windows} group by 1, 2, 3
    ) u cross join lateral (
        select coalesce(-sum(e.amount_microusd)
                filter (where x.id = 'correction/' || t.id || '/' || billing.stamp(u.run_at)), 0) as amount,
            coalesce(bool_or(starts_with(x.id, 'correction/cor_')), false) as adjusted
        from billing.transfers t join billing.transfers x on x.corrects = t.id
        join billing.entries e on e.transfer_id = x.id and e.account_id = 'platform/revenue'
        where t.organisation_id = u.organisation_id and t.window_start = u.window_start
    ) g
"""
#: What is left of a transfer has the sign that it had: nothing was given back that had not been taken.
_CORRECTIONS: Final = f"""
    select t.id || ' on ' || o.account_id as subject, sign(l.amount) = -sign(o.amount_microusd) as wrong,
        format('%s was moved, %s is left', o.amount_microusd, l.amount) as detail
    from (select distinct corrects as id from billing.transfers where corrects is not null) c
    join billing.transfers t on t.id = c.id join billing.entries o on o.transfer_id = t.id cross join lateral (
        select o.amount_microusd + coalesce(sum(e.amount_microusd), 0) as amount
        from billing.transfers x join billing.entries e on e.transfer_id = x.id
        where x.corrects = t.id and e.account_id = o.account_id
    ) l
    where {_POSTED}
"""  # noqa: S608
#: Promotional credit is spent as far as there is any.
_CREDIT: Final = """
    select a.id as subject, billing.balance_of(a.id) < 0 as wrong,
        format('it is %s', billing.balance_of(a.id)) as detail
    from billing.accounts a where a.kind in ('credit', 'holds') and ($1::text is null or a.organisation_id = $1)
        and ($2::timestamptz is null or $3::timestamptz is null or true)
"""

#: By name, in the order in which they are told.
CHECKS: Final[Mapping[str, str]] = {
    "checkpoints": _REPORT.format(looked=_CHECKPOINTS),
    "zero_sum": _REPORT.format(looked=_ZERO_SUM),
    "days": _REPORT.format(looked=_DAYS.format(windows=_WINDOWS)),
    "charges": _REPORT.format(looked=_CHARGES.format(windows=_WINDOWS)),
    "given_back": _REPORT.format(looked=_GIVEN_BACK.format(windows=_WINDOWS)),
    "corrections": _REPORT.format(looked=_CORRECTIONS),
    "credit": _REPORT.format(looked=_CREDIT),
}


async def look(
    conn: Reader, check: str, organisation_id: str | None, since: datetime | None, until: datetime | None, limit: int
) -> list[Row]:
    """One check's answer."""
    return await conn.fetch(CHECKS[check], organisation_id, since, until, limit)
