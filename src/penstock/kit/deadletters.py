"""Events that the server refused for good: an operator looks, then requeues or discards."""

from dataclasses import dataclass
from datetime import datetime

from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import NotFound
from penstock.wire import subjects


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One event that holds back its aggregate."""

    event_id: str
    type: str
    aggregate_id: str
    version: int
    occurred_at: datetime
    attempts: int
    last_error: str


async def list_dead(conn: Reader, *, limit: int) -> list[DeadLetter]:
    """The oldest first."""
    rows = await conn.fetch(
        "select event_id, type, aggregate_id, version, occurred_at, attempts, last_error"
        " from kit.outbox where dead and published_at is null order by seq limit $1",
        limit,
    )
    return [DeadLetter(**dict(row)) for row in rows]


async def requeue(tx: Tx, actor: Actor, event_id: str) -> None:
    """Let the relay try again."""
    await _resolve(tx, "dead = false, attempts = 0", event_id)
    await audit.record(tx, actor, "dead_letters.requeue", event_id)
    tx.hint(subjects.OUTBOX)


async def discard(tx: Tx, actor: Actor, event_id: str) -> None:
    """Never publish it; its aggregate goes on without it. The row stays as evidence."""
    await _resolve(tx, "dead = false, published_at = clock_timestamp(), discarded = true", event_id)
    await audit.record(tx, actor, "dead_letters.discard", event_id)
    tx.hint(subjects.OUTBOX)


async def _resolve(tx: Tx, change: str, event_id: str) -> None:
    found = await tx.fetchval(
        f"update kit.outbox set {change} where event_id = $1 and dead returning seq",  # noqa: S608
        event_id,
    )
    if found is None:
        raise NotFound("no dead letter with this id", field="event_id")
