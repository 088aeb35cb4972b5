"""Workers' rows: made, known by their keys, alive by their leases, and gone. Several are locked in the order of ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from penstock.kit.db import Reader, Tx
from penstock.serverless.model import Worker

_FIELDS: Final = ", ".join(Worker.__dataclass_fields__)
MAKES_ROOM: Final = "another function of the project needs its place"
#: A worker that was of use a moment ago may be so again.
_IDLE_S: Final = 1.0
#: So long its GPUs may take to be free.
_LEAVING_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a function needs and has. `starting` and `ready` are of `version`, the one that new workers get."""

    id: str
    project_id: str
    organisation_id: str
    name: str
    created_by: str
    created_kind: str
    key_id: str | None
    version: int
    serving_version: int
    deleted: bool
    definition: dict[str, Any]
    slots: int
    tasks_per_worker: int
    workers_min: int
    workers_max: int
    due: int
    inflight: int
    starting: int
    ready: int
    serving_ready: int
    failures: int
    create_after: datetime | None
    pause_s: float
    wait_reason: str


async def demand(tx: Tx, function_id: str) -> Demand | None:
    """Lock a function and count. What is due is counted no further than the workers it may have can take. The lock is a
    statement of its own: whoever waited for it must count what the one before has made. Invocations can be made while
    it is held."""
    await tx.execute("select 1 from serverless.functions where id = $1 for no key update", function_id)
    row = await tx.fetchrow(
        """
        select f.id, f.project_id, f.organisation_id, f.name, f.created_by, f.created_kind, f.key_id,
            f.current_version as version, f.serving_version, f.deleted, v.definition, v.slots, v.tasks_per_worker,
            v.workers_min, v.workers_max, f.failures, f.wait_reason,
            nullif(f.create_after, '-infinity') as create_after,
            extract(epoch from f.create_after - clock_timestamp())::float8 as pause_s,
            (select count(*) from (
                select 1 from serverless.invocations i
                where i.function_id = f.id and i.waiting and i.due_at <= statement_timestamp()
                limit v.workers_max * v.tasks_per_worker) as due)::int as due,
            w.inflight, w.starting, w.ready, w.serving_ready
        from serverless.functions f
        join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        cross join lateral (
            select coalesce(sum(inflight), 0)::int as inflight,
                count(*) filter (where state = 'starting' and version = f.current_version)::int as starting,
                count(*) filter (where state = 'ready' and version = f.current_version)::int as ready,
                count(*) filter (where state = 'ready' and version = f.serving_version)::int as serving_ready
            from serverless.workers where function_id = f.id and state in ('starting', 'ready')
        ) as w
        where f.id = $1
        """,
        function_id,
    )
    if row is None:
        return None
    values = dict(row)
    values["pause_s"] = max(0.0, values["pause_s"]) if values["pause_s"] is not None else 0.0
    return Demand(**values)


async def add(
    tx: Tx, *, worker_id: str, demand: Demand, request: str, allocation_id: str, start_s: float, unknown: bytes
) -> None:
    """A worker that is being started. Its keys are made when its node asks for them."""
    await tx.execute(
        """
        insert into serverless.workers (id, function_id, project_id, request, version, allocation_id, state, slots,
            token_hash, mac_key, lease_until)
        values ($1, $2, $3, $4, $5, $6, 'starting', $7, $8, $8, clock_timestamp() + make_interval(secs => $9))
        """,
        worker_id,
        demand.id,
        demand.project_id,
        request,
        demand.version,
        allocation_id,
        demand.slots,
        unknown,
        start_s,
    )


async def explain(tx: Tx, function_id: str, reason: str, *, failures: int, pause_s: float) -> None:
    """Why the function has too few workers, and when that is looked at again; an empty reason: it has enough."""
    await tx.execute(
        "update serverless.functions set wait_reason = $2, failures = $3,"
        " create_after = clock_timestamp() + make_interval(secs => $4) where id = $1",
        function_id,
        reason,
        failures,
        pause_s,
    )


async def rekey(tx: Tx, allocation_id: str, *, token_hash: bytes, mac_key: bytes) -> bool:
    """Other keys for the worker of this allocation; false when it is gone."""
    status = await tx.execute(
        "update serverless.workers set token_hash = $2, mac_key = $3 where allocation_id = $1 and state <> 'gone'",
        allocation_id,
        token_hash,
        mac_key,
    )
    return status == "UPDATE 1"


async def identify(conn: Reader, worker_id: str, token_hash: bytes) -> str | None:
    """The function, as subjects name it, of the worker that this token proves; none when it is gone. Its lease is not
    asked: those who end workers by it also answer here, and one that missed a beat has to connect to be heard."""
    return await conn.fetchval(
        "select request from serverless.workers where id = $1 and token_hash = $2 and state <> 'gone'",
        worker_id,
        token_hash,
    )


