"""The REST routes of the fleet. Nodes are for operators; only enrolment is public, and its token is the credential."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from litestar import Response, Router, get, post
from litestar.params import QueryParameter

from penstock.fleet import gpus, nodes, schemas, slots, tasks
from penstock.fleet.enrolment import Enrolment
from penstock.fleet.errors import SecretShownBefore
from penstock.fleet.model import Node, NodeState, Slot
from penstock.fleet.nodes import Nodes
from penstock.fleet.ports import Claims
from penstock.kit import http, idempotency, paging, sealing
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Invalid
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.wire import rest

_SEQ_MAX: Final = (1 << 63) - 1


def router(enrolment: Enrolment, claims: Claims, db: Database) -> Router:
    """All routes of the fleet."""
    return Router(
        path="/",
        tags=["fleet"],
        route_handlers=[
            *_enrolment(enrolment, db),
            *_reading(claims, db),
            *_orders(Nodes(claims), claims, db),
            *_slots(claims, db),
            *_gpus(claims, db),
        ],
    )


async def _show(conn: Reader, claims: Claims, found: Sequence[Node], *, with_gpus: bool) -> list[rest.Node]:
    ids = [node.id for node in found]
    own = {node_id: [] for node_id in ids}
    for slot in await slots.of_nodes(conn, ids):
        own[slot.node_id].append(slot)
    holders = await claims.holders(conn, ids)
    conditions = await gpus.conditions(conn, ids) if with_gpus else None
    return [schemas.node(node, own[node.id], holders, conditions) for node in found]


def _enrolment(enrolment: Enrolment, db: Database) -> list[Any]:
    @post("/enrolments", operation_id="enrolNode", opt={"public": True})
    async def enrol(data: rest.EnrolRequest) -> rest.Enrolled:
        """Exchange an enrolment or recovery token for a node's certificate. The token is the credential."""
        async with db.transaction() as tx:
            return await enrolment.enrol(tx, token=data.token, node_name=data.node_name, csr_pem=data.csr_pem)

    @post("/nodes/enrolment-tokens", operation_id="createEnrolmentToken", opt={"action": "nodes.write"})
    async def create_token(
        caller: Caller, once: Once | None, credential: str, data: rest.EnrolmentTokenCreate
    ) -> Response[rest.EnrolmentToken]:
        """A token that lets a host become the node of this name: once, within ten minutes."""

        async def make(tx: Tx) -> rest.EnrolmentToken:
            return await enrolment.create_token(tx, caller, node_name=data.node_name, gpus_approved=data.gpus_approved)

        return await _token(db, once, credential, make)

    @post("/nodes/{node_id:str}/recovery-tokens", operation_id="createRecoveryToken", opt={"action": "nodes.write"})
    async def create_recovery_token(
        caller: Caller, once: Once | None, credential: str, node_id: str
    ) -> Response[rest.EnrolmentToken]:
        """A token that gives a host this node's identity anew, and takes it from whoever had it."""
        checked = http.path_id("nod", node_id)

        async def make(tx: Tx) -> rest.EnrolmentToken:
            return await enrolment.create_recovery_token(tx, caller, checked)

        return await _token(db, once, credential, make)

    return [enrol, create_token, create_recovery_token]


async def _token(
    db: Database, once: Once | None, credential: str, make: Callable[[Tx], Awaitable[rest.EnrolmentToken]]
) -> Response[rest.EnrolmentToken]:
    """Show the token; what is kept for a repeat of the request holds it sealed under the caller's own credential."""

    async def effect(tx: Tx) -> bytes:
        made = await make(tx)
        sealed = msgspec.structs.replace(
            made,
            token=sealing.seal(made.token, credential=credential),
            command=sealing.seal(made.command, credential=credential),
        )
        return msgspec.json.encode(sealed)

    kept = msgspec.json.decode(await idempotency.run(db, once, effect), type=rest.EnrolmentToken)
    token = sealing.unseal(kept.token, credential=credential)
    command = sealing.unseal(kept.command, credential=credential)
    if token is None or command is None:
        raise SecretShownBefore("this token was made by an earlier call with another credential")
    return http.created(msgspec.json.encode(msgspec.structs.replace(kept, token=token, command=command)))


