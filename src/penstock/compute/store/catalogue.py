"""SKUs and quotas."""

from collections.abc import Sequence
from typing import Any, Final

from penstock.compute.model import Sku
from penstock.kit.db import Reader, Row, Tx
from penstock.wire.tasks import GpuKind

_FIELDS: Final = tuple(Sku.__dataclass_fields__)
_COLUMNS: Final = ", ".join(_FIELDS)


def _of_row(row: Row) -> Sku:
    values: dict[str, Any] = {name: row[name] for name in _FIELDS}
    values["gpu_counts"] = tuple(row["gpu_counts"])
    values["share"] = GpuKind(row["share"])
    return Sku(**values)


async def sku(conn: Reader, name: str) -> Sku | None:
    """One offer."""
    row = await conn.fetchrow(f"select {_COLUMNS} from compute.skus where name = $1", name)  # noqa: S608
    return _of_row(row) if row else None


async def offered(conn: Reader, name: str, project_id: str) -> tuple[Sku | None, list[str]]:
    """One offer, and where the project's units may connect to: a create asks for both at once."""
    row = await conn.fetchrow(
        f"""
        select {_COLUMNS}, coalesce(rules, '[]') as rules
        from (select $2::text as project_id) p left join compute.egress using (project_id)
        left join compute.skus on name = $1
        """,  # noqa: S608
        name,
        project_id,
    )
    assert row is not None
    return (_of_row(row) if row["name"] is not None else None), row["rules"]


async def skus(conn: Reader, *, after: str, limit: int) -> Sequence[Sku]:
    """The offers, by name."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from compute.skus where name > $1 order by name limit $2",  # noqa: S608
        after,
        limit,
    )
    return [_of_row(row) for row in rows]


async def open_names(conn: Reader, *, limit: int) -> list[str]:
    """Names of the offers that can be rented."""
    rows = await conn.fetch("select name from compute.skus where enabled order by name limit $1", limit)
    return [row["name"] for row in rows]


async def lock_sku(tx: Tx, name: str) -> Sku | None:
    """One offer, locked until the end of the transaction."""
    row = await tx.fetchrow(f"select {_COLUMNS} from compute.skus where name = $1 for update", name)  # noqa: S608
    return _of_row(row) if row else None


async def delete_sku(tx: Tx, name: str) -> None:
    """Remove an offer."""
    await tx.execute("delete from compute.skus where name = $1", name)


async def floors_of(conn: Reader, sku: str) -> bool:
    """Whether warm stock of this offer is kept."""
    return await conn.fetchval("select exists (select from compute.stock_floors where sku = $1)", sku)


async def put_sku(tx: Tx, offer: Sku) -> None:
    """Define or change an offer."""
    values = [getattr(offer, name) for name in _FIELDS]
    marks = ", ".join(f"${n}" for n in range(1, len(values) + 1))
    updates = ", ".join(f"{name} = excluded.{name}" for name in _FIELDS if name != "name")
    await tx.execute(
        f"insert into compute.skus ({_COLUMNS}) values ({marks})"  # noqa: S608
        f" on conflict (name) do update set {updates}, updated_at = now()",
        *values,
    )


async def lock_quota(tx: Tx, project_id: str, *, gpus_max_default: int) -> tuple[int, int]:
    """(limit, used) of the project, with its quota locked so that creates count one by one."""
    row = await tx.fetchrow("select quota_gpus, used_gpus from compute.lock_quota($1)", project_id)
    assert row is not None
    return gpus_max_default if row["quota_gpus"] is None else row["quota_gpus"], row["used_gpus"]


async def quota(conn: Reader, project_id: str, *, gpus_max_default: int) -> tuple[int, int]:
    """(limit, used) of the project."""
    row = await conn.fetchrow(
        "select (select gpus_max from compute.quotas where project_id = $1) as gpus_max,"
        " (select gpus_used from compute.quota_use where project_id = $1) as gpus_used",
        project_id,
    )
    assert row is not None
    return gpus_max_default if row["gpus_max"] is None else row["gpus_max"], row["gpus_used"] or 0


async def put_quota(tx: Tx, project_id: str, gpus_max: int) -> None:
    """Set the limit."""
    await tx.execute(
        "insert into compute.quotas (project_id, gpus_max) values ($1, $2)"
        " on conflict (project_id) do update set gpus_max = excluded.gpus_max, updated_at = now()",
        project_id,
        gpus_max,
    )