async def keys(conn: Reader, worker_ids: Sequence[str]) -> dict[str, bytes]:
    """The MAC keys of workers that are not gone."""
    rows = await conn.fetch(
        "select id, mac_key from serverless.workers where id = any($1::text[]) and state <> 'gone'", worker_ids
    )
    return {row["id"]: row["mac_key"] for row in rows}


async def alive(conn: Reader, worker_ids: Sequence[str], *, ready: Sequence[str], lease_s: float) -> list[str]:
    """Renew leases; those in `ready` can take work from now on. The functions that got a new worker."""
    rows = await conn.fetch(
        """
        with held as materialized (
            select id, state from serverless.workers where id = any($1::text[]) and state <> 'gone'
            order by id for update
        )
        update serverless.workers w set lease_until = clock_timestamp() + make_interval(secs => $3),
            state = case when w.state = 'starting' and w.id = any($2::text[]) then 'ready' else w.state end,
            ready_at = case when w.state = 'starting' and w.id = any($2::text[]) then clock_timestamp()
                else w.ready_at end,
            active_at = case when w.state = 'starting' and w.id = any($2::text[]) then clock_timestamp()
                else w.active_at end
        from held where w.id = held.id
            and (held.state <> 'starting' or w.id = any($2::text[]))
        returning w.function_id, held.state as before, w.state
        """,
        worker_ids,
        ready,
        lease_s,
    )
    return [row["function_id"] for row in rows if row["before"] == "starting" and row["state"] == "ready"]


async def switch(conn: Reader, function_ids: Sequence[str]) -> list[str]:
    """Let the current version serve where it has a ready worker, or the serving one has none; the functions."""
    rows = await conn.fetch(
        """
        update serverless.functions f set serving_version = f.current_version
        where f.id = any($1::text[]) and f.serving_version <> f.current_version and (
            exists (select 1 from serverless.workers w where w.function_id = f.id and w.state = 'ready'
                and w.version = f.current_version)
            or not exists (select 1 from serverless.workers w where w.function_id = f.id and w.state = 'ready'
                and w.version = f.serving_version))
        returning f.id
        """,
        function_ids,
    )
    return [row["id"] for row in rows]


async def unsettled(conn: Reader) -> list[str]:
    """Functions whose workers may have to change without anybody having called: too few, too many, or of a version
    that serves no more."""
    rows = await conn.fetch(
        """
        select f.id from serverless.functions f
        join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        where exists (select 1 from serverless.workers w where w.function_id = f.id and w.state <> 'gone')
            or (not f.deleted and v.workers_min > 0)
        """
    )
    return [row["id"] for row in rows]


async def retire(tx: Tx, function_id: str) -> list[Worker]:
    """Workers that nobody needs take nothing new: those of versions that serve no more, all of a deleted function, and
    the idle ones above the floor, the longest idle first."""
    rows = await tx.fetch(
        f"""
        with held as materialized (
            select w.* from serverless.workers w where w.function_id = $1 and w.state in ('starting', 'ready')
            order by w.id for update
        ), terms as (
            select f.deleted, f.current_version, f.serving_version, v.workers_min, v.idle_s, v.requests_min
            from serverless.functions f
            join serverless.versions v on v.function_id = f.id and v.number = f.current_version where f.id = $1
        ), idle as (
            select h.id, row_number() over (order by h.active_at) as nth,
                (select count(*) from held where version = t.current_version) - t.workers_min as spare
            from held h, terms t
            where h.state = 'ready' and h.inflight = 0 and h.version = t.current_version and not exists (
                select 1 from serverless.invocations i
                where i.function_id = $1 and i.waiting and i.due_at <= statement_timestamp())
                and (h.active_at < clock_timestamp() - make_interval(secs => t.idle_s)
                    or (t.requests_min > 0 and h.looked_at < clock_timestamp() - make_interval(secs => t.idle_s)
                        and h.served - h.served_before < t.requests_min))
        ), needless as (
            select id, 'idle' as why from idle where nth <= spare
            union select h.id, 'the function is deleted' from held h, terms t where t.deleted
            union select h.id, 'another version serves' from held h, terms t
                where not t.deleted and h.version not in (t.current_version, t.serving_version)
        ), first as (
            select id, min(why) as why from needless group by id
        )
        update serverless.workers w set state = 'draining', reason = first.why from first where w.id = first.id
        returning {", ".join(f"w.{name}" for name in Worker.__dataclass_fields__)}
        """,  # noqa: S608
        function_id,
    )
    await tx.execute(
        """
        update serverless.workers w set looked_at = clock_timestamp(), served_before = w.served
        from serverless.functions f join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        where f.id = $1 and w.function_id = f.id and w.state = 'ready' and v.requests_min > 0
            and w.looked_at < clock_timestamp() - make_interval(secs => v.idle_s)
        """,
        function_id,
    )
    return [_worker(dict(row)) for row in rows]