def _reading(claims: Claims, db: Database) -> list[Any]:
    @get("/nodes", operation_id="listNodes")
    async def list_nodes(
        caller: Caller,
        page: PageQuery,
        node_state: Annotated[
            str | None,
            QueryParameter(
                name="state",
                required=False,
                enum=list(NodeState),
                description="Only nodes in this state; without it, all but retired ones.",
            ),
        ] = None,
    ) -> rest.Page[rest.Node]:
        """Nodes in the order of their making, without their GPUs."""
        after = str(_position(page, "nodes", first=""))
        async with db.read() as conn:
            found = await nodes.page(conn, caller, after=after, state=_state(node_state), limit=page.limit + 1)
            shown = await _show(conn, claims, found[: page.limit], with_gpus=False)
        more = len(found) > page.limit
        return rest.Page(items=shown, next_cursor=paging.encode_cursor("nodes", shown[-1].id) if more else None)

    @get("/nodes/{node_id:str}", operation_id="getNode")
    async def get_node(caller: Caller, node_id: str) -> rest.Node:
        """One node with its GPUs."""
        async with db.read() as conn:
            found = await nodes.find(conn, caller, http.path_id("nod", node_id))
            return (await _show(conn, claims, [found], with_gpus=True))[0]

    @get("/nodes/{node_id:str}/tasks", operation_id="listNodeTasks")
    async def list_tasks(caller: Caller, node_id: str, page: PageQuery) -> rest.Page[rest.Task]:
        """The node's tasks, the newest first."""
        before = _position(page, "tasks", first=_SEQ_MAX)
        if not isinstance(before, int) or not 0 <= before <= _SEQ_MAX:
            raise Invalid("invalid cursor", field="cursor")
        async with db.read() as conn:
            found = await tasks.page(conn, caller, http.path_id("nod", node_id), before=before, limit=page.limit + 1)
        shown = [schemas.task(task) for task in found[: page.limit]]
        more = len(found) > page.limit
        last = found[page.limit - 1].seq if more else 0
        return rest.Page(items=shown, next_cursor=paging.encode_cursor("tasks", last) if more else None)

    return [list_nodes, get_node, list_tasks]


def _state(text: str | None) -> NodeState | None:
    if text is None:
        return None
    try:
        return NodeState(text)
    except ValueError as error:
        raise Invalid(f"state: one of {', '.join(NodeState)}", field="state") from error


def _position(page: PageQuery, kind: str, *, first: str | int) -> str | int:
    """Where the page begins; a cursor of another list is refused."""
    if page.cursor is None:
        return first
    parts = paging.decode_cursor(page.cursor)
    if len(parts) != 2 or parts[0] != kind:
        raise Invalid("invalid cursor", field="cursor")
    return parts[1]


