"""The rows of nodes. Only `move` writes a node's state: it compares the version and leaves the fact in the outbox."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import asyncpg

from penstock.fleet.errors import IllegalMove, NameTaken
from penstock.fleet.model import ANSWERING, FACTS, MOVES, WISHES, Node, NodeEvent, NodeState, fact_payload
from penstock.fleet.store.links import LinkKey
from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.errors import StaleRow
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id

_COLUMNS = (
    "n.id, n.name, n.state, n.state_reason, n.desired, n.version, n.gpus_approved, n.gpus_reported, n.simulated,"
    " n.production, n.serves_functions, n.agent_version, n.labels, n.created_at, n.release_at"
)
_SELECT = f"""
select {_COLUMNS}, h.at as last_heartbeat_at,
       (select max(not_after) from fleet.certificates c where c.node_id = n.id and c.revoked_at is null)
           as certificate_expires_at
  from fleet.nodes n left join fleet.heartbeats h on h.node_id = n.id
"""  # noqa: S608
_MOVE = f"""
with moved as (
    update fleet.nodes n
       set state = $3, desired = coalesce($4, desired), state_reason = $5, version = version + 1,
           state_changed_at = clock_timestamp()
     where id = $1 and version = $2
    returning {_COLUMNS}
), fact as (
    insert into kit.outbox ({outbox.COLUMNS})
    select $6, $7, id, version, null, null, $8, $9 from moved
)
select * from moved
"""  # noqa: S608
_INSERT = f"""
with made as (
    insert into fleet.nodes (id, name, state, gpus_approved) values ($1, $2, 'pending', $3) returning *
), fact as (
    insert into kit.outbox ({outbox.COLUMNS})
    select $4, 'fleet.node_registered', id, version, null, null, $5, $6 from made
)
select {_COLUMNS} from made n
"""  # noqa: S608


def _node(row: Row) -> Node:
    values: dict[str, Any] = dict(row)
    values |= {"state": NodeState(row["state"]), "desired": NodeState(row["desired"])}
    return Node(**values)


async def insert(tx: Tx, *, name: str, gpus_approved: int) -> Node:
    """A node that waits for its agent."""
    node_id = new_id("nod")
    payload = fact_payload(node_id, name, NodeState.PENDING, "")
    try:
        row = await tx.fetchrow(_INSERT, node_id, name, gpus_approved, new_id("evt"), correlation_id(), payload)
    except asyncpg.UniqueViolationError as error:
        raise NameTaken(f"there is a node with the name {name}", field="node_name") from error
    assert row is not None
    outbox.wake(tx)
    return _node(row)


async def find(conn: Reader, node_id: str) -> Node | None:
    """One node with its heartbeat and certificate."""
    row = await conn.fetchrow(f"{_SELECT} where n.id = $1", node_id)
    return _node(row) if row else None


async def lock(tx: Tx, node_id: str) -> Node | None:
    """One node, held until the transaction ends. Rows that refer to it may still be written meanwhile."""
    row = await tx.fetchrow(f"{_SELECT} where n.id = $1 for no key update of n", node_id)
    return _node(row) if row else None


async def lock_named(tx: Tx, name: str) -> Node | None:
    """The living node of this name, held until the transaction ends."""
    row = await tx.fetchrow(f"{_SELECT} where n.name = $1 and n.state <> 'retired' for no key update of n", name)
    return _node(row) if row else None


async def page(conn: Reader, *, after: str, state: NodeState | None, limit: int) -> list[Node]:
    """Nodes in the order of their making; retired ones only when asked for."""
    rows = await conn.fetch(
        f"{_SELECT} where n.id > $1 and n.state = coalesce($2, nullif(n.state, 'retired')) order by n.id limit $3",
        after,
        state,
        limit,
    )
    return [_node(row) for row in rows]


async def ids_in(conn: Reader, *states: NodeState) -> list[str]:
    """The nodes that are in one of these states."""
    rows = await conn.fetch("select id from fleet.nodes where state = any($1) order by id", list(states))
    return [row["id"] for row in rows]


async def set_release(tx: Tx, node_id: str, grace_s: int | None) -> None:
    """When a draining node's allocations are released; none forgets it."""
    await tx.execute(
        "update fleet.nodes set release_at = clock_timestamp() + make_interval(secs => $2) where id = $1",
        node_id,
        grace_s,
    )


async def draining(conn: Reader) -> list[tuple[str, datetime, bool]]:
    """(node, when its allocations are released, whether that time has come) of each node that drains."""
    rows = await conn.fetch(
        "select id, coalesce(release_at, clock_timestamp()) as at,"
        " coalesce(release_at <= clock_timestamp(), true) as due"
        " from fleet.nodes where state = 'draining' order by id"
    )
    return [(row["id"], row["at"], row["due"]) for row in rows]


async def silent_s(conn: Reader, node_id: str) -> float | None:
    """For how long the node has been in a state in which it is not expected to answer; none while it is."""
    return await conn.fetchval(
        "select extract(epoch from clock_timestamp() - state_changed_at)::float8 from fleet.nodes"
        " where id = $1 and state <> all($2)",
        node_id,
        list(ANSWERING),
    )


