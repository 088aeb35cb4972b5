"""Usage that other domains recorded, and how far their facts were read."""

from collections.abc import Mapping, Sequence
from typing import Final

from penstock.billing.model import Price, Use
from penstock.kit.db import Tx
from penstock.kit.outbox import Position

_SERIES: Final = """
    insert into billing.series (id, organisation_id, project_id, key_id, resource_kind, resource_id, meter, labels,
        leased, price_microusd, per)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
    on conflict (id) do update set labels = excluded.labels where billing.series.labels <> excluded.labels
"""
_RECORD: Final = """
    insert into billing.recorded (key, organisation_id, project_id, series_id, meter, quantity, occurred_at, state,
        reason)
    values ($1, $2, $3, $4, $5, $6, $7, case when $8 = '' then 'pending' else 'refused' end, $8)
    on conflict (project_id, key) do nothing returning true
"""


async def lock_position(tx: Tx) -> Position | None:
    """How far facts were read; none while another has the turn."""
    row = await tx.fetchrow("select tx::text as tx, seq from billing.progress for update skip locked")
    return Position(int(row["tx"]), row["seq"]) if row else None


async def advance(tx: Tx, position: Position) -> None:
    """Facts are read until here."""
    await tx.execute("update billing.progress set tx = $1::text::xid8, seq = $2", str(position.tx), position.seq)


async def prices(tx: Tx, meters: Sequence[str]) -> Mapping[str, Sequence[Price]]:
    """Every price that these meters ever had, newest first."""
    rows = await tx.fetch(
        "select meter, version, price_microusd, per, effective_at from billing.prices where meter = any($1)"
        " order by meter, effective_at desc, version desc",
        list(meters),
    )
    found: dict[str, list[Price]] = {}
    for row in rows:
        found.setdefault(row["meter"], []).append(Price(**dict(row)))
    return found


async def open_series(tx: Tx, wanted: Mapping[str, tuple[Use, Price]]) -> None:
    """The series that these uses belong to, with their newest labels."""
    await tx.executemany(
        _SERIES,
        [
            (
                series_id,
                use.organisation_id,
                use.project_id,
                use.key_id,
                use.resource_kind,
                use.resource_id,
                use.meter,
                dict(use.labels),
                use.leased,
                price.price_microusd,
                price.per,
            )
            for series_id, (use, price) in sorted(wanted.items())
        ],
    )


async def record(tx: Tx, use: Use, *, series_id: str | None, refusal: str = "") -> bool:
    """Keep one, refused or to be charged with the window that ends; whether its key is new."""
    return bool(
        await tx.fetchval(
            _RECORD,
            use.key,
            use.organisation_id,
            use.project_id,
            series_id,
            use.meter,
            use.quantity,
            use.occurred_at,
            refusal,
        )
    )
