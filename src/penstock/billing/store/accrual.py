"""Charging time and metered usage, for everybody at once.

Time is cut into windows. Each window of each allocation gets one usage row, rated as the difference of two totals since
activation, so that no rounding adds up; each account gets one transfer for each window, with the usage rows under it.
Usage that other domains recorded is charged with the window that ends. Promotional credit is spent before the balance.
Everything is read from one snapshot and written by one statement: a run that dies has done nothing.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from penstock.billing.model import US_PER_HOUR, Accrued
from penstock.kit.db import Reader, Tx

#: No window was ever longer than this.
WINDOW_MAX_S: Final = 3600
#: What time costs since activation, as a total.
_TOTAL: Final = "div((extract(epoch from {at} - active_at) * 1000000)::numeric * price, {per})"
_SINCE: Final = _TOTAL.format(at="from_at", per=US_PER_HOUR)
_UNTIL: Final = _TOTAL.format(at="until_at", per=US_PER_HOUR)

#: Allocations on the meter, with what is charged of them already.
_METERED: Final = """
    select b.allocation_id as series_id, b.organisation_id, b.project_id, b.key_id, b.purpose, b.sku, b.gpus, b.labels,
        b.price_microusd_per_hour as price, b.active_at, b.billing_ended_at as ended_at, b.heard_until, b.since
    from billing.metered b
