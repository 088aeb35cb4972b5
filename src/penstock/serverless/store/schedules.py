"""When functions run by themselves."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from penstock.kit.db import Tx
from penstock.wire.rest import ScheduleUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A schedule whose time has come, with what its invocation needs."""

    function_id: str
    project_id: str
    name: str
    cron: str
    timezone: str
    payload: Any
    next_at: datetime
    now: datetime
    webhook: str | None
    created_by: str
    key_id: str | None


async def put(tx: Tx, function_id: str, schedule: ScheduleUse, next_at: datetime) -> None:
    """Run it so from now on. The same schedule keeps its next time."""
    await tx.execute(
        """
        insert into serverless.schedules as s (function_id, cron, timezone, payload, next_at)
        values ($1, $2, $3, $4, $5)
        on conflict (function_id) do update set cron = excluded.cron, timezone = excluded.timezone,
            payload = excluded.payload,
            next_at = case when (s.cron, s.timezone) = (excluded.cron, excluded.timezone) then s.next_at
                else excluded.next_at end
        """,
        function_id,
        schedule.cron,
        schedule.timezone,
        schedule.payload,
        next_at,
    )


async def drop(tx: Tx, function_id: str) -> None:
    """It runs when it is called only."""
    await tx.execute("delete from serverless.schedules where function_id = $1", function_id)


async def take_due(tx: Tx, *, limit: int) -> list[Due]:
    """Those whose time has come, locked; whoever else looks takes others."""
    rows = await tx.fetch(
        """
        select s.function_id, f.project_id, f.name, s.cron, s.timezone, s.payload, s.next_at, clock_timestamp() as now,
            v.webhook, f.created_by, f.key_id
        from serverless.schedules s
        join serverless.functions f on f.id = s.function_id and not f.deleted
        join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        where s.next_at <= statement_timestamp() order by s.next_at limit $1 for update of s skip locked
        """,
        limit,
    )
    return [msgspec.convert(dict(row), Due) for row in rows]


async def move(tx: Tx, function_id: str, next_at: datetime) -> None:
    """When it comes next."""
    await tx.execute("update serverless.schedules set next_at = $2 where function_id = $1", function_id, next_at)
