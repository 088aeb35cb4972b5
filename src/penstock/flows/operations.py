"""The operators' pages over REST: the fleet at a glance, and what is stuck."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Final

from litestar import Router, get
from litestar.params import QueryParameter
from msgspec import Meta

from penstock.compute import overview as compute
from penstock.fleet import overview as fleet
from penstock.fleet.overview import Capacity, Load
from penstock.flows import problems
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader
from penstock.wire import rest

_NODES_MAX: Final = 2000


def router(db: Database) -> Router:
    """All of them, below /api/v1."""

    @get("/fleet/overview", operation_id="getFleetOverview")
    async def get_overview(
        caller: Caller,
        nodes_max: Annotated[int, Meta(ge=0, le=_NODES_MAX), QueryParameter(required=False)] = 200,
    ) -> rest.FleetOverview:
        """Nodes, GPUs and allocations now; operators only."""
        caller.require("fleet.read")
        async with db.read() as conn:
            return await overview(conn, nodes_max=nodes_max)

    @get("/fleet/problems", operation_id="listFleetProblems")
    async def list_problems(caller: Caller) -> rest.Page[rest.Problem]:
        """What does not get on by itself, why, and the command that repairs it; operators only."""
        caller.require("fleet.read")
        async with db.read() as conn:
            return rest.Page(items=await problems.find(conn))

    handlers: list[Any] = [get_overview, list_problems]
    return Router(path="/", route_handlers=handlers, tags=["fleet"])


async def overview(conn: Reader, *, nodes_max: int) -> rest.FleetOverview:
    """Gather it."""
    loads = await fleet.loads(conn)
    held = await compute.held_slots(conn)
    slots = await fleet.capacity(conn)
    by_node = _grouped(slots, lambda slot: slot.node_id)
    by_model = _grouped(slots, lambda slot: slot.model)
    return rest.FleetOverview(
        at=await conn.fetchval("select clock_timestamp()"),
        nodes=dict(Counter(load.state for load in loads)),
        gpus=[_count(model, of_model, held) for model, of_model in sorted(by_model.items())],
        allocations=await compute.counts(conn),
        node_list=[_node(load, by_node.get(load.id, []), held) for load in loads[:nodes_max]],
    )


def _grouped(slots: Sequence[Capacity], key: Callable[[Capacity], str]) -> dict[str, list[Capacity]]:
    found: dict[str, list[Capacity]] = {}
    for slot in slots:
        found.setdefault(key(slot), []).append(slot)
    return found


def _gpus(slots: Sequence[Capacity]) -> set[tuple[str, str]]:
    """The GPUs that these slots are, or are shares of."""
    return {(slot.node_id, slot.gpu_uuid) for slot in slots}


def _count(model: str, slots: Sequence[Capacity], held: Collection[str]) -> rest.GpuCount:
    free_slots = [slot for slot in slots if slot.usable and slot.slot_id not in held]
    used = _gpus([slot for slot in slots if slot.slot_id in held])
    total, free = _gpus(slots), _gpus(free_slots) - used
    return rest.GpuCount(
        model=model,
        total=len(total),
        used=len(used),
        free=len(free),
        unusable=len(total - used - free),
        slots_total=len(slots),
        slots_free=len(free_slots),
    )


def _node(load: Load, slots: Sequence[Capacity], held: Collection[str]) -> rest.NodeLoad:
    used = [slot for slot in slots if slot.slot_id in held]
    healthy = [slot for slot in slots if slot.healthy]
    return rest.NodeLoad(
        id=load.id,
        name=load.name,
        state=load.state,
        simulated=load.simulated,
        agent_version=load.agent_version,
        gpus_total=len(_gpus(slots)),
        gpus_used=len(_gpus(used)),
        gpus_unusable=len(_gpus(slots) - _gpus(healthy)),
        slots_total=len(slots),
        slots_used=len(used),
        units=load.units,
        heartbeat_age_s=load.heartbeat_age_s,
        release_at=load.release_at,
    )
