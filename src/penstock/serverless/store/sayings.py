"""What handlers say before they end, and what they call. Both count only with the token of the current attempt."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kit.db import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One thing that an attempt said."""

    project_id: str
    invocation_id: str
    token: bytes
    attempt: int
    seq: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The invocation behind an attempt, for what it calls."""

    id: str
    project_id: str
    organisation_id: str
    request: str
    key_id: str | None
    created_by: str
    correlation_id: str


async def add(conn: Reader, said: Sequence[Said]) -> list[str]:
    """Keep what current attempts said; the same again changes nothing. Whose it was. A report of progress that would
    have to wait for its invocation's row is only kept as a line: the next one, or the end, follows."""
    rows = await conn.fetch(
        """
        with given as materialized (
            select i.project_id, i.id, i.function_id, g.attempt, g.seq, g.kind, g.text
            from unnest($1::text[], $2::text[], $3::bytea[], $4::int[], $5::int[], $6::text[], $7::text[])
                as g (project_id, id, token, attempt, seq, kind, text)
            join serverless.invocations i on i.project_id = g.project_id and i.id = g.id and i.token = g.token
                and i.attempt = g.attempt
        ), kept as (
            insert into serverless.outputs (project_id, invocation_id, attempt, seq, kind, text, function_id)
            select project_id, id, attempt, seq, kind, text, function_id from given
            order by project_id, id, attempt, seq
            on conflict do nothing
        ), last as (
            select distinct on (project_id, id) project_id, id, text from given where kind = 'progress'
            order by project_id, id, attempt desc, seq desc
        ), open as materialized (
            select i.project_id, i.id, last.text from last
            join serverless.invocations i on i.project_id = last.project_id and i.id = last.id
                and i.finished_at is null
            for update of i skip locked
        ), progressed as (
            update serverless.invocations i set progress = open.text
            from open where i.project_id = open.project_id and i.id = open.id
        )
        select distinct id from given
        """,
        [each.project_id for each in said],
        [each.invocation_id for each in said],
        [each.token for each in said],
        [each.attempt for each in said],
        [each.seq for each in said],
        [each.kind for each in said],
        [each.text for each in said],
    )
    return [row["id"] for row in rows]


async def parent(conn: Reader, *, project_id: str, invocation_id: str, token: bytes, worker_id: str) -> Parent | None:
    """Who calls, if that attempt is the current one."""
    row = await conn.fetchrow(
        """
        select i.id, i.project_id, f.organisation_id, w.request, i.key_id, i.created_by, i.correlation_id
        from serverless.invocations i
        join serverless.functions f on f.id = i.function_id join serverless.workers w on w.id = i.worker_id
        where i.project_id = $1 and i.id = $2 and i.token = $3 and i.worker_id = $4 and i.finished_at is null
        """,
        project_id,
        invocation_id,
        token,
        worker_id,
    )
    return Parent(**dict(row)) if row else None