"""

#: $1 until when, $2 the length of a window, $3 until when all was charged before, $4 the most that is charged of one
#: allocation. A window that is begun twice, because its length was changed or its node was silent, begins the second
#: time where the first left off. Who became a payer after accounts were opened waits for the next run, and so does an
#: end that came after `_EXCESS` and lies before what was charged.
_ACCRUE: Final = f"""
    with metered as materialized (
        select m.*, least(billing.counted_until(ended_at, heard_until, $1),
            date_bin($2, since, timestamptz 'epoch') + $4::interval) as due
        from ({_METERED} where b.active_at < $1::timestamptz
            and b.organisation_id in (select organisation_id from billing.customers)) m
    ), opened as (
        insert into billing.series (id, organisation_id, project_id, key_id, resource_kind, resource_id, meter, detail,
            gpus, labels, price_microusd, per)
        select series_id, organisation_id, project_id, key_id, 'allocation', series_id, 'allocation.' || purpose, sku,
            gpus, labels, price, {US_PER_HOUR}
        from metered where since = active_at on conflict (id) do nothing
    ), relabelled as (
        update billing.series s set labels = m.labels from metered m where s.id = m.series_id and s.labels <> m.labels
    ), slices as (
        select m.*, case when w < since and since > active_at then since else w end as window_start,
            greatest(w, since) as from_at, least(w + $2::interval, due) as until_at
        from metered m cross join lateral generate_series(
            date_bin($2, since, timestamptz 'epoch'), due - interval '1 microsecond', $2) w
        where since < due
    ), pending as materialized (
        select project_id, key, series_id, quantity from billing.recorded
        where state = 'pending' and recorded_at < $1
            and organisation_id in (select organisation_id from billing.customers)
    ), folded as (
        select s.id as series_id, s.organisation_id, s.project_id, s.key_id, s.leased, s.quantity as before,
            s.price_microusd::numeric as price, s.per, sum(p.quantity)::bigint as added
        from pending p join billing.series s on s.id = p.series_id group by s.id
    ), advanced as (
        update billing.series s set quantity = s.quantity + f.added from folded f where s.id = f.series_id
    ), marked as (
        update billing.recorded r set state = 'rated', run_at = $1 from pending p
        where r.project_id = p.project_id and r.key = p.key
    ), charges as materialized (
        select series_id, organisation_id, project_id, key_id, false as leased, window_start, from_at, until_at,
            (extract(epoch from until_at - from_at) * 1000000)::bigint as quantity,
            ({_UNTIL} - {_SINCE})::bigint as amount
        from slices
        union all
        select series_id, organisation_id, project_id, key_id, leased, ending, ending, $1, added,
            (div((before + added) * price, per) - div(before * price, per))::bigint
        from folded cross join (select greatest($1 - $2::interval, $3) as ending) w
    ), used as (
        insert into billing.usage (window_start, series_id, from_at, until_at, quantity, amount_microusd, run_at)
        select window_start, series_id, from_at, until_at, quantity, amount, $1 from charges
        order by window_start, series_id
    ), summed as (
        insert into billing.daily as d (series_id, day, organisation_id, quantity, amount_microusd, until_at)
        select series_id, (window_start at time zone 'UTC')::date, organisation_id, sum(quantity), sum(amount),
            max(until_at)
        from charges group by 1, 2, 3 order by 1, 2
        on conflict (series_id, day) do update set quantity = d.quantity + excluded.quantity,
            amount_microusd = d.amount_microusd + excluded.amount_microusd, until_at = excluded.until_at
    ), spent as (
        insert into billing.spending as s (budget_id, period_start, spent_microusd)
        select b.id, billing.period_start(b.period, c.window_start), sum(c.amount)
        from charges c join billing.budgets b
            on b.project_id = c.project_id and (b.key_id is null or b.key_id = c.key_id)
        where not c.leased group by 1, 2 order by 1, 2
        on conflict (budget_id, period_start) do update set spent_microusd = s.spent_microusd + excluded.spent_microusd
    ), bills as (
        select organisation_id, window_start, sum(amount) as amount,
            'usage/' || organisation_id || '/' || billing.stamp(window_start) as id
        from charges group by organisation_id, window_start having sum(amount) > 0
    ), split as (
        select b.*, least(amount, greatest(0, credit - (sum(amount) over earlier - amount)))::bigint as from_credit
        from bills b join (
            select organisation_id, billing.balance_of(organisation_id || '/credit') as credit
            from (select distinct organisation_id from bills) payers
        ) c using (organisation_id)
        window earlier as (partition by organisation_id order by window_start)
    ), numbered as materialized (
        select s.*, case when exists (select 1 from billing.transfers t where t.id = s.id)
            then s.id || '/' || billing.stamp($1) else s.id end as transfer_id
        from split s
    ), posted as (
        insert into billing.transfers (id, kind, organisation_id, window_start, run_at)
        select transfer_id, 'usage', organisation_id, window_start, $1 from numbered
    ), written as (
        insert into billing.entries (transfer_id, account_id, amount_microusd)
        select transfer_id, account_id, part
        from numbered cross join lateral (values
            (organisation_id || '/credit', -from_credit),
            (organisation_id || '/balance', from_credit - amount::bigint),
            ('platform/revenue', amount::bigint)) e (account_id, part)
        where part <> 0 order by window_start, organisation_id
    )
    select (select count(*) from charges) as windows, (select count(*) from numbered) as transfers,
        (select coalesce(sum(amount), 0)::bigint from numbered) as amount,
        array(select series_id from metered where ended_at <= due and (since <= ended_at or since = active_at)) as ended
