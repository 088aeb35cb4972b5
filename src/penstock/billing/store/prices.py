"""Prices of meters. Rows are only added; the newest that has come into force counts."""

from datetime import datetime
from typing import Final

from penstock.kit.db import Reader, Row, Tx
from penstock.wire.rest import Price

_PRICE: Final = """
    select p.*, p.version is not distinct from (
        select f.version from billing.prices f where f.meter = p.meter and f.effective_at <= clock_timestamp()
        order by f.effective_at desc, f.version desc limit 1
    ) as in_force
    from billing.prices p
"""
_PRESENT: Final = f"""
    select distinct on (meter) * from ({_PRICE} where p.meter > $1) known
    order by meter, in_force desc, effective_at, version desc limit $2
"""  # noqa: S608


async def lock_meter(tx: Tx, meter: str) -> None:
    """Versions of a meter's price are added one by one."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 14))", f"price {meter}")


async def add(
    tx: Tx, meter: str, *, price_microusd: int, per: int, effective_at: datetime | None, created_by: str
) -> int:
    """The next version, locked; its number."""
    return await tx.fetchval(
        """
        insert into billing.prices (meter, version, price_microusd, per, effective_at, created_by)
        select $1, coalesce(max(version), 0) + 1, $2, $3, coalesce($4, clock_timestamp()), $5
        from billing.prices where meter = $1 returning version
        """,
        meter,
        price_microusd,
        per,
        effective_at,
        created_by,
    )


async def present(conn: Reader, *, after: str, limit: int) -> list[Price]:
    """Every meter's price in force, or of one that has none yet the first to come; by meter."""
    rows = await conn.fetch(_PRESENT, after, limit)
    return [_price(row) for row in rows]


async def history(conn: Reader, meter: str, *, before: int, limit: int) -> list[Price]:
    """The versions of a meter's price, newest first."""
    rows = await conn.fetch(
        f"{_PRICE} where p.meter = $1 and p.version < $2 order by p.version desc limit $3", meter, before, limit
    )
    return [_price(row) for row in rows]


def _price(row: Row) -> Price:
    return Price(**dict(row))
