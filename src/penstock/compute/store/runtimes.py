"""Environments by name, and locks by digest. A lock never changes; a name may come to mean another one."""

from collections.abc import Sequence
from typing import Final

import msgspec

from penstock.compute.model import Runtime
from penstock.kit.db import Reader, Row, Tx
from penstock.wire import locks

_RUNTIME: Final = """
    select r.project_id, r.name, r.digest, r.version, r.created_at, r.updated_at, l.base, l.packages, {lock} as lock
    from compute.runtimes r join compute.locks l using (digest)
"""
_WHOLE: Final = _RUNTIME.format(lock="l.lock")
_SHORT: Final = _RUNTIME.format(lock="''")


def _of_row(row: Row) -> Runtime:
    return msgspec.convert(dict(row), Runtime)


async def find(conn: Reader, project_id: str, name: str) -> Runtime | None:
    """One environment."""
    row = await conn.fetchrow(f"{_WHOLE} where r.project_id = $1 and r.name = $2", project_id, name)
    return _of_row(row) if row else None


async def hold(tx: Tx, project_id: str, name: str) -> Runtime | None:
    """The same without its lock, for an allocation that will refer to it: until the transaction ends it stays."""
    row = await tx.fetchrow(f"{_SHORT} where r.project_id = $1 and r.name = $2 for share of r", project_id, name)
    return _of_row(row) if row else None


async def page(conn: Reader, project_id: str, *, after: str, limit: int) -> Sequence[Runtime]:
    """The project's environments, by name, without their locks."""
    rows = await conn.fetch(
        f"{_SHORT} where r.project_id = $1 and r.name > $2 order by r.name limit $3", project_id, after, limit
    )
    return [_of_row(row) for row in rows]


async def count_others(tx: Tx, project_id: str, name: str) -> int:
    """How many environments of other names the project has."""
    return await tx.fetchval(
        "select count(*) from compute.runtimes where project_id = $1 and name <> $2", project_id, name
    )


async def put(tx: Tx, project_id: str, name: str, *, digest: str, base: str, lock: str) -> None:
    """Let the name mean this lock. The lock's row is locked, so that no sweep takes it away meanwhile."""
    await tx.execute(
        "insert into compute.locks (digest, base, lock, packages) values ($1, $2, $3, $4)"
        " on conflict (digest) do update set used_at = clock_timestamp()",
        digest,
        base,
        lock,
        locks.packages(lock),
    )
    await tx.execute(
        "insert into compute.runtimes as r (project_id, name, digest) values ($1, $2, $3)"
        " on conflict (project_id, name) do update set digest = excluded.digest, version = r.version + 1,"
        " updated_at = clock_timestamp() where r.digest <> excluded.digest",
        project_id,
        name,
        digest,
    )


async def take(tx: Tx, project_id: str, name: str) -> str | None:
    """The digest that the name means, with the name locked against creates."""
    return await tx.fetchval(
        "select digest from compute.runtimes where project_id = $1 and name = $2 for update", project_id, name
    )


async def users(tx: Tx, project_id: str, digest: str) -> Sequence[str]:
    """The project's allocations with this lock that have not ended; a few of them."""
    rows = await tx.fetch(
        "select id from compute.allocations where project_id = $1 and runtime = $2 and runtime <> ''"
        " and ended_at is null order by id limit 3",
        project_id,
        digest,
    )
    return [row["id"] for row in rows]


async def delete(tx: Tx, project_id: str, name: str) -> None:
    """Forget the name. Its lock is kept for a while."""
    await tx.execute(
        "with gone as (delete from compute.runtimes where project_id = $1 and name = $2 returning digest)"
        " update compute.locks set used_at = clock_timestamp() where digest in (select digest from gone)",
        project_id,
        name,
    )


async def lock_of(tx: Tx, digest: str) -> tuple[str, str] | None:
    """(base, lock) of a digest."""
    row = await tx.fetchrow("select base, lock from compute.locks where digest = $1", digest)
    return (row["base"], row["lock"]) if row else None


async def sweep(tx: Tx, *, unused_s: float, limit: int) -> int:
    """Delete locks that nothing has referred to for so long."""
    rows = await tx.fetch(
        """
        delete from compute.locks where digest in (
            select digest from compute.locks l where used_at < clock_timestamp() - make_interval(secs => $1)
                and not exists (select 1 from compute.runtimes r where r.digest = l.digest)
                and not exists (select 1 from compute.allocations a
                    where a.runtime = l.digest and a.runtime <> '' and a.ended_at is null)
            limit $2 for update skip locked)
        and used_at < clock_timestamp() - make_interval(secs => $1)
        returning digest
        """,
        unused_s,
        limit,
    )
    return len(rows)
