"""Units of the source's contract."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

import msgspec

from penstock.kit.db import Reader, Row, Tx
from penstock.wire.rest import GpuUnitCreate


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What was asked for, and the function that it became."""

    name: str
    body: GpuUnitCreate
    function_id: str
    function_name: str
    created_at: datetime


_SELECT = """
    select u.name, u.body, u.function_id, f.name as function_name, u.created_at
    from serverless.units u join serverless.functions f on f.id = u.function_id where u.project_id = $1 and
"""


async def find(conn: Reader, project_id: str, name: str) -> Unit | None:
    """One unit of the project."""
    row = await conn.fetchrow(f"{_SELECT} u.name = $2", project_id, name)
    return _unit(row) if row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What was asked for under this id, and of which unit."""

    unit: str
    kind: Literal["create", "update"]
    body: GpuUnitCreate


async def operation(conn: Reader, project_id: str, operation_id: str) -> Operation | None:
    """The operation that came with this id."""
    row = await conn.fetchrow(
        "select unit, kind, body from serverless.unit_operations where project_id = $1 and operation_id = $2",
        project_id,
        operation_id,
    )
    return msgspec.convert(dict(row), Operation) if row else None


async def remember(tx: Tx, project_id: str, done: Operation) -> None:
    """An operation that took effect."""
    await tx.execute(
        "insert into serverless.unit_operations (project_id, operation_id, unit, kind, body)"
        " values ($1, $2, $3, $4, $5)",
        project_id,
        done.body.operationID,
        done.unit,
        done.kind,
        done.body,
    )


async def page(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Unit]:
    """The project's units by name."""
    return [
        _unit(row)
        for row in await conn.fetch(f"{_SELECT} u.name > $2 order by u.name limit $3", project_id, after, limit)
    ]


async def insert(tx: Tx, project_id: str, body: GpuUnitCreate, function_id: str) -> None:
    """A unit whose name is free."""
    await tx.execute(
        "insert into serverless.units (project_id, name, body, function_id) values ($1, $2, $3, $4)",
        project_id,
        body.name,
        body,
        function_id,
    )


async def update(tx: Tx, project_id: str, body: GpuUnitCreate, function_id: str) -> None:
    """What is asked of the unit now."""
    await tx.execute(
        "update serverless.units set body = $3, function_id = $4 where project_id = $1 and name = $2",
        project_id,
        body.name,
        body,
        function_id,
    )


async def delete(tx: Tx, project_id: str, name: str) -> None:
    """Forget it."""
    await tx.execute("delete from serverless.units where project_id = $1 and name = $2", project_id, name)


async def others_of(conn: Reader, function_id: str, name: str) -> bool:
    """Whether another unit is the same function."""
    return bool(
        await conn.fetchval(
            "select exists (select 1 from serverless.units where function_id = $1 and name <> $2)", function_id, name
        )
    )


def _unit(row: Row) -> Unit:
    return msgspec.convert(dict(row), Unit)
