"""Results that somebody wants to be told, and the keys that the telling is signed with."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from penstock.kit.db import Reader, Tx

#: A few of each project, so that one with many slow receivers leaves places for others.
_CLAIM: Final = """
    with due as (
        select c.id from (
            select distinct project_id from serverless.callbacks
            where next_at <= statement_timestamp() and delivered_at is null and failed_at is null
        ) as p cross join lateral (
            select id, next_at from serverless.callbacks
            where project_id = p.project_id and next_at <= statement_timestamp() and delivered_at is null
                and failed_at is null
            order by next_at limit $2 for update skip locked
        ) as c order by c.next_at limit $1
    )
    update serverless.callbacks c set attempts = attempts + 1,
        next_at = clock_timestamp() + make_interval(secs => $3),
        lease_until = clock_timestamp() + make_interval(secs => $3)
    from due where c.id = due.id
    returning c.id, c.project_id, c.invocation_id, c.url, c.attempts
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A callback that this process has claimed; it holds it by the number of attempts."""

    id: str
    project_id: str
    invocation_id: str
    url: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A project's key as it is stored."""

    key_id: str
    sealed: bytes
    created_at: datetime


async def any_due(conn: Reader) -> bool:
    """Whether there is something to send; asked often, and cheap."""
    return bool(
        await conn.fetchval(
            "select exists (select 1 from serverless.callbacks where next_at <= statement_timestamp()"
            " and delivered_at is null and failed_at is null)"
        )
    )


async def claim(tx: Tx, *, room: int, per_project: int, lease_s: float) -> list[Due]:
    """Some that are due. Whoever claimed one and fell silent is not waited for longer than the lease."""
    return [msgspec.convert(dict(row), Due) for row in await tx.fetch(_CLAIM, room, per_project, lease_s)]


async def delivered(conn: Reader, due: Due) -> None:
    """It was taken."""
    await conn.execute(
        "update serverless.callbacks set delivered_at = clock_timestamp(), lease_until = null, error = ''"
        " where id = $1 and attempts = $2 and delivered_at is null",
        due.id,
        due.attempts,
    )


async def failed(conn: Reader, due: Due, error: str, *, again_s: float, give_up_s: float) -> None:
    """It was not: later again, unless it is too old for that."""
    await conn.execute(
        """
        update serverless.callbacks set error = $3, lease_until = null,
            next_at = clock_timestamp() + make_interval(secs => $4),
            failed_at = case when created_at < clock_timestamp() - make_interval(secs => $5) then clock_timestamp() end
        where id = $1 and attempts = $2 and delivered_at is null
        """,
        due.id,
        due.attempts,
        error,
        again_s,
        give_up_s,
    )


async def signing_key(conn: Reader, project_id: str) -> SigningKey | None:
    """The project's key, if it has one."""
    row = await conn.fetchrow(
        "select key_id, sealed, created_at from serverless.signing_keys where project_id = $1", project_id
    )
    return SigningKey(**dict(row)) if row else None


async def add_signing_key(conn: Reader, project_id: str, key_id: str, sealed: bytes) -> None:
    """A first key; one that is there stays."""
    await conn.execute(
        "insert into serverless.signing_keys (project_id, key_id, sealed) values ($1, $2, $3) on conflict do nothing",
        project_id,
        key_id,
        sealed,
    )


async def keys_under_others(tx: Tx, key_id: str, *, limit: int) -> list[tuple[str, str, bytes]]:
    """Project, master key and value of those under another master key; locked."""
    rows = await tx.fetch(
        "select project_id, key_id, sealed from serverless.signing_keys where key_id <> $1 limit $2"
        " for update skip locked",
        key_id,
        limit,
    )
    return [(row["project_id"], row["key_id"], row["sealed"]) for row in rows]


async def replace_keys(tx: Tx, keys: Sequence[tuple[str, str, bytes]]) -> None:
    """The same keys under another master key."""
    await tx.executemany("update serverless.signing_keys set key_id = $2, sealed = $3 where project_id = $1", keys)


async def count_keys(conn: Reader) -> dict[str, int]:
    """How many each master key opens."""
    rows = await conn.fetch("select key_id, count(*) as count from serverless.signing_keys group by key_id")
    return {row["key_id"]: row["count"] for row in rows}
