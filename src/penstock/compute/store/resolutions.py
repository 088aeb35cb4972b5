"""Requirements by name and the locks that they became."""

from typing import Final

import msgspec

from penstock.compute.model import Resolution
from penstock.kit.db import Reader, Row, Tx

_COLUMNS: Final = (
    "id, project_id, base, requirements, state, lock, python, error_code, error, task_id, nodes_tried,"
    " correlation_id, created_at, finished_at"
)


def _of_row(row: Row) -> Resolution:
    return msgspec.convert(dict(row), Resolution)


async def lock_project(tx: Tx, project_id: str) -> None:
    """Whoever else asks for a resolution in this project waits."""
    await tx.execute("select pg_advisory_xact_lock(hashtextextended($1, 29))", f"resolutions {project_id}")


async def find(conn: Reader, project_id: str, resolution_id: str) -> Resolution | None:
    """One of the project's."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from compute.resolutions where project_id = $1 and id = $2",  # noqa: S608
        project_id,
        resolution_id,
    )
    return _of_row(row) if row else None


async def latest(conn: Reader, project_id: str, base: str, requirements: str, *, only_open: bool) -> Resolution | None:
    """The newest of the same text that is under way or, unless `only_open`, has succeeded."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from compute.resolutions where project_id = $1 and base = $2"  # noqa: S608
        " and md5(requirements) = md5($3) and requirements = $3 and state <> 'failed'"
        " and (finished_at is null or not $4) order by created_at desc, id desc limit 1",
        project_id,
        base,
        requirements,
        only_open,
    )
    return _of_row(row) if row else None


async def count_open(conn: Reader, project_id: str) -> int:
    """How many of the project are under way."""
    return await conn.fetchval(
        "select count(*) from compute.resolutions where finished_at is null and project_id = $1", project_id
    )


async def insert(
    tx: Tx,
    resolution_id: str,
    project_id: str,
    *,
    base: str,
    requirements: str,
    correlation_id: str,
    created_by: str,
) -> Resolution:
    """A new one, queued."""
    row = await tx.fetchrow(
        "insert into compute.resolutions (id, project_id, base, requirements, correlation_id, created_by)"  # noqa: S608
        f" values ($1, $2, $3, $4, $5, $6) returning {_COLUMNS}",
        resolution_id,
        project_id,
        base,
        requirements,
        correlation_id,
        created_by,
    )
    assert row is not None
    return _of_row(row)


async def take_running(tx: Tx, *, limit: int) -> list[Resolution]:
    """Those that nodes were asked, the longest not looked at first, locked; those that somebody else has are passed
    over."""
    rows = await tx.fetch(
        "update compute.resolutions set looked_at = clock_timestamp() where id in (select id from compute.resolutions"  # noqa: S608
        " where state = 'running' order by looked_at nulls first limit $1 for update skip locked)"
        f" returning {_COLUMNS}",
        limit,
    )
    return [_of_row(row) for row in rows]


async def take_queued(tx: Tx, *, limit: int) -> list[Resolution]:
    """Those that wait for a node, locked. Projects take turns: first comes who has the fewest under way, of those who
    was served the longest ago."""
    rows = await tx.fetch(
        f"""
        select {_COLUMNS} from compute.resolutions join (
            select id as waiting, busy + row_number() over (partition by project_id order by created_at, id) as turn
            from (
                select id, project_id, state, created_at,
                    count(*) filter (where state = 'running') over (partition by project_id) as busy
                from compute.resolutions where finished_at is null
            ) each where state = 'queued'
        ) turns on waiting = id cross join lateral (
            select max(s.looked_at) as served_at from compute.resolutions s where s.project_id = resolutions.project_id
        ) served
        where state = 'queued' order by turn, served_at nulls first, created_at, id limit $1
        for update of resolutions skip locked
        """,  # noqa: S608
        limit,
    )
    return [_of_row(row) for row in rows]


async def loads(conn: Reader) -> dict[str, int]:
    """How many are asked of each node."""
    rows = await conn.fetch(
        "select nodes_tried[cardinality(nodes_tried)] as node_id, count(*) as count from compute.resolutions"
        " where state = 'running' group by 1"
    )
    return {row["node_id"]: row["count"] for row in rows}


async def is_older(conn: Reader, resolution_id: str, seconds: float) -> bool:
    """Whether it was asked for longer ago."""
    return bool(
        await conn.fetchval(
            "select created_at < clock_timestamp() - make_interval(secs => $2) from compute.resolutions where id = $1",
            resolution_id,
            seconds,
        )
    )


async def run(tx: Tx, resolution_id: str, *, node_id: str, task_id: str) -> None:
    """A node has been asked."""
    await tx.execute(
        "update compute.resolutions set state = 'running', task_id = $3, nodes_tried = nodes_tried || $2::text,"
        " looked_at = clock_timestamp() where id = $1",
        resolution_id,
        node_id,
        task_id,
    )


async def queue_again(tx: Tx, resolution_id: str, *, code: str, error: str) -> None:
    """The node could not do it, for this reason; another may."""
    await tx.execute(
        "update compute.resolutions set state = 'queued', task_id = null, error_code = $2, error = $3 where id = $1",
        resolution_id,
        code,
        error,
    )


async def succeed(tx: Tx, resolution_id: str, *, lock: str, python: str) -> None:
    """It has its lock."""
    await tx.execute(
        "update compute.resolutions set state = 'succeeded', lock = $2, python = $3, error_code = '', error = '',"
        " finished_at = clock_timestamp() where id = $1",
        resolution_id,
        lock,
        python,
    )


async def fail(tx: Tx, resolution_id: str, *, code: str, error: str) -> None:
    """There will be no lock."""
    await tx.execute(
        "update compute.resolutions set state = 'failed', error_code = $2, error = $3,"
        " finished_at = clock_timestamp() where id = $1",
        resolution_id,
        code,
        error,
    )


async def keep_newest(tx: Tx, project_id: str, *, limit: int) -> None:
    """Forget the project's oldest beyond so many that succeeded, and so many that failed."""
    await tx.execute(
        "delete from compute.resolutions where id in (select id from (select id, row_number() over (partition by state"
        " order by created_at desc, id desc) as nth from compute.resolutions where project_id = $1"
        " and finished_at is not null) as ended where nth > $2)",
        project_id,
        limit,
    )


async def sweep(tx: Tx, *, older_than_s: float, limit: int) -> None:
    """Forget what failed, and what a newer one of the same text has replaced."""
    await tx.execute(
        """
        delete from compute.resolutions where id in (
            select id from compute.resolutions r
            where finished_at < clock_timestamp() - make_interval(secs => $1) and (state = 'failed' or exists (
                select 1 from compute.resolutions n where n.project_id = r.project_id and n.base = r.base
                    and md5(n.requirements) = md5(r.requirements) and n.state = 'succeeded'
                    and n.created_at > r.created_at))
            limit $2 for update skip locked)
        """,
        older_than_s,
        limit,
    )
