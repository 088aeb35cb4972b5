"""The statement that cancels invocations, in whatever phase they are.

Its token goes with the attempt: whatever the worker still says of it counts for nothing. Rows are locked in the order
of commits, invocations first and workers after them. The time that was used so far counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit.db import Reader
from penstock.serverless.model import Committed
from penstock.serverless.store.commits import FOLLOWS

_RETURNED: Final = ", ".join(
    f"c.{name}" for name in Committed.__dataclass_fields__ if name not in ("worker_id", "more")
)
_CANCEL: Final = f"""
    with open as materialized (
        select project_id, id, not waiting as flies, started_at from serverless.invocations
        where project_id = $1 and id = any($2::text[]) and finished_at is null
        order by project_id, id for update
    ), cancelled as (
        update serverless.invocations i set state = 'cancelled', waiting = false, token = null,
            finished_at = clock_timestamp(), failure_class = 'cancelled', error = $3, status_code = 499,
            duration_ms = i.duration_ms + took_ms
        from (
            select project_id, id, flies, case when flies and started_at is not null
                then (extract(epoch from clock_timestamp() - started_at) * 1000)::bigint else 0 end as took_ms from open
        ) as o
        where i.project_id = o.project_id and i.id = o.id
        returning i.*, o.flies, o.took_ms
    ), held as materialized (
        select w.id, w.request, w.mac_key from serverless.workers w
        where w.id in (select worker_id from cancelled where flies) order by w.id for update of w
    ), freed as (
        update serverless.workers w set inflight = w.inflight - c.n, active_at = clock_timestamp()
        from (select worker_id, count(*)::int as n from cancelled where flies group by worker_id) as c
        join held on held.id = c.worker_id
        where w.id = c.worker_id and w.state <> 'gone'
    ), spent as (
        insert into serverless.spent as s
            (function_id, project_id, organisation_id, key_id, minute, invocations, duration_ms)
        select c.function_id, c.project_id, f.organisation_id, coalesce(c.key_id, ''),
            date_trunc('minute', clock_timestamp()), count(*), sum(c.took_ms)::bigint
        from cancelled c join serverless.functions f on f.id = c.function_id where c.attempt > 0
        group by c.function_id, c.project_id, f.organisation_id, coalesce(c.key_id, '')
        order by c.function_id, coalesce(c.key_id, '')
        on conflict (function_id, key_id, minute) do update set
            invocations = s.invocations + excluded.invocations, duration_ms = s.duration_ms + excluded.duration_ms
    ), {FOLLOWS.format(ended="cancelled")}
    select {_RETURNED}, coalesce(c.worker_id, '') as worker_id, held.request, held.mac_key
    from cancelled c left join held on held.id = c.worker_id and c.flies
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """An invocation that was cancelled, and the worker that may still be at it: its name in subjects and its key."""

    row: Committed
    request: str | None
    mac_key: bytes | None


async def cancel(conn: Reader, project_id: str, ids: Sequence[str], error: str) -> list[Cancelled]:
    """Those of the project's that were open."""
    rows = [dict(row) for row in await conn.fetch(_CANCEL, project_id, ids, error)]
    return [
        Cancelled(request=row.pop("request"), mac_key=row.pop("mac_key"), row=msgspec.convert(row, Committed))
        for row in rows
    ]
