"""The statement that gives waiting invocations to workers with free slots.

Workers are locked in the order of their ids, here and wherever several are; invocations are never waited for. So two
activators can work on the same function at the same time: the second sees the slots that the first one left.
Times are compared with the statement's: with the clock's, which moves while a statement runs, no index could be used.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.kit.db import Reader
from penstock.serverless.model import Announcement, Claimed

_FIELDS: Final = tuple(Claimed.__dataclass_fields__)
_RETURNED: Final = ", ".join(_FIELDS)
#: Of payloads that are announced again together.
_BYTES_MAX: Final = 16 << 20
#: The emptiest workers first: places are numbered by how full their worker would be.
_CLAIM: Final = f"""
    with free as materialized (
        select w.id, w.function_id, w.request, w.mac_key, w.version, w.slots, w.inflight, v.timeout_s
        from serverless.workers w
        join serverless.functions f on f.id = w.function_id and f.serving_version = w.version and not f.deleted
        join serverless.versions v on v.function_id = w.function_id and v.number = w.version
        where w.function_id = any($1::text[]) and w.state = 'ready' and w.inflight < w.slots
            and w.lease_until > statement_timestamp()
        order by w.id for update of w
    ), places as materialized (
        select function_id, id as worker_id, request, mac_key, version, timeout_s,
            row_number() over (partition by function_id order by (inflight + nth)::float8 / slots, id) as nth
        from free cross join lateral generate_series(0, least(slots - inflight, $2) - 1) as nth
    ), room as (
        select function_id, count(*) as free, least(count(*), $2) as n from places group by function_id
    ), picked as materialized (
        select project_id, id, function_id, row_number() over (partition by function_id order by due_at, seq) as nth
        from room cross join lateral (
            select i.project_id, i.id, i.due_at, i.seq from serverless.invocations i
            where i.function_id = room.function_id and i.waiting and i.due_at <= statement_timestamp()
            order by i.due_at, i.seq limit room.n for update skip locked
        ) as due
    ), given as (
        update serverless.invocations i set waiting = false,
            state = case i.state when 'queued' then 'dispatching' else i.state end,
            attempt = i.attempt + 1, token = uuid_send(gen_random_uuid()), worker_id = p.worker_id, version = p.version,
            dispatched_at = clock_timestamp(), started_at = null
        from picked join places p using (function_id, nth) join room using (function_id)
        where i.project_id = picked.project_id and i.id = picked.id
        returning i.project_id, i.id, i.function_id, i.function_name, p.request, i.worker_id, p.mac_key, i.attempt,
            i.token, i.mode, i.state, i.content_type, i.headers, i.attributes, i.payload, i.payload_ref,
            coalesce(i.timeout_s, p.timeout_s) as timeout_s, i.correlation_id, i.dispatched_at, room.free
    ), counted as (
        update serverless.workers w set inflight = w.inflight + g.n, active_at = clock_timestamp()
        from (select worker_id, count(*)::int as n from given group by worker_id) g where w.id = g.worker_id
    )
    select {_RETURNED} from given
"""  # noqa: S608


async def claim(conn: Reader, function_ids: Sequence[str], *, each_max: int) -> list[Claimed]:
    """Attempts for free slots, at most so many of each function."""
    rows = await conn.fetch(_CLAIM, function_ids, each_max)
    return [msgspec.convert(dict(row), Claimed) for row in rows]


async def due(conn: Reader, function_ids: Sequence[str]) -> list[str]:
    """Those of these functions for which something is due and waits."""
    rows = await conn.fetch(
        """
        select f.id from unnest($1::text[]) as f (id) where exists (
            select 1 from serverless.invocations i
            where i.function_id = f.id and i.waiting and i.due_at <= statement_timestamp())
        """,
        function_ids,
    )
    return [row["id"] for row in rows]


async def parked(conn: Reader, *, limit: int) -> list[str]:
    """Functions for which something is due and waits, one of each project in turn. The index is asked for one function
    after the other: those that nothing waits for cost nothing."""
    rows = await conn.fetch(
        """
        with recursive waited_for (id) as (
            (select function_id from serverless.invocations where waiting order by function_id, due_at, seq limit 1)
            union all
            select (select i.function_id from serverless.invocations i where i.waiting and i.function_id > w.id
                order by i.function_id, i.due_at, i.seq limit 1)
            from waited_for w where w.id is not null
        )
        select id from (
            select f.id, row_number() over (partition by f.project_id order by f.id) as turn
            from waited_for w join serverless.functions f on f.id = w.id where exists (
                select 1 from serverless.invocations i
                where i.function_id = f.id and i.waiting and i.due_at <= statement_timestamp())
        ) as due order by turn, id limit $1
        """,
        limit,
    )
    return [row["id"] for row in rows]


async def unpublished(conn: Reader, *, older_than_s: float, limit: int) -> list[Announcement]:
    """What has waited for a while and was perhaps never announced; from now on it counts as announced."""
    rows = await conn.fetch(
        f"""
        update serverless.invocations i set published = true
        from (
            select project_id, id, sum(size) over (order by seq) - size as before from (
                select project_id, id, seq, coalesce(octet_length(payload), 0) as size from serverless.invocations
                where waiting and not published and created_at < statement_timestamp() - make_interval(secs => $1)
                order by seq limit $2 for update skip locked
            ) as locked
        ) as old
        where i.project_id = old.project_id and i.id = old.id and old.before < $3
        returning {", ".join(f"i.{name}" for name in Announcement.__dataclass_fields__)}
        """,  # noqa: S608
        older_than_s,
        limit,
        _BYTES_MAX,
    )
    return [msgspec.convert(dict(row), Announcement) for row in rows]