async def make_room(tx: Tx, function_id: str) -> str | None:
    """Let the longest idle worker go that another function of the same project could do without, and whose GPUs would
    do; which one. None while one that was asked before is on its way: its GPUs are free only when its unit is gone. One
    function of a project asks at a time."""
    await tx.execute(
        "select pg_advisory_xact_lock(hashtext('make_room'), hashtext(project_id))"
        " from serverless.functions where id = $1",
        function_id,
    )
    return await tx.fetchval(
        """
        update serverless.workers set state = 'draining', reason = $2 where id = (
            select w.id from serverless.functions asks
            join serverless.versions needs on needs.function_id = asks.id and needs.number = asks.current_version
            join serverless.functions f on f.project_id = asks.project_id and f.id <> asks.id and not f.deleted
            join serverless.versions v on v.function_id = f.id and v.number = f.current_version
                and v.definition ->> 'sku' = needs.definition ->> 'sku'
                and (v.definition ->> 'gpus')::int >= (needs.definition ->> 'gpus')::int
            join serverless.workers w on w.function_id = f.id and w.version = f.serving_version
            where asks.id = $1 and w.state = 'ready' and w.inflight = 0
                and w.active_at < statement_timestamp() - make_interval(secs => $3)
                and v.workers_min < (select count(*) from serverless.workers o
                    where o.function_id = f.id and o.state = 'ready')
                and not exists (select 1 from serverless.invocations i
                    where i.function_id = f.id and i.waiting and i.due_at <= statement_timestamp())
                and not exists (select 1 from serverless.functions g
                    join serverless.workers l on l.function_id = g.id and l.state = 'draining' and l.reason = $2
                    where g.project_id = asks.project_id and not g.deleted)
                and not exists (select 1 from serverless.workers l where l.state = 'gone' and l.reason = $2
                    and l.gone_at > statement_timestamp() - make_interval(secs => $4)
                    and l.project_id = asks.project_id)
            order by w.active_at limit 1 for update of w skip locked)
        returning id
        """,
        function_id,
        MAKES_ROOM,
        _IDLE_S,
        _LEAVING_S,
    )


async def drained(conn: Reader) -> dict[str, str]:
    """Draining workers that have nothing in hand, and why they go."""
    rows = await conn.fetch("select id, reason from serverless.workers where state = 'draining' and inflight = 0")
    return {row["id"]: row["reason"] for row in rows}


async def expired(conn: Reader) -> list[str]:
    """Workers that were not heard of for too long."""
    rows = await conn.fetch(
        "select id from serverless.workers where state <> 'gone' and lease_until < statement_timestamp()"
    )
    return [row["id"] for row in rows]


async def of_allocations(conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
    """Workers that are not gone, by allocation."""
    rows = await conn.fetch(
        "select allocation_id, id from serverless.workers where allocation_id = any($1::text[]) and state <> 'gone'",
        allocation_ids,
    )
    return {row["allocation_id"]: row["id"] for row in rows}


async def living(conn: Reader) -> dict[str, str]:
    """All workers that are not gone, by allocation."""
    rows = await conn.fetch("select allocation_id, id from serverless.workers where state <> 'gone'")
    return {row["allocation_id"]: row["id"] for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """What a worker takes its attempts from."""

    worker: str
    request: str
    slots: int


async def living_consumers(conn: Reader) -> list[Consumer]:
    """Those of all workers that are not gone."""
    rows = await conn.fetch("select id as worker, request, slots from serverless.workers where state <> 'gone'")
    return [Consumer(**dict(row)) for row in rows]


async def stop(conn: Reader, worker_id: str, reason: str) -> None:
    """Give it nothing more, whatever becomes of it."""
    await conn.execute(
        "update serverless.workers set state = 'draining', reason = $2"
        " where id = $1 and state in ('starting', 'ready')",
        worker_id,
        reason,
    )


async def remove(tx: Tx, worker_id: str, reason: str, *, only_idle: bool = False) -> Worker | None:
    """The worker is gone; none when it was before, or has something in hand and may not."""
    row = await tx.fetchrow(
        f"""
        update serverless.workers set state = 'gone', reason = $2, gone_at = clock_timestamp()
        where id = $1 and state <> 'gone' and (not $3 or inflight = 0) returning {_FIELDS}
        """,  # noqa: S608
        worker_id,
        reason,
        only_idle,
    )
    return _worker(dict(row)) if row else None


async def ready(conn: Reader, function_ids: Sequence[str]) -> None:
    """A worker of these functions is ready: nothing holds them up any more."""
    await conn.execute(
        "update serverless.functions set wait_reason = '', failures = 0, create_after = '-infinity'"
        " where id = any($1::text[]) and (wait_reason <> '' or failures > 0)",
        function_ids,
    )


def _worker(row: dict[str, Any]) -> Worker:
    return msgspec.convert(row, Worker)
