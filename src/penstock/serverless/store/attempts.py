"""What the holder of an attempt's token may know of its invocation."""

from dataclasses import dataclass
from typing import Any

from penstock.kit.db import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The current one. `payload_ref` is where its payload is, if that is kept apart; `created_by` made the
    invocation."""

    attempt: int
    created_by: str
    payload_ref: dict[str, Any] | None


async def current(conn: Reader, *, project_id: str, invocation_id: str, token: bytes) -> Attempt | None:
    """The attempt that this token is of, while it counts."""
    row = await conn.fetchrow(
        "select attempt, created_by, payload_ref from serverless.invocations"
        " where project_id = $1 and id = $2 and token = $3 and finished_at is null",
        project_id,
        invocation_id,
        token,
    )
    return Attempt(**dict(row)) if row else None


async def payload(conn: Reader, *, project_id: str, invocation_id: str) -> bytes | None:
    """The payload, if it is kept with the row."""
    return await conn.fetchval(
        "select payload from serverless.invocations where project_id = $1 and id = $2", project_id, invocation_id
    )


async def called(conn: Reader, *, project_id: str, parent_id: str, invocation_id: str) -> dict[str, Any] | None:
    """Where the result of an invocation that another one made is kept, if it is kept apart."""
    return await conn.fetchval(
        "select result_ref from serverless.invocations where project_id = $1 and id = $3 and parent_id = $2",
        project_id,
        parent_id,
        invocation_id,
    )
