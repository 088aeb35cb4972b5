"""Rows of functions and their versions, as their owners see and change them.

Calls go to `serving_version`. Whoever makes another version current moves it at once if no worker of the serving one is
ready; otherwise it stays until the activator has a worker of the new one. A version's row is never changed.
"""

from typing import Any, Final

import msgspec

from penstock.kit.db import Reader, Row, Tx
from penstock.serverless.definitions import Deployed, Version
from penstock.serverless.model import Worker
from penstock.wire.rest import FunctionPut

_DEPLOYED: Final = """
    select f.id, f.project_id, f.organisation_id, f.name, f.current_version, f.serving_version, f.row_version,
        v.definition, f.wait_reason, f.created_at, f.updated_at, w.*,
        (select count(*) from (select 1 from serverless.invocations i where i.function_id = f.id and i.waiting
                               limit {queued_max}) as q) as queued
    from serverless.functions f
    join serverless.versions v on v.function_id = f.id and v.number = f.current_version
    cross join lateral (
        select count(*) filter (where state = 'ready') as workers_ready,
            count(*) filter (where state = 'starting') as workers_starting,
            coalesce(sum(slots - inflight) filter (where state = 'ready' and version = f.serving_version), 0)::bigint
                as slots_free,
            coalesce(sum(inflight), 0)::bigint as running
        from serverless.workers where function_id = f.id and state <> 'gone'
    ) as w
    where f.project_id = $1 and not f.deleted and {where}
"""
_ONE: Final = _DEPLOYED.format(queued_max=1_000_000, where="f.name = $2")
_PAGE: Final = _DEPLOYED.format(queued_max=10_000, where="f.name > $2 order by f.name limit $3")
_SWITCH: Final = """
    update serverless.functions f
    set current_version = $2, row_version = row_version + 1, updated_at = clock_timestamp(),
        created_by = $3, created_kind = $4, key_id = $5, wait_reason = '', failures = 0, create_after = '-infinity',
        serving_version = case when exists (
            select 1 from serverless.workers w
            where w.function_id = f.id and w.state = 'ready' and w.version = f.serving_version)
        then serving_version else $2 end
    where id = $1
"""


async def any_deployed(conn: Reader, project_id: str) -> bool:
    """Whether the project has a function."""
    query = "select exists (select from serverless.functions where project_id = $1 and not deleted)"
    return bool(await conn.fetchval(query, project_id))


async def of_sku(conn: Reader, sku: str, *, limit: int) -> list[tuple[str, str]]:
    """(project, name) of the functions whose current or serving version needs this offer."""
    rows = await conn.fetch(
        "select distinct f.project_id, f.name from serverless.functions f join serverless.versions v"
        " on v.function_id = f.id and v.number in (f.current_version, f.serving_version)"
        " where not f.deleted and v.definition ->> 'sku' = $1 order by 1, 2 limit $2",
        sku,
        limit,
    )
    return [(row["project_id"], row["name"]) for row in rows]


async def of_runtime(conn: Reader, project_id: str, runtime: str, *, limit: int) -> list[str]:
    """Functions of the project with a version, current or kept, that names the runtime."""
    rows = await conn.fetch(
        "select name from serverless.functions f where project_id = $1 and not deleted and exists (select from"
        " serverless.versions v where v.function_id = f.id and v.definition ->> 'runtime' = $2) order by name limit $3",
        project_id,
        runtime,
        limit,
    )
    return [row["name"] for row in rows]


async def find(conn: Reader, project_id: str, name: str) -> Deployed | None:
    """One function of the project."""
    row = await conn.fetchrow(_ONE, project_id, name)
    return _deployed(row) if row else None


async def page(conn: Reader, project_id: str, *, after: str, limit: int) -> list[Deployed]:
    """The project's functions by name."""
    return [_deployed(row) for row in await conn.fetch(_PAGE, project_id, after, limit)]