def _orders(orders: Nodes, claims: Claims, db: Database) -> list[Any]:
    async def follow(
        order: Callable[[Tx, Caller, str, str], Awaitable[Node]],
        caller: Caller,
        node_id: str,
        data: rest.NodeStateChange,
    ) -> rest.Node:
        async with db.transaction() as tx:
            moved = await order(tx, caller, http.path_id("nod", node_id), data.reason)
        async with db.read() as conn:
            found = await nodes.find(conn, caller, moved.id)
            return (await _show(conn, claims, [found], with_gpus=True))[0]

    @post("/nodes/{node_id:str}/cordon", operation_id="cordonNode", opt={"action": "nodes.write"}, status_code=200)
    async def cordon(caller: Caller, node_id: str, data: rest.NodeStateChange) -> rest.Node:
        """Give the node no new work; what runs goes on."""
        return await follow(orders.cordon, caller, node_id, data)

    @post("/nodes/{node_id:str}/uncordon", operation_id="uncordonNode", opt={"action": "nodes.write"}, status_code=200)
    async def uncordon(caller: Caller, node_id: str, data: rest.NodeStateChange) -> rest.Node:
        """Give the node new work again."""
        return await follow(orders.uncordon, caller, node_id, data)

    @post("/nodes/{node_id:str}/drain", operation_id="drainNode", opt={"action": "nodes.write"}, status_code=200)
    async def drain(caller: Caller, node_id: str, data: rest.NodeDrain) -> rest.Node:
        """Give the node no new work and let what runs leave: by itself within the grace, else it is released."""
        return await follow(partial(orders.drain, grace_s=data.grace_s), caller, node_id, data)

    @post("/nodes/{node_id:str}/revoke", operation_id="revokeNode", opt={"action": "nodes.write"}, status_code=200)
    async def revoke(caller: Caller, node_id: str, data: rest.NodeStateChange) -> rest.Node:
        """Revoke the node's certificates; its connections end within seconds."""
        return await follow(orders.revoke, caller, node_id, data)

    @post("/nodes/{node_id:str}/retire", operation_id="retireNode", opt={"action": "nodes.write"}, status_code=200)
    async def retire(caller: Caller, node_id: str, data: rest.NodeStateChange) -> rest.Node:
        """End the node's life for good. A node that answers has to be empty."""
        return await follow(orders.retire, caller, node_id, data)

    return [cordon, uncordon, drain, revoke, retire]


def _slots(claims: Claims, db: Database) -> list[Any]:
    @post(
        "/nodes/{node_id:str}/slots/{slot_id:str}/force-cleanup",
        operation_id="forceSlotCleanup",
        opt={"action": "nodes.write"},
        status_code=200,
    )
    async def force_cleanup(caller: Caller, node_id: str, slot_id: str, data: rest.SlotCleanup) -> rest.NodeGpu:
        """Give back a slot whose cleanup could not be proved, after somebody has looked at the node."""
        async with db.transaction() as tx:
            slot = await slots.force_cleanup(
                tx,
                caller,
                claims,
                node_id=http.path_id("nod", node_id),
                slot_id=http.path_id("slt", slot_id),
                runtime_verified_absent=data.runtime_verified_absent,
                reason=data.reason,
            )
            return schemas.gpu(slot, {}, await gpus.conditions(tx, [slot.node_id]))

    return [force_cleanup]


def _gpus(claims: Claims, db: Database) -> list[Any]:
    async def show(tx: Tx, slot: Slot) -> rest.NodeGpu:
        holders = await claims.holders(tx, [slot.node_id])
        return schemas.gpu(slot, holders, await gpus.conditions(tx, [slot.node_id]))

    @post(
        "/nodes/{node_id:str}/slots/{slot_id:str}/quarantine",
        operation_id="quarantineGpu",
        opt={"action": "nodes.write"},
        status_code=200,
    )
    async def quarantine(caller: Caller, node_id: str, slot_id: str, data: rest.GpuQuarantineOrder) -> rest.NodeGpu:
        """Take the GPU of a slot, with all its shares, out of service until it is asked back and a probe passes."""
        async with db.transaction() as tx:
            slot = await gpus.quarantine(
                tx,
                caller,
                node_id=http.path_id("nod", node_id),
                slot_id=http.path_id("slt", slot_id),
                reason=data.reason,
                drain=data.drain,
            )
            return await show(tx, slot)

    @post("/nodes/{node_id:str}/slots/{slot_id:str}/return", operation_id="returnGpu", status_code=202)
    async def return_(caller: Caller, node_id: str, slot_id: str) -> rest.NodeGpu:
        """Have a quarantined GPU probed. It returns when the probe passes and its node reports it healthy."""
        async with db.transaction() as tx:
            slot = await gpus.ask_return(
                tx, caller, node_id=http.path_id("nod", node_id), slot_id=http.path_id("slt", slot_id)
            )
            return await show(tx, slot)

    return [quarantine, return_]