async def heard_at(conn: Reader, node_id: str) -> datetime | None:
    """When the node last named its units. One that only connected has not said whether they still run."""
    return await conn.fetchval("select coalesce(listed_at, at) from fleet.heartbeats where node_id = $1", node_id)


async def count_states(conn: Reader) -> dict[str, int]:
    """How many nodes are in each state."""
    rows = await conn.fetch("select state, count(*) as count from fleet.nodes group by state")
    return {row["state"]: row["count"] for row in rows}


async def set_approved(tx: Tx, node_id: str, gpus_approved: int) -> None:
    """How many GPUs of the node may be used."""
    await tx.execute("update fleet.nodes set gpus_approved = $2 where id = $1", node_id, gpus_approved)


async def move(tx: Tx, node: Node, event: NodeEvent, reason: str) -> Node:
    """Apply the event to the row as it was read, with its fact; StaleRow when another writer was first."""
    target = MOVES.get((node.state, event))
    if target is None:
        raise IllegalMove(f"a node that is {node.state} cannot {event.replace('_', ' ')}", node_id=node.id)
    row = await tx.fetchrow(
        _MOVE,
        node.id,
        node.version,
        target,
        WISHES.get(event),
        reason,
        new_id("evt"),
        FACTS[event],
        correlation_id(),
        fact_payload(node.id, node.name, target, reason),
    )
    if row is None:
        raise StaleRow("the node was changed at the same moment; try again", node_id=node.id)
    outbox.wake(tx)
    return _node(row)


async def describe(
    tx: Tx,
    node_id: str,
    *,
    agent_version: str,
    boot_id: str,
    production: bool,
    simulated: bool,
    driver_version: str,
    gpus_reported: int,
    serves_functions: bool,
) -> None:
    """What the node says of itself."""
    await tx.execute(
        "update fleet.nodes set agent_version = $2, boot_id = $3, production = $4, simulated = $5,"
        " driver_version = $6, gpus_reported = $7, serves_functions = $8 where id = $1",
        node_id,
        agent_version,
        boot_id,
        production,
        simulated,
        driver_version,
        gpus_reported,
        serves_functions,
    )


_SERVE = """
with said as (
    select n.id, s.serves
      from unnest($1::text[], $2::text[], $3::boolean[]) s(node_id, link_id, serves)
      join fleet.links l on l.node_id = s.node_id and l.link_id = s.link_id
      join fleet.nodes n on n.id = s.node_id
     where n.serves_functions <> s.serves order by n.id for no key update of n
)
update fleet.nodes n set serves_functions = said.serves from said where n.id = said.id
returning n.id, n.serves_functions
"""


async def serve(tx: Tx, said: Mapping[LinkKey, bool]) -> dict[str, bool]:
    """Whether functions' workers may run on the nodes of these links; returned are the nodes where that is new."""
    nodes, links = [key.node_id for key in said], [key.link_id for key in said]
    rows = await tx.fetch(_SERVE, nodes, links, list(said.values()))
    return {row["id"]: row["serves_functions"] for row in rows}


_SILENT = f"""
{_SELECT}
 where n.state = any($1) and coalesce(h.at, n.state_changed_at) < clock_timestamp() - make_interval(secs => $2)
 order by n.id limit $3 for no key update of n skip locked
"""
#: A fresh heartbeat alone does not bring a node back: it also needs a certificate that is still good, so that one
#: written in the moment of a revocation has no effect.
_BACK = f"""
{_SELECT}
 where n.state in ('unreachable', 'lost') and h.at > clock_timestamp() - make_interval(secs => $1)
   and exists (select 1 from fleet.certificates c
                where c.node_id = n.id and c.revoked_at is null and c.not_after > clock_timestamp())
 order by n.id limit $2 for no key update of n skip locked
"""  # noqa: S608


async def lock_silent(tx: Tx, states: list[NodeState], *, after_s: float, limit: int) -> list[Node]:
    """Nodes in these states whose last heartbeat is older than this."""
    return [_node(row) for row in await tx.fetch(_SILENT, states, after_s, limit)]


async def lock_back(tx: Tx, *, within_s: float, limit: int) -> list[Node]:
    """Nodes that were given up and answer again."""
    return [_node(row) for row in await tx.fetch(_BACK, within_s, limit)]


async def capacity_exceeded(tx: Tx, node: Node, *, reported: int) -> None:
    """Leave the fact that the node has more GPUs than were approved."""
    row = await tx.fetchrow("update fleet.nodes set version = version + 1 where id = $1 returning version", node.id)
    assert row is not None
    payload = {"node_id": node.id, "name": node.name, "reported": reported, "approved": node.gpus_approved}
    await outbox.append(
        tx,
        outbox.Event(
            type="fleet.node_capacity_exceeded",
            aggregate_id=node.id,
            version=row["version"],
            organisation_id=None,
            project_id=None,
            payload=payload,
        ),
    )
