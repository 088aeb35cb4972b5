"""Rows of invocations: made, and looked up by their makers. The id counts within its project."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from penstock.kit.db import Reader, Row
from penstock.serverless.model import Draft, Function, Invocation

_FIELDS: Final = tuple(Invocation.__dataclass_fields__)
COLUMNS: Final = ", ".join(_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A row that was made now."""

    created_at: datetime


def of_row(row: Row) -> Invocation:
    """The value that a row holds."""
    return msgspec.convert(dict(row), Invocation)


_GIVEN: Final = (
    ("project_id", "text"),
    ("id", "text"),
    ("function_id", "text"),
    ("function_name", "text"),
    ("mode", "text"),
    ("content_type", "text"),
    ("headers", "jsonb"),
    ("attributes", "jsonb"),
    ("payload", "bytea"),
    ("payload_ref", "jsonb"),
    ("payload_hash", "bytea"),
    ("timeout_s", "float8"),
    ("reply_to", "text"),
    ("webhook", "text"),
    ("parent_id", "text"),
    ("key_id", "text"),
    ("created_by", "text"),
    ("correlation_id", "text"),
)
_NAMES: Final = ", ".join(name for name, _ in _GIVEN)
_ARRAYS: Final = ", ".join(f"${n}::{kind}[]" for n, (_, kind) in enumerate(_GIVEN, 1))
_N: Final = len(_GIVEN)
#: The least that two times can differ by.
_TURN_S: Final = 1e-6
_ADD: Final = f"""
    insert into serverless.invocations ({_NAMES}, due_at, expires_at)
    select {_NAMES}, statement_timestamp() + make_interval(secs => delay_s),
        statement_timestamp() + make_interval(secs => delay_s + ttl_s)
    from unnest({_ARRAYS}, ${_N + 1}::float8[], ${_N + 2}::float8[]) as given ({_NAMES}, delay_s, ttl_s)
    on conflict (project_id, id) do nothing
    returning project_id, id, created_at
"""  # noqa: S608


async def add(conn: Reader, drafts: Sequence[Draft]) -> dict[tuple[str, str], Added]:
    """Make what is not there yet, by one statement; what was made, by project and id. They are inserted in the order of
    their ids, so that others who make some of the same are waited for and do not wait for us; their turns are in the
    order in which they came."""
    turns = {(draft.project_id, draft.id): n * _TURN_S for n, draft in enumerate(drafts)}
    drafts = sorted(drafts, key=lambda draft: (draft.project_id, draft.id))
    columns = [[getattr(draft, name) for draft in drafts] for name, _ in _GIVEN]
    delays = [draft.delay_s + turns[draft.project_id, draft.id] for draft in drafts]
    rows = await conn.fetch(_ADD, *columns, delays, [draft.ttl_s for draft in drafts])
    return {(row["project_id"], row["id"]): Added(created_at=row["created_at"]) for row in rows}


async def add_stillborn(conn: Reader, draft: Draft, *, failure_class: str, error: str, status_code: int) -> bool:
    """Make one that has failed already: nothing could ever run it. False when there is one with its id."""
    status = await conn.execute(
        """
        insert into serverless.invocations (project_id, id, function_name, mode, content_type, headers, attributes,
            payload, payload_ref, payload_hash, created_by, key_id, correlation_id, state, waiting, finished_at,
            failure_class, error, status_code)
        values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, 'failed', false, clock_timestamp(),
            $14, $15, $16)
        on conflict (project_id, id) do nothing
        """,
        draft.project_id,
        draft.id,
        draft.function_name,
        draft.mode,
        draft.content_type,
        draft.headers,
        draft.attributes,
        draft.payload,
        draft.payload_ref,
        draft.payload_hash,
        draft.created_by,
        draft.key_id,
        draft.correlation_id,
        failure_class,
        error,
        status_code,
    )
    return status == "INSERT 0 1"


async def find(conn: Reader, project_id: str, invocation_id: str) -> Invocation | None:
    """One of this project."""
    row = await conn.fetchrow(
        f"select {COLUMNS} from serverless.invocations where project_id = $1 and id = $2",  # noqa: S608
        project_id,
        invocation_id,
    )
    return of_row(row) if row else None


async def hashes(conn: Reader, project_id: str, ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
    """Function and payload's hash of those of these that are there."""
    rows = await conn.fetch(
        "select id, function_name, payload_hash from serverless.invocations where project_id = $1 and id = any($2)",
        project_id,
        ids,
    )
    return {row["id"]: (row["function_name"], row["payload_hash"]) for row in rows}


async def refers_to(conn: Reader, project_id: str, invocation_id: str, key: str) -> bool:
    """Whether its payload is this object."""
    return bool(
        await conn.fetchval(
            "select exists (select 1 from serverless.invocations"
            " where project_id = $1 and id = $2 and payload_ref ->> 'key' = $3)",
            project_id,
            invocation_id,
            key,
        )
    )


async def waiting(conn: Reader, project_id: str, *, limit: int) -> int:
    """How many of the project's wait, counted up to `limit`."""
    return await conn.fetchval(
        "select count(*) from (select 1 from serverless.functions f cross join lateral ("
        " select 1 from serverless.invocations i where i.function_id = f.id and i.waiting limit $2) as q"
        " where f.project_id = $1 limit $2) as w",
        project_id,
        limit,
    )


async def function(conn: Reader, project_id: str, name: str) -> Function | None:
    """What an invocation needs to know of its function."""
    row = await conn.fetchrow(
        """
        select f.id, f.project_id, f.organisation_id, f.name, f.current_version, f.serving_version, v.timeout_s,
            v.webhook
        from serverless.functions f
        join serverless.versions v on v.function_id = f.id and v.number = f.current_version
        where f.project_id = $1 and f.name = $2 and not f.deleted
        """,
        project_id,
        name,
    )
    return msgspec.convert(dict(row), Function) if row else None
