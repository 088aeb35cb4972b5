"""Invocations, what they said and dead letters, for those who ask. Everything is looked for within a project."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit.db import Reader, Tx
from penstock.serverless.model import Invocation
from penstock.serverless.store.invocations import COLUMNS, of_row
from penstock.serverless.waiting import Standing
from penstock.wire.rest import DeadLetter, OutputLine

#: Lists leave out what can be large.
_LISTED: Final = ", ".join(
    {"result": "null::bytea as result", "traceback": "'' as traceback"}.get(name, name) for name in COLUMNS.split(", ")
)
_STANDING: Final = """
    select f.id, clock_timestamp() as now, f.wait_reason as reason, w.*
    from serverless.functions f cross join lateral (
        select count(*) filter (where state = 'ready') as ready, count(*) filter (where state = 'starting') as starting,
            coalesce(sum(slots) filter (where state = 'ready'), 0)::bigint as slots,
            coalesce(sum(slots - inflight) filter (where state = 'ready' and version = f.serving_version), 0)::bigint
                as free
        from serverless.workers where function_id = f.id and state <> 'gone'
    ) as w
    where f.id = any($1)
"""
#: Counting stops here.
AHEAD_MAX: Final = 10_000
_LETTER: Final = (
    "id, function_name as function, source, invocation_id, failure_class, error, created_at, replayed_as, replayed_at"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An invocation as it was sent, to be sent again."""

    function_name: str
    content_type: str
    headers: dict[str, str]
    attributes: dict[str, str]
    payload: bytes | None
    payload_ref: dict[str, str | int] | None
    timeout_s: float | None
    webhook: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Which lines, and from which end."""

    invocation: str | None = None
    newest_first: bool = False


async def find(conn: Reader, project_id: str, invocation_id: str) -> Invocation | None:
    """One invocation with its result."""
    row = await conn.fetchrow(
        f"select {COLUMNS} from serverless.invocations where project_id = $1 and id = $2",  # noqa: S608
        project_id,
        invocation_id,
    )
    return of_row(row) if row else None


async def page(
    conn: Reader, project_id: str, *, function_name: str | None, state: str | None, before: int | None, limit: int
) -> list[Invocation]:
    """Invocations without their results, newest first."""
    rows = await conn.fetch(
        f"""
        select * from (
            select listed.* from serverless.functions f cross join lateral (
                select {_LISTED} from serverless.invocations i
                where i.function_id || '' = f.id and ($3::text is null or i.state = $3)
                    and ($4::bigint is null or i.seq < $4)
                order by i.seq desc limit $5
            ) as listed where f.project_id = $1 and ($2::text is null or f.name = $2)
            union all (
                select {_LISTED} from serverless.invocations
                where project_id = $1 and function_id is null and ($2::text is null or function_name = $2)
                    and ($3::text is null or state = $3) and ($4::bigint is null or seq < $4)
                order by seq desc limit $5)
        ) as found order by seq desc limit $5
        """,  # noqa: S608
        project_id,
        function_name,
        state,
        before,
        limit,
    )
    return [of_row(row) for row in rows]


async def standings(conn: Reader, function_ids: Collection[str]) -> dict[str, Standing]:
    """What these functions could take now."""
    rows = await conn.fetch(_STANDING, list(function_ids)) if function_ids else []
    return {row["id"]: Standing(**{name: row[name] for name in Standing.__dataclass_fields__}) for row in rows}


async def ahead(conn: Reader, it: Invocation) -> int:
    """How many of its function are due before it, counted up to `AHEAD_MAX`."""
    return await conn.fetchval(
        """
        select count(*) from (
            select 1 from serverless.invocations
            where function_id = $1 and waiting and (due_at, seq) < ($2, $3) limit $4
        ) as q
        """,
        it.function_id,
        it.due_at,
        it.seq,
        AHEAD_MAX,
    )


async def sent(conn: Reader, project_id: str, invocation_id: str) -> Sent | None:
    """What was sent."""
    row = await conn.fetchrow(
        """
        select function_name, content_type, headers, attributes, payload, payload_ref, timeout_s, webhook
        from serverless.invocations where project_id = $1 and id = $2
        """,
        project_id,
        invocation_id,
    )
    return msgspec.convert(dict(row), Sent) if row else None


async def taken_ids(conn: Reader, project_id: str, ids: Collection[str]) -> set[str]:
    """Those of these that are invocations already."""
    rows = await conn.fetch(
        "select id from serverless.invocations where project_id = $1 and id = any($2)", project_id, list(ids)
    )
    return {row["id"] for row in rows}


async def outputs(
    conn: Reader, project_id: str, invocation_id: str, *, after: tuple[int, int], limit: int
) -> list[OutputLine]:
    """What one invocation said, in the order of attempt and number, after that place."""
    rows = await conn.fetch(
        """
        select place, invocation_id as invocation, attempt, seq, kind, text, at from serverless.outputs
        where project_id = $1 and invocation_id = $2 and (attempt, seq) > ($3, $4) order by attempt, seq limit $5
        """,
        project_id,
        invocation_id,
        *after,
        limit,
    )
    return [msgspec.convert(dict(row), OutputLine) for row in rows]


async def logs(conn: Reader, function_id: str, only: Lines, *, beyond: int | None, limit: int) -> list[OutputLine]:
    """What a function's invocations said, in the order in which it came or from the end, beyond that place."""
    rows = await conn.fetch(
        f"""
        select place, invocation_id as invocation, attempt, seq, kind, text, at from serverless.outputs
        where function_id = $1 and ($2::text is null or invocation_id = $2)
            and ($3::bigint is null or place {"<" if only.newest_first else ">"} $3)
        order by place {"desc" if only.newest_first else "asc"} limit $4
        """,  # noqa: S608
        function_id,
        only.invocation,
        beyond,
        limit,
    )
    return [msgspec.convert(dict(row), OutputLine) for row in rows]


