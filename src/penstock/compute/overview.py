"""Compute's part of what operators look at: who holds slots, and which allocations do not get on. Questions only."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.compute.store import sweeps
from penstock.compute.store.sweeps import Orphan
from penstock.kit.db import Reader

_STUCK: Final = """
select id, state, coalesce(nullif(failing, ''), reason) as reason, node_id, changed_at as since,
       deadline_at < clock_timestamp() as overdue
  from compute.allocations
 where ended_at is null and (state = 'release_failed'
    or deadline_at < clock_timestamp() - make_interval(secs => $1)
    or state = 'requested' and node_id is null and created_at < clock_timestamp() - make_interval(secs => $1))
 order by changed_at limit $2
"""
_UNITLESS: Final = """
select a.id, a.node_id, a.active_at as since from compute.allocations a
 where a.state = 'active' and a.active_at < clock_timestamp() - make_interval(secs => $1)
   and not exists (select 1 from fleet.units u where u.unit_id = a.unit_id and u.node_id = a.node_id)
 order by a.active_at limit $2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """An allocation that waits, is late, or could not be released."""

    id: str
    state: str
    reason: str
    node_id: str | None
    since: datetime
    overdue: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unitless:
    """An active allocation whose node reports no unit for it."""

    id: str
    node_id: str
    since: datetime


async def counts(conn: Reader) -> dict[str, int]:
    """Allocations that have not ended, by state."""
    rows = await conn.fetch(
        "select state, count(*) as n from compute.allocations where ended_at is null group by state order by state"
    )
    return {row["state"]: row["n"] for row in rows}


async def held_slots(conn: Reader) -> dict[str, str]:
    """Slot → node, of all slots that are held."""
    rows = await conn.fetch("select slot_id, node_id from compute.claims where released_at is null")
    return {row["slot_id"]: row["node_id"] for row in rows}


async def stuck(conn: Reader, *, after_s: float, limit: int) -> Sequence[Stuck]:
    """The longest ago first."""
    return [Stuck(**dict(row)) for row in await conn.fetch(_STUCK, after_s, limit)]


async def without_unit(conn: Reader, *, after_s: float, limit: int) -> Sequence[Unitless]:
    """Orphans of one kind: what is rented, and runs nowhere."""
    return [Unitless(**dict(row)) for row in await conn.fetch(_UNITLESS, after_s, limit)]


async def without_allocation(conn: Reader, *, after_s: float, limit: int) -> Sequence[Orphan]:
    """Orphans of the other kind: what runs, and belongs to nobody."""
    return await sweeps.orphans(conn, grace_s=after_s, limit=limit)