async def lock_project(tx: Tx, project_id: str) -> None:
    """Makers of one project take turns: its functions are counted."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 13))", f"functions {project_id}")


async def count(conn: Reader, project_id: str) -> int:
    """How many functions the project has."""
    return await conn.fetchval(
        "select count(*) from serverless.functions where project_id = $1 and not deleted", project_id
    )


async def lock(tx: Tx, project_id: str, name: str) -> tuple[str, int, bytes] | None:
    """Id, current version and that one's digest; locked. The lock is a statement of its own: whoever waited for it must
    find the version that the one before has made."""
    await tx.execute(
        "select 1 from serverless.functions where project_id = $1 and name = $2 and not deleted for no key update",
        project_id,
        name,
    )
    row = await tx.fetchrow(
        """
        select f.id, f.current_version, v.digest from serverless.functions f
        join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        where f.project_id = $1 and f.name = $2 and not f.deleted
        """,
        project_id,
        name,
    )
    return (row["id"], row["current_version"], row["digest"]) if row else None


async def insert(tx: Tx, values: dict[str, Any]) -> None:
    """A new function, which has its first version."""
    await tx.execute(
        """
        insert into serverless.functions (id, project_id, organisation_id, name, current_version, serving_version,
            created_by, created_kind, key_id) values ($1, $2, $3, $4, 1, 1, $5, $6, $7)
        """,
        *(values[name] for name in ("id", "project_id", "organisation_id", "name")),
        *(values[name] for name in ("created_by", "created_kind", "key_id")),
    )


async def next_number(conn: Reader, function_id: str) -> int:
    """The number of a new version."""
    return await conn.fetchval(
        "select coalesce(max(number), 0) + 1 from serverless.versions where function_id = $1", function_id
    )


async def add_version(
    tx: Tx, function_id: str, number: int, definition: FunctionPut, *, digest: bytes, created_by: str
) -> None:
    """A version. The columns are what hot paths read of the definition."""
    await tx.execute(
        """
        insert into serverless.versions (function_id, number, definition, digest, slots, tasks_per_worker, workers_min,
            workers_max, idle_s, requests_min, timeout_s, retries, retry_for, retry_delay_s, webhook, created_by)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
        """,
        function_id,
        number,
        definition,
        digest,
        definition.concurrency,
        definition.tasks_per_worker or definition.concurrency,
        definition.workers_min,
        definition.workers_max,
        definition.idle_s,
        definition.requests_min,
        definition.timeout_s,
        definition.retries,
        definition.retry_for,
        definition.retry_delay_s,
        definition.webhook,
        created_by,
    )


async def switch(
    tx: Tx, function_id: str, number: int, *, created_by: str, created_kind: str, key_id: str | None
) -> None:
    """Make this version the current one. Workers are made from now on for whoever asked for it."""
    await tx.execute(_SWITCH, function_id, number, created_by, created_kind, key_id)


async def version(conn: Reader, function_id: str, number: int) -> FunctionPut | None:
    """What one version is."""
    found = await conn.fetchval(
        "select definition from serverless.versions where function_id = $1 and number = $2", function_id, number
    )
    return None if found is None else msgspec.convert(found, FunctionPut)


async def version_before(conn: Reader, function_id: str, number: int) -> int | None:
    """The one before it that is still kept."""
    return await conn.fetchval(
        "select max(number) from serverless.versions where function_id = $1 and number < $2", function_id, number
    )


async def versions(conn: Reader, function_id: str, *, before: int | None, limit: int) -> list[Version]:
    """Versions, newest first."""
    rows = await conn.fetch(
        """
        select v.number, v.definition, v.created_at, v.created_by, v.number = f.current_version as current,
            v.number = f.serving_version as serving
        from serverless.versions v join serverless.functions f on f.id = v.function_id
        where v.function_id = $1 and ($2::int is null or v.number < $2) order by v.number desc limit $3
        """,
        function_id,
        before,
        limit,
    )
    return [msgspec.convert(dict(row), Version) for row in rows]


async def workers(conn: Reader, function_id: str, *, after: str, limit: int) -> list[Worker]:
    """Workers that are not gone, by name."""
    rows = await conn.fetch(
        """
        select id, function_id, project_id, request, version, allocation_id, state, reason, slots, inflight, served,
            created_at, ready_at
        from serverless.workers where function_id = $1 and state <> 'gone' and id > $2 order by id limit $3
        """,
        function_id,
        after,
        limit,
    )
    return [msgspec.convert(dict(row), Worker) for row in rows]


async def mark_deleted(tx: Tx, function_id: str) -> None:
    """It takes nothing more. Its row stays for those of its invocations that are kept."""
    await tx.execute(
        "update serverless.functions set deleted = true, row_version = row_version + 1,"
        " updated_at = clock_timestamp() where id = $1",
        function_id,
    )
    await tx.execute("delete from serverless.schedules where function_id = $1", function_id)


def _deployed(row: Row) -> Deployed:
    return msgspec.convert(dict(row), Deployed)
