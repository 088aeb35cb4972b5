"""What is deleted when it has been kept long enough, in batches; and the time used that billing has not heard of."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from penstock.kit.db import Reader, Tx
from penstock.serverless.definitions import VERSIONS_KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """An invocation that has been kept long enough, and the objects that it refers to."""

    project_id: str
    id: str
    objects: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What was used of a function with one key in one minute."""

    function_id: str
    name: str
    project_id: str
    organisation_id: str
    key_id: str
    minute: datetime
    invocations: int
    duration_ms: int
    labels: dict[str, str]


async def waited_for_in_vain(conn: Reader, *, limit: int) -> list[str]:
    """Functions that were deleted lately and that something still waits for: an attempt that is to be made again, or
    all of it when whoever deleted the function died."""
    rows = await conn.fetch(
        """
        select f.id from serverless.functions f
        where f.deleted and f.updated_at > statement_timestamp() - interval '3 days' and exists (
            select 1 from serverless.invocations i where i.function_id = f.id and i.waiting)
        limit $1
        """,
        limit,
    )
    return [row["id"] for row in rows]


async def old_invocations(conn: Reader, *, older_than_s: float, limit: int) -> list[Old]:
    """Those that ended so long ago. What a worker said of where its result is may name any object of the project: only
    those of the invocation itself go with it. Attempts that came to nothing may have left a result behind too."""
    rows = await conn.fetch(
        """
        select project_id, id, array(
            select key from (
                select unnest(array[payload_ref ->> 'key', result_ref ->> 'key'])
                union select 'invocations/' || id || '/result-' || n from generate_series(
                    1, case when attempt > 1 or state in ('cancelled', 'dead_lettered') then attempt else 0 end) as n
            ) as o (key) where starts_with(key, 'invocations/' || id || '/')) as objects
        from serverless.invocations where finished_at < statement_timestamp() - make_interval(secs => $1)
        order by finished_at limit $2
        """,
        older_than_s,
        limit,
    )
    return [msgspec.convert(dict(row), Old) for row in rows]


async def delete_invocations(tx: Tx, old: Sequence[Old]) -> None:
    """Them, what they said, and what was owed for them."""
    pairs = [each.project_id for each in old], [each.id for each in old]
    given = "unnest($1::text[], $2::text[]) as g (project_id, id)"
    for table in ("outputs", "callbacks"):
        await tx.execute(
            f"delete from serverless.{table} t using {given}"  # noqa: S608
            " where t.project_id = g.project_id and t.invocation_id = g.id",
            *pairs,
        )
    await tx.execute(
        f"delete from serverless.invocations t using {given} where t.project_id = g.project_id and t.id = g.id",  # noqa: S608
        *pairs,
    )


async def delete_outputs(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """What was said so long ago; how many lines."""
    return await _delete(conn, "outputs", "at", older_than_s, limit)


async def delete_letters(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """Dead letters of so long ago."""
    return await _delete(conn, "dead_letters", "created_at", older_than_s, limit)


async def delete_workers(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """Workers that have been gone for so long."""
    return await _delete(conn, "workers", "gone_at", older_than_s, limit, only="state = 'gone'")


async def delete_callbacks(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """Callbacks that were delivered or given up so long ago."""
    settled = "(delivered_at is not null or failed_at is not null)"
    return await _delete(conn, "callbacks", "created_at", older_than_s, limit, only=settled)


async def _delete(conn: Reader, table: str, column: str, older_than_s: float, limit: int, *, only: str = "true") -> int:
    status = await conn.execute(
        f"""
        delete from serverless.{table} where ctid = any(array(
            select ctid from serverless.{table}
            where {column} < statement_timestamp() - make_interval(secs => $1) and {only} order by {column} limit $2))
        """,  # noqa: S608
        older_than_s,
        limit,
    )
    return int(status.removeprefix("DELETE "))


async def delete_versions(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """Versions that nobody can go back to: all but the last of each function, and those of functions that were deleted
    so long ago. One that a worker still serves stays."""
    status = await conn.execute(
        """
        delete from serverless.versions v where (v.function_id, v.number) in (
            select o.function_id, o.number from (
                select function_id, number, row_number() over (partition by function_id order by number desc) as nth
                from serverless.versions
            ) as o join serverless.functions f on f.id = o.function_id
            where case when f.deleted then f.updated_at < statement_timestamp() - make_interval(secs => $1)
                    else o.nth > $2 and o.number not in (f.current_version, f.serving_version) end
                and not exists (select 1 from serverless.workers w where w.function_id = o.function_id
                    and w.version = o.number and w.state <> 'gone')
            limit $3)
        """,
        older_than_s,
        VERSIONS_KEPT,
        limit,
    )
    return int(status.removeprefix("DELETE "))


async def delete_functions(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """Functions that were deleted so long ago and that nothing names any more."""
    named = " ".join(
        f"and not exists (select 1 from serverless.{table} t where t.function_id || '' = f.id)"  # noqa: S608
        for table in ("versions", "invocations", "workers", "units", "spent")
    )
    status = await conn.execute(
        f"""
        delete from serverless.functions where id in (
            select f.id from serverless.functions f
            where f.deleted and f.updated_at < statement_timestamp() - make_interval(secs => $1) {named} limit $2)
        """,  # noqa: S608
        older_than_s,
        limit,
    )
    return int(status.removeprefix("DELETE "))


async def take_spent(tx: Tx, *, limit: int) -> list[Spent]:
    """Minutes that are over and that no statement can still add to, taken away."""
    rows = await tx.fetch(
        """
        with over as (
            select function_id, key_id, minute from serverless.spent
            where minute < date_trunc('minute', statement_timestamp()) - interval '1 minute'
            order by minute limit $1 for update skip locked
        ), taken as (
            delete from serverless.spent s using over o
            where s.function_id = o.function_id and s.key_id = o.key_id and s.minute = o.minute returning s.*
        )
        select t.*, f.name, coalesce(v.definition -> 'labels', '{}') as labels
        from taken t join serverless.functions f on f.id = t.function_id
        left join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        """,
        limit,
    )
    return [msgspec.convert(_plain(dict(row)), Spent) for row in rows]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return values | {"invocations": int(values["invocations"]), "duration_ms": int(values["duration_ms"])}
