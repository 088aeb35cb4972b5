"""A month of an organisation: usage by the window's beginning, everything else by when it was posted."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Final

from penstock.kit.db import Reader, Row
from penstock.wire.rest import InvoiceMovement

#: Operators' corrections. Those that the meter makes are mirrored in the usage itself.
ADJUSTMENT: Final = "correction/cor_"

_CHARGED: Final = """
    with charged as (
        select id from billing.transfers
        where organisation_id = $1 and kind = 'usage' and window_start >= $2 and window_start < $3
    ), taken as (
        select id from charged
        union all
        select t.id from charged c join billing.transfers t on t.corrects = c.id where not starts_with(t.id, $4)
        union all
        select t.id from billing.transfers t join billing.transfers o on o.id = t.corrects and o.kind = 'usage'
        where t.organisation_id = $1 and t.at >= $2 and t.at < $3 and t.kind = 'correction' and starts_with(t.id, $4)
    )
    select coalesce(sum(amount_microusd) filter (where account_id = 'platform/revenue'), 0)::bigint as total,
        -coalesce(sum(amount_microusd) filter (where account_id = $1 || '/credit'), 0)::bigint as from_credit
    from taken join billing.entries e on e.transfer_id = taken.id
"""
#: $4 whether corrections of usage are asked for, or everything else that is no usage. What only moved between the
#: organisation's own accounts, such as onto hold, is neither.
_MOVEMENTS: Final = """
    select t.id, t.kind, t.at, t.memo, t.corrects, gained.amount, coalesce(o.kind, t.kind) as about
    from billing.transfers t left join billing.transfers o on o.id = t.corrects cross join lateral (
        select coalesce(sum(amount_microusd), 0)::bigint as amount from billing.entries
        where transfer_id = t.id and starts_with(account_id, $1 || '/')
    ) gained
    where t.organisation_id = $1 and t.at >= $2 and t.at < $3 and gained.amount <> 0 and case when $4
        then o.kind = 'usage' and starts_with(t.id, $5) else t.kind <> 'usage' and o.kind is distinct from 'usage' end
"""
_MONTHS: Final = """
    select date_trunc('month', day)::date as month, sum(amount)::bigint as amount from (
        select day, amount_microusd as amount from billing.daily where organisation_id = $1
        union all
        select (t.at at time zone 'UTC')::date, 0
        from billing.transfers t join billing.transfers o on o.id = t.corrects and o.kind = 'usage'
        where t.organisation_id = $1 and t.corrects is not null and starts_with(t.id, $4)
    ) happened where day < $2 group by 1 order by 1 desc limit $3
"""
_SUMS: Final = f"select about, count(*) as found, sum(amount)::bigint as amount from ({_MOVEMENTS}) m group by about"  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Usage of one thing at one price."""

    project_id: str
    resource_kind: str
    meter: str
    sku: str
    gpus: int
    quantity: int
    price_microusd: int
    per: int
    amount_microusd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Movements:
    """What else happened; the sums are of all, by kind, corrections with what they correct."""

    listed: list[InvoiceMovement]
    found: int
    sums: dict[str, int]


async def months(conn: Reader, organisation_id: str, *, before: date, limit: int) -> list[tuple[date, int]]:
    """The months with usage or an operator's correction of it, and what was used, newest first."""
    rows = await conn.fetch(_MONTHS, organisation_id, before, limit, ADJUSTMENT)
    return [(row["month"], row["amount"]) for row in rows]


async def used(
    conn: Reader, organisation_id: str, first: date, after: date, *, limit: int
) -> tuple[int, int, list[Used]]:
    """What the usage of these days cost, how many lines it has, and the largest of them."""
    rows = await conn.fetch(
        """
        select s.project_id, s.resource_kind, s.meter, s.detail as sku, s.gpus, s.price_microusd, s.per,
            sum(d.quantity) as quantity, sum(d.amount_microusd)::bigint as amount_microusd,
            sum(sum(d.amount_microusd)) over ()::bigint as total, count(*) over () as found
        from billing.daily d join billing.series s on s.id = d.series_id
        where d.organisation_id = $1 and d.day >= $2 and d.day < $3
        group by s.project_id, s.resource_kind, s.meter, s.detail, s.gpus, s.price_microusd, s.per
        order by amount_microusd desc, s.project_id, s.meter, s.detail, s.gpus, s.price_microusd, s.per
        limit $4
        """,
        organisation_id,
        first,
        after,
        limit,
    )
    return (rows[0]["total"], rows[0]["found"], [_used(row) for row in rows]) if rows else (0, 0, [])


def _used(row: Row) -> Used:
    return Used(
        project_id=row["project_id"],
        resource_kind=row["resource_kind"],
        meter=row["meter"],
        sku=row["sku"],
        gpus=row["gpus"],
        quantity=int(row["quantity"]),
        price_microusd=row["price_microusd"],
        per=row["per"],
        amount_microusd=row["amount_microusd"],
    )


async def charged(conn: Reader, organisation_id: str, since: datetime, until: datetime) -> tuple[int, int]:
    """What the ledger took for the usage, and how much of it from promotional credit."""
    row = await conn.fetchrow(_CHARGED, organisation_id, since, until, ADJUSTMENT)
    assert row is not None
    return row["total"], row["from_credit"]


async def movements(
    conn: Reader, organisation_id: str, since: datetime, until: datetime, *, corrections: bool, limit: int
) -> Movements:
    """Corrections of usage that operators made, or payments and everything else."""
    asked = (organisation_id, since, until, corrections, ADJUSTMENT)
    sums = await conn.fetch(_SUMS, *asked)
    rows = await conn.fetch(f"{_MOVEMENTS} order by t.at, t.id limit $6", *asked, limit)
    return Movements(
        listed=[_movement(row) for row in rows],
        found=sum(row["found"] for row in sums),
        sums={row["about"]: row["amount"] for row in sums},
    )


def _movement(row: Row) -> InvoiceMovement:
    return InvoiceMovement(
        transfer_id=row["id"],
        kind=row["kind"],
        at=row["at"],
        memo=row["memo"],
        corrects=row["corrects"],
        amount_microusd=row["amount"],
    )
