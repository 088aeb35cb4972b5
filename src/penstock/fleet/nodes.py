"""What operators do with nodes, and what others ask about them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.fleet.errors import IllegalMove, NodeInUse
from penstock.fleet.model import ANSWERING, WISHES, Node, NodeEvent, NodeState
from penstock.fleet.ports import Claims
from penstock.fleet.store import certificates, links
from penstock.fleet.store import nodes as node_rows
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import missing
from penstock.wire import subjects

_GONE: Final = (NodeState.LOST, NodeState.RETIRED)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The operators' use cases. `claims` tells who holds slots."""

    claims: Claims

    async def cordon(self, tx: Tx, caller: Caller, node_id: str, reason: str) -> Node:
        """No new work; what runs goes on."""
        node = await _order(tx, caller, node_id, NodeEvent.CORDON, reason)
        await node_rows.set_release(tx, node_id, None)
        return node

    async def uncordon(self, tx: Tx, caller: Caller, node_id: str, reason: str) -> Node:
        """Take new work again."""
        node = await _order(tx, caller, node_id, NodeEvent.UNCORDON, reason)
        await node_rows.set_release(tx, node_id, None)
        return node

    async def drain(self, tx: Tx, caller: Caller, node_id: str, reason: str, *, grace_s: int = 0) -> Node:
        """No new work, and what runs should leave: by itself within the grace, else it is released. Draining again
        sets the time anew."""
        node = await _order(tx, caller, node_id, NodeEvent.DRAIN, reason)
        await node_rows.set_release(tx, node_id, grace_s)
        return node

    async def revoke(self, tx: Tx, caller: Caller, node_id: str, reason: str) -> Node:
        """Its certificates stop working and its links close; only a recovery token brings it back."""
        node = await _lock(tx, caller, node_id)
        moved = await node_rows.move(tx, node, NodeEvent.REVOKE, reason or "revoked")
        serials = await _cut_off(tx, node_id)
        await audit.record(tx, caller.actor, "nodes.revoke", node_id, detail={"reason": reason, "serials": serials})
        return moved

    async def retire(self, tx: Tx, caller: Caller, node_id: str, reason: str) -> Node:
        """The end of the node. A node that answers has to be empty first."""
        node = await _lock(tx, caller, node_id)
        held = await self.claims.holders(tx, [node_id])
        if held and node.state is not NodeState.LOST:
            raise NodeInUse(f"{len(held)} slots of the node are held; drain it first", node_id=node_id)
        moved = await node_rows.move(tx, node, NodeEvent.RETIRE, reason or "retired")
        serials = await _cut_off(tx, node_id)
        await audit.record(tx, caller.actor, "nodes.retire", node_id, detail={"reason": reason, "serials": serials})
        return moved


async def _order(tx: Tx, caller: Caller, node_id: str, event: NodeEvent, reason: str) -> Node:
    """Note the wish and follow it; the same order twice changes nothing."""
    node = await _lock(tx, caller, node_id)
    if node.state in (NodeState.PENDING, NodeState.ENROLLED, NodeState.RETIRED):
        raise IllegalMove(f"a node that is {node.state} cannot {event}", node_id=node_id)
    if node.desired is WISHES[event]:
        return node
    moved = await node_rows.move(tx, node, event, reason)
    await audit.record(tx, caller.actor, f"nodes.{event}", node_id, detail={"reason": reason})
    tx.hint(subjects.node(node_id))
    if event is NodeEvent.UNCORDON:
        tx.hint(subjects.CAPACITY)
    return moved


async def _lock(tx: Tx, caller: Caller, node_id: str) -> Node:
    caller.require("nodes.write")
    node = await node_rows.lock(tx, node_id)
    if node is None:
        raise missing("node", node_id)
    return node


async def _cut_off(tx: Tx, node_id: str) -> list[str]:
    await certificates.delete_tokens(tx, node_id)
    tx.hint(subjects.REVOKED, node_id.encode())
    return await certificates.revoke_all(tx, node_id)


async def find(conn: Reader, caller: Caller, node_id: str) -> Node:
    """One node, for an operator."""
    caller.require("nodes.read")
    node = await node_rows.find(conn, node_id)
    if node is None:
        raise missing("node", node_id)
    return node


async def page(conn: Reader, caller: Caller, *, after: str, state: NodeState | None, limit: int) -> list[Node]:
    """Nodes in the order of their making, for an operator; retired ones only when asked for."""
    caller.require("nodes.read")
    return await node_rows.page(conn, after=after, state=state, limit=limit)


@dataclass(frozen=True, slots=True)
class Lost:
    """A lost node, held until the transaction ends. Its units were last known to run at `heard_at`."""

    heard_at: datetime | None


async def hold_lost(tx: Tx, node_id: str) -> Lost | None:
    """The node, unless it is back: it cannot come back before the transaction ends."""
    node = await node_rows.lock(tx, node_id)
    if node is None or node.state not in _GONE:
        return None
    return Lost(await node_rows.heard_at(tx, node_id))


async def answering(conn: Reader) -> list[str]:
    """Nodes that answer, as far as is known."""
    return await node_rows.ids_in(conn, *ANSWERING)


async def silent_for(conn: Reader, node_id: str, *, longer_than_s: float) -> bool:
    """Whether the node has not answered for longer than this."""
    silent_s = await node_rows.silent_s(conn, node_id)
    return silent_s is not None and silent_s > longer_than_s


async def lost(conn: Reader) -> list[str]:
    """Nodes that were given up, revoked or retired: nothing on them can be stopped or proved."""
    return await node_rows.ids_in(conn, *_GONE)


async def retired(conn: Reader) -> list[str]:
    """Nodes that are no more, and their slots with them: there is nothing left to prove."""
    return await node_rows.ids_in(conn, NodeState.RETIRED)


async def draining(conn: Reader) -> list[tuple[str, datetime, bool]]:
    """(node, when its allocations are released, whether that time has come) of each node that drains."""
    return await node_rows.draining(conn)


async def gateway_of(conn: Reader, node_id: str) -> str | None:
    """The address of the gateway that holds the node's sockets."""
    return await links.find_gateway(conn, node_id)
