"""Events that the server refused for good: an operator looks, then requeues or discards."""

from dataclasses import dataclass
from datetime import datetime

from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import missing
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
        "select event_id, type, o.aggregate_id, version, occurred_at, attempts, last_error"
        " from kit.waiting w join kit.outbox o using (seq) where dead order by seq limit $1",
        limit,
    )
    return [DeadLetter(**dict(row)) for row in rows]


async def requeue(tx: Tx, actor: Actor, event_id: str) -> None:
    """Let the relay try again."""
    await _resolve(tx, "update kit.waiting w set dead = false, attempts = 0 from kit.outbox o", event_id)
    await audit.record(tx, actor, "dead_letters.requeue", event_id)
    tx.hint(subjects.OUTBOX)


async def discard(tx: Tx, actor: Actor, event_id: str) -> None:
    """Never publish it; its aggregate goes on without it. The log keeps it."""
    await _resolve(tx, "delete from kit.waiting w using kit.outbox o", event_id)
    await audit.record(tx, actor, "dead_letters.discard", event_id)
    tx.hint(subjects.OUTBOX)


async def _resolve(tx: Tx, change: str, event_id: str) -> None:
    resolved = await tx.fetchval(f"{change} where o.seq = w.seq and event_id = $1 and dead returning w.seq", event_id)
    if resolved is None:
        raise missing("dead letter", event_id, field="event_id")
