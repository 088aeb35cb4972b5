"""Consumers are idempotent: an event's row here is written in the transaction of its effect.

Order is told by the aggregate's version: repeats and regressions are skipped, a gap asks the consumer to wait.
"""

from enum import StrEnum

from penstock.kit.db import Tx


class Verdict(StrEnum):
    """What to do with an event that arrived."""

    APPLY = "apply"
    DUPLICATE = "duplicate"
    STALE = "stale"
    GAP = "gap"


async def accept(tx: Tx, *, consumer: str, aggregate_id: str, version: int, event_id: str) -> Verdict:
    """Judge the event and, if it is the aggregate's next, remember it. The first ever seen may have any version."""
    row = await tx.fetchrow(
        "select version, event_id from kit.inbox where consumer = $1 and aggregate_id = $2 for update",
        consumer,
        aggregate_id,
    )
    if row is not None and row["event_id"] == event_id:
        return Verdict.DUPLICATE
    if row is not None and version <= row["version"]:
        return Verdict.STALE
    if row is not None and version > row["version"] + 1:
        return Verdict.GAP
    await tx.execute(
        "insert into kit.inbox (consumer, aggregate_id, version, event_id) values ($1, $2, $3, $4)"
        " on conflict (consumer, aggregate_id) do update"
        " set version = excluded.version, event_id = excluded.event_id, applied_at = now()",
        consumer,
        aggregate_id,
        version,
        event_id,
    )
    return Verdict.APPLY
