"""What was used and what it cost, by day: sums over the days of an organisation's series, however long its history."""

from dataclasses import dataclass
from datetime import date, datetime
from typing import Final

from penstock.kit.db import Reader
from penstock.wire.rest import Cost

#: How costs can be grouped: the key, and the only kind of resource that has one.
GROUPS: Final = {
    "project": ("s.project_id", None),
    "allocation": ("s.resource_id", "allocation"),
    "function": ("s.resource_id", "function"),
    "deployment": ("s.resource_id", "deployment"),
    "sku": ("s.detail", "allocation"),
    "meter": ("s.meter", None),
    "key": ("coalesce(s.key_id, '')", None),
    "day": ("d.day::text", None),
    "label": ("coalesce(s.labels ->> $9, '')", None),
}
_RANK: Final = "sum(amount)"
#: Days come in their order, not by what they cost.
_RANK_OF_DAY: Final = "date '1970-01-01' - key::date"

_REPORT: Final = """
    with parts as (
        select {key} as key, s.meter, sum(d.quantity) as quantity, sum(d.amount_microusd) as amount
        from billing.daily d join billing.series s on s.id = d.series_id
        where d.organisation_id = $1 and d.day between $2 and $3 and ($4::text is null or s.project_id = $4)
            and ($5::text is null or s.resource_kind = $5)
        group by 1, 2
    ), groups as (
        select key, sum(amount)::bigint as amount, ({rank})::bigint as rank,
            jsonb_object_agg(meter, quantity) as quantities
        from parts group by key
    )
    select total, key, amount, rank, quantities
    from (select coalesce(sum(amount), 0)::bigint as total from groups) t left join lateral (
        select * from groups where $6::bigint is null or rank < $6 or rank = $6 and key > $7
        order by rank desc, key limit $8
    ) g on true order by rank desc, key
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which usage: of an organisation or one of its projects, on these days, both included."""

    organisation_id: str
    project_id: str | None
    from_day: date
    to_day: date


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a page ended."""

    rank: int
    group: str


async def report(
    conn: Reader, scope: Scope, group_by: str, label: str | None, *, after: Place | None, limit: int
) -> tuple[int, list[tuple[Place, Cost]]]:
    """The total of all groups, and a page of them."""
    key, kind = GROUPS[group_by]
    rows = await conn.fetch(
        _REPORT.format(key=key, rank=_RANK_OF_DAY if group_by == "day" else _RANK),
        scope.organisation_id,
        scope.from_day,
        scope.to_day,
        scope.project_id,
        kind,
        after.rank if after else None,
        after.group if after else "",
        limit,
        *([label] if group_by == "label" else []),
    )
    found = [
        (
            Place(rank=row["rank"], group=row["key"]),
            Cost(
                group=row["key"],
                amount_microusd=row["amount"],
                quantities={meter: int(count) for meter, count in row["quantities"].items()},
            ),
        )
        for row in rows
        if row["key"] is not None
    ]
    return rows[0]["total"], found


async def accrued_until(conn: Reader) -> datetime:
    """How far time is charged."""
    return await conn.fetchval("select accrued_until from billing.progress")


async def metered_on(conn: Reader, organisation_id: str, day: date) -> int:
    """What everything but the time of allocations cost on a day."""
    return await conn.fetchval(
        """
        select coalesce(sum(d.amount_microusd), 0)::bigint
        from billing.series s join billing.daily d on d.series_id = s.id and d.day = $2
        where s.organisation_id = $1 and s.resource_kind <> 'allocation'
        """,
        organisation_id,
        day,
    )