"""  # noqa: S608

#: Windows that were charged beyond what turned out to be the end, each with what is given back of it, once. They are
#: looked up for each allocation that has such (`offset 0`): a join would be planned as a scan of all usage ever.
_EXCESS: Final = f"""
    with metered as ({_METERED} where b.billing_ended_at is not null), excess as materialized (
        select m.series_id, m.organisation_id, m.project_id, m.key_id, m.ended_at, u.window_start,
            u.run_at as charged_at, u.from_at, u.until_at, greatest(u.from_at, m.ended_at) as kept_until,
            m.price, m.active_at, u.amount_microusd as charged
        from (select * from metered where since > ended_at offset 0) m cross join lateral (
            select * from billing.usage charged
            where series_id = m.series_id and nth = 0 and until_at > m.ended_at and window_start < m.since
                and window_start > m.ended_at - interval '{WINDOW_MAX_S} seconds' and not exists (
                    select 1 from billing.usage where window_start = charged.window_start
                        and series_id = m.series_id and nth = 1)
            offset 0
        ) u
    ), rated as materialized (
        select *, -(extract(epoch from until_at - kept_until) * 1000000)::bigint as quantity,
            ({_TOTAL.format(at="kept_until", per=US_PER_HOUR)} - {_SINCE})::bigint - charged as amount
        from excess
    ), used as (
        insert into billing.usage (window_start, series_id, nth, from_at, until_at, quantity, amount_microusd, run_at)
        select window_start, series_id, 1, kept_until, until_at, quantity, amount, $1 from rated
    ), summed as (
        update billing.daily d set quantity = d.quantity + r.quantity, amount_microusd = d.amount_microusd + r.amount,
            until_at = r.ended_at
        from (
            select series_id, (window_start at time zone 'UTC')::date as day, sum(quantity)::bigint as quantity,
                sum(amount)::bigint as amount, min(ended_at) as ended_at
            from rated group by 1, 2
        ) r where d.series_id = r.series_id and d.day = r.day
    ), unspent as (
        update billing.spending s set spent_microusd = s.spent_microusd + r.amount
        from (
            select b.id, billing.period_start(b.period, x.window_start) as period_start, sum(x.amount)::bigint as amount
            from rated x join billing.budgets b
                on b.project_id = x.project_id and (b.key_id is null or b.key_id = x.key_id)
            group by 1, 2
        ) r where s.budget_id = r.id and s.period_start = r.period_start
    )
    select t.id as corrects, r.organisation_id, -sum(r.amount)::bigint as amount
    from rated r join billing.transfers t
        on t.organisation_id = r.organisation_id and t.window_start = r.window_start and t.run_at = r.charged_at
    group by t.id, r.organisation_id having sum(r.amount) < 0 order by t.id
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far time is charged, and what the database's clock says."""

    accrued_until: datetime
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """What an organisation is owed of one transfer."""

    corrects: str
    organisation_id: str
    amount_microusd: int


async def lock_progress(tx: Tx) -> Progress | None:
    """Take the turn; none when another has it."""
    row = await tx.fetchrow(
        "select accrued_until, clock_timestamp() as now from billing.progress for update skip locked"
    )
    return Progress(**dict(row)) if row else None


async def advance(tx: Tx, until: datetime) -> None:
    """Time is charged until here."""
    await tx.execute("update billing.progress set accrued_until = $1", until)


async def metered(conn: Reader) -> int:
    """How many allocations are on the meter."""
    return await conn.fetchval("select count(*) from compute.billable")


async def open_payers(tx: Tx) -> None:
    """Accounts for whoever begins to owe something."""
    await tx.execute(
        """
        with payers as (
            select organisation_id from compute.billable union select organisation_id from billing.recorded
            where state = 'pending'
        ), opened as (
            insert into billing.customers (organisation_id) select organisation_id from payers on conflict do nothing
        )
        insert into billing.accounts (id, organisation_id, kind)
        select organisation_id || '/' || kind, organisation_id, kind
        from payers cross join unnest(array['balance', 'credit', 'holds']) kind on conflict do nothing
        """
    )


async def excess(tx: Tx, *, run_at: datetime) -> list[Excess]:
    """Take back what was charged beyond the end of allocations that, as it turns out, ended earlier; the sums that
    the ledger still has to give back."""
    rows = await tx.fetch(_EXCESS, run_at)
    return [Excess(corrects=row[0], organisation_id=row[1], amount_microusd=row[2]) for row in rows]


async def accrue(
    tx: Tx, *, since: datetime, until: datetime, window: timedelta, each_max: timedelta
) -> tuple[Accrued, list[str]]:
    """Charge all time and usage until then; what that was, and the allocations that are charged to their end. Before,
    it was done until `since`. Of an allocation whose node was silent at most `each_max` is charged at once."""
    # For this transaction: what a hundred thousand allocations need is sorted and joined without files.
    await tx.execute("set local work_mem = '64MB'")
    row = await tx.fetchrow(_ACCRUE, until, window, since, each_max)
    assert row is not None
    charged = Accrued(
        until=until,
        windows=row["windows"],
        transfers=row["transfers"],
        amount_microusd=row["amount"],
        settled=len(row["ended"]),
    )
    return charged, row["ended"]


async def progress(conn: Reader) -> Progress:
    """How far time is charged."""
    row = await conn.fetchrow("select accrued_until, clock_timestamp() as now from billing.progress")
    assert row is not None
    return Progress(**dict(row))
