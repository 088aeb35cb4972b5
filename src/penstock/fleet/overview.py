"""The fleet's part of what operators look at: load by node, capacity by model, and what is wrong with nodes, slots and
tasks. Questions only; nothing here changes a row."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.kit.db import Reader

_LOADS: Final = """
select n.id, n.name, n.state, n.simulated, n.agent_version, n.release_at,
       extract(epoch from clock_timestamp() - h.at)::float8 as heartbeat_age_s,
       coalesce(u.units, 0) as units
  from fleet.nodes n
  left join fleet.heartbeats h on h.node_id = n.id
  left join (
      select node_id, count(*)::int as units from fleet.unit_reports where state <> 'gone' group by node_id
  ) u on u.node_id = n.id
 where n.state <> 'retired'
 order by n.state = 'ready', n.name
"""
_SLOTS_THERE: Final = """
select s.id as slot_id, s.node_id, s.whole_uuid as gpu_uuid, s.gpu_model as model, s.health = 'healthy' as healthy,
       n.state = 'ready' and s.health = 'healthy' as usable
  from fleet.slots s join fleet.nodes n on n.id = s.node_id
 where s.health <> 'missing' and n.state <> 'retired'
"""
_NODES: Final = """
select n.id, n.name, n.state, n.state_reason as reason, n.state_changed_at as since,
       (select max(not_after) from fleet.certificates c where c.node_id = n.id and c.revoked_at is null) as expires_at,
       h.skew_s, case when n.state in ('ready', 'cordoned', 'draining') then h.trouble else '' end as trouble
  from fleet.nodes n left join fleet.heartbeats h on h.node_id = n.id
 where n.state in ('unreachable', 'lost')
    or n.state in ('pending', 'enrolled') and n.state_changed_at < clock_timestamp() - interval '15 minutes'
    or abs(h.skew_s) > $1
    or h.trouble <> '' and n.state in ('ready', 'cordoned', 'draining')
 order by n.state_changed_at limit $2
"""
_SLOTS: Final = """
select s.id, s.node_id, s.gpu_uuid, s.health, q.since,
       case when s.blocked then s.blocked_reason else coalesce(q.detail, s.gpu_detail) end as reason
  from fleet.slots s join fleet.nodes n on n.id = s.node_id
  left join fleet.gpu_quarantines q
    on s.health = 'quarantined' and q.node_id = s.node_id and q.gpu_uuid = s.whole_uuid and q.returned_at is null
 where s.health <> 'healthy' and n.state <> 'retired' order by s.node_id, s.gpu_index limit $1
"""
_TASKS: Final = """
select t.id, t.node_id, t.type, t.state, t.attempts, t.created_at as since
  from fleet.tasks t join fleet.nodes n on n.id = t.node_id
 where t.state in ('queued', 'leased') and n.state in ('ready', 'cordoned', 'draining')
   and t.created_at < clock_timestamp() - make_interval(secs => $1)
 order by t.seq limit $2
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A node and how busy it is."""

    id: str
    name: str
    state: str
    simulated: bool
    agent_version: str
    release_at: datetime | None
    heartbeat_age_s: float | None
    units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SickNode:
    """A node that does not answer, never did, begins nothing new, or whose clock is off."""

    id: str
    name: str
    state: str
    reason: str
    since: datetime
    expires_at: datetime | None
    skew_s: float | None
    trouble: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SickSlot:
    """A slot that may not be used."""

    id: str
    node_id: str
    gpu_uuid: str
    health: str
    since: datetime | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OldTask:
    """A task that its node, which answers, has not answered."""

    id: str
    node_id: str
    type: str
    state: str
    attempts: int
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A slot for the counts by node and by model. `gpu_uuid` is the GPU that it is, or is a share of."""

    slot_id: str
    node_id: str
    gpu_uuid: str
    model: str
    healthy: bool
    usable: bool


async def loads(conn: Reader) -> list[Load]:
    """All nodes that are not retired; those that are not ready first."""
    return [Load(**dict(row)) for row in await conn.fetch(_LOADS)]


async def capacity(conn: Reader) -> list[Capacity]:
    """Every slot that is there."""
    return [Capacity(**dict(row)) for row in await conn.fetch(_SLOTS_THERE)]


async def sick_nodes(conn: Reader, *, skew_max_s: float, limit: int) -> list[SickNode]:
    """The longest ago first."""
    return [SickNode(**dict(row)) for row in await conn.fetch(_NODES, skew_max_s, limit)]


async def sick_slots(conn: Reader, *, limit: int) -> list[SickSlot]:
    """By node and GPU."""
    return [SickSlot(**dict(row)) for row in await conn.fetch(_SLOTS, limit)]


async def old_tasks(conn: Reader, *, older_than_s: float, limit: int) -> list[OldTask]:
    """The oldest first."""
    return [OldTask(**dict(row)) for row in await conn.fetch(_TASKS, older_than_s, limit)]
