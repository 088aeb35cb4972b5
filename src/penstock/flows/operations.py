"""The operators' pages over REST: the fleet at a glance, and what is stuck."""

from collections import Counter
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
    used = Counter(held.values())
    return rest.FleetOverview(
        at=await conn.fetchval("select clock_timestamp()"),
        nodes=dict(Counter(load.state for load in loads)),
        gpus=_by_model(await fleet.capacity(conn), held),
        allocations=await compute.counts(conn),
        node_list=[_node(load, used[load.id]) for load in loads[:nodes_max]],
    )


def _by_model(slots: list[Capacity], held: dict[str, str]) -> list[rest.GpuCount]:
    found: dict[str, Counter[str]] = {}
    for slot in slots:
        kind = "used" if slot.slot_id in held else "free" if slot.usable else "unusable"
        found.setdefault(slot.model, Counter())[kind] += 1
    return [
        rest.GpuCount(
            model=model, total=count.total(), used=count["used"], free=count["free"], unusable=count["unusable"]
        )
        for model, count in sorted(found.items())
    ]


def _node(load: Load, used: int) -> rest.NodeLoad:
    return rest.NodeLoad(
        id=load.id,
        name=load.name,
        state=load.state,
        simulated=load.simulated,
        agent_version=load.agent_version,
        gpus_total=load.gpus_total,
        gpus_used=used,
        gpus_unusable=load.gpus_unusable,
        units=load.units,
        heartbeat_age_s=load.heartbeat_age_s,
        release_at=load.release_at,
    )
