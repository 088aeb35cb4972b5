"""Deletes what has served its time, in small batches: published events and idempotency keys. Audit rows stay for ever.

Unpublished events and dead letters are never deleted, however old. Several processes may sweep at once.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from penstock.kit.db import Database

BATCH: Final = 1000
_BATCHES_MAX: Final = 1000

# Walks in order of seq and stops at the first batch that reaches into the time to keep: no index on a time is needed.
_EVENTS: Final = """
with span as (
    select seq, occurred_at from kit.outbox where seq > $1 order by seq limit $3
), gone as (
    delete from kit.outbox where seq in (
        select seq from span where occurred_at < now() - $2::interval except select seq from kit.waiting
    ) returning 1
)
select (select count(*) from gone) as deleted, max(seq) as last, max(occurred_at) < now() - $2::interval as more
  from span
"""
_KEYS: Final = """
with gone as (
    delete from kit.idempotency where ctid in (
        select ctid from kit.idempotency where created_at < now() - $1::interval limit $2 for update skip locked
    ) returning 1
)
select count(*) from gone
"""


@dataclass(frozen=True, slots=True)
class Swept:
    """How many rows one sweep deleted."""

    events: int
    idempotency_keys: int


async def sweep(db: Database, *, events: timedelta, idempotency_keys: timedelta) -> Swept:
    """Delete published events and idempotency keys that are older than this."""
    return Swept(await _sweep_events(db, events), await _sweep_keys(db, idempotency_keys))


async def _sweep_events(db: Database, keep: timedelta) -> int:
    deleted, after = 0, 0
    for _ in range(_BATCHES_MAX):
        async with db.read() as conn:
            row = await conn.fetchrow(_EVENTS, after, keep, BATCH)
        assert row is not None
        deleted += row["deleted"]
        if not row["more"]:
            break
        after = row["last"]
    return deleted


async def _sweep_keys(db: Database, keep: timedelta) -> int:
    deleted = 0
    for _ in range(_BATCHES_MAX):
        async with db.read() as conn:
            batch = await conn.fetchval(_KEYS, keep, BATCH)
        deleted += batch
        if batch < BATCH:
            break
    return deleted