async def last_place(conn: Reader, function_id: str) -> int:
    """Where what a function said ends now."""
    found = await conn.fetchval("select max(place) from serverless.outputs where function_id = $1", function_id)
    return found or 0


async def letters(
    conn: Reader, project_id: str, *, function_name: str | None, before: str | None, limit: int
) -> list[DeadLetter]:
    """Dead letters, newest first."""
    rows = await conn.fetch(
        f"""
        select {_LETTER} from serverless.dead_letters
        where project_id = $1 and ($2::text is null or function_name = $2) and ($3::text is null or id < $3)
        order by id desc limit $4
        """,  # noqa: S608
        project_id,
        function_name,
        before,
        limit,
    )
    return [msgspec.convert(dict(row), DeadLetter) for row in rows]


async def lock_letter(tx: Tx, project_id: str, letter_id: str) -> DeadLetter | None:
    """One dead letter, locked."""
    row = await tx.fetchrow(
        f"select {_LETTER} from serverless.dead_letters where project_id = $1 and id = $2 for update",  # noqa: S608
        project_id,
        letter_id,
    )
    return msgspec.convert(dict(row), DeadLetter) if row else None


async def mark_replayed(tx: Tx, letter_id: str, invocation_id: str) -> None:
    """What was made of it."""
    await tx.execute(
        "update serverless.dead_letters set replayed_as = $2, replayed_at = clock_timestamp() where id = $1",
        letter_id,
        invocation_id,
    )


async def drop_letter(tx: Tx, project_id: str, letter_id: str) -> bool:
    """Whether there was one."""
    status = await tx.execute(
        "delete from serverless.dead_letters where project_id = $1 and id = $2", project_id, letter_id
    )
    return status == "DELETE 1"


async def queue_age_s(conn: Reader) -> float:
    """For how long the oldest invocation that is due has waited for a worker."""
    return await conn.fetchval(
        "select coalesce(extract(epoch from clock_timestamp() - min(due_at)), 0)::float8"
        " from serverless.invocations where waiting and due_at < clock_timestamp()"
    )
