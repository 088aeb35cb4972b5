"""A worker on the real Temporal with a node that is played, for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle

from integration.compute.stage import World, someone
from integration.flows.fakenode import FakeNode
from penstock.compute.model import AT_REST, Allocation, Deadlines, Limits, State
from penstock.compute.service import runtimes
from penstock.compute.service.advance import Advance
from penstock.compute.service.watch import Patience, Watch
from penstock.fleet import pki, slots
from penstock.fleet.model import Config
from penstock.fleet.pki import TaskSigner
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.flows import hosting
from penstock.flows.activities import Activities, Timing
from penstock.flows.allocation import workflow_id
from penstock.flows.handoffs import Answers, Handoffs
from penstock.flows.outcomes import Outcomes
from penstock.flows.reconcile import SagaKeeper
from penstock.flows.sagas import Sagas
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.wire.rest import RuntimePut

LIMITS = Limits(deadlines=Deadlines(requested_s=30, provisioning_s=20, releasing_s=20))
#: Small, so that lost things are found within a test.
PATIENCE = Patience(fresh_s=0.2, idle_s=1.5, stuck_s=60, report_s=1, retry_s=1)
TIMING = Timing(start_s=10, stop_s=1, silence_s=1, take_s=1)


@dataclass
class Cloud:
    """Everything between the request and the node."""

    world: World
    node: FakeNode
    sagas: Sagas
    activities: Activities
    client: Client
    keeper: SagaKeeper
    watch: Watch
    tasks: Tasks

    async def create(self, **body: Any) -> Allocation:
        """Ask for an allocation."""
        return await self.world.create(**body)

    async def runtime(self) -> str:
        """The name of an environment of the project."""
        lock = f"tiny==1.0 --hash=sha256:{'a' * 64}"
        recipe = await runtimes.check(someone(), RuntimePut(lock=lock))
        async with self.world.db.transaction() as tx:
            return (await runtimes.put(tx, someone(), "vision", recipe)).name

    async def settle(self, allocation_id: str, *, timeout_s: float = 20) -> Allocation:
        """Its row once it is at rest."""
        return await self.until(allocation_id, lambda row: row.state in AT_REST, timeout_s=timeout_s)

    async def until(
        self, allocation_id: str, true: Callable[[Allocation], bool], *, timeout_s: float = 20
    ) -> Allocation:
        """Its row once this holds."""
        async with asyncio.timeout(timeout_s):
            while not true(row := await self.world.row(allocation_id)):
                await asyncio.sleep(0.02)
        return row

    async def active(self, **body: Any) -> Allocation:
        """An allocation that runs."""
        row = await self.settle((await self.create(**body)).id)
        assert row.state is State.ACTIVE, row
        return row

    def saga(self, allocation_id: str) -> "WorkflowHandle[Any, Any]":
        """Its newest saga."""
        return self.client.get_workflow_handle(workflow_id(allocation_id))

    async def slot_healths(self) -> set[str]:
        """Which healths slots have."""
        async with self.world.db.read() as conn:
            return {row["health"] for row in await conn.fetch("select health from fleet.slots")}


@asynccontextmanager
async def cloud_on(
    database: Database,
    bus: Bus,
    temporal_address: str,
    folder: Path,
    *,
    wrap: Callable[[Sequence[Callable[..., Any]]], Sequence[Callable[..., Any]]] = lambda known: known,
    limits: Limits = LIMITS,
    timing: Timing = TIMING,
    node: FakeNode | None = None,
) -> AsyncIterator[Cloud]:
    """A cloud with one node. `wrap` may put something between the saga and its activities."""
    pki.init(folder, ["127.0.0.1"])
    async with AsyncExitStack() as stack:
        outcomes, sagas, tasks = Outcomes(), Sagas(), Tasks(TaskSigner.load(folder))
        world = World(database, limits, handoffs=Handoffs(tasks, timing.start_s))
        node = node or FakeNode(database, await world.add_node(8))
        node.handoffs = Answers(Advance(slots, limits))
        await stack.enter_async_context(node.running(bus))
        await outcomes.watch(bus)
        await sagas.watch(bus)
        activities = Activities(database, Advance(slots, limits), tasks, outcomes, timing)
        client = sagas.client = await Client.connect(temporal_address)
        await stack.enter_async_context(hosting.build(client, wrap(activities.all())))
        watch = Watch(database, PATIENCE)
        keeper = SagaKeeper(watch, sagas)
        for work in (keeper.undriven, keeper.overdue, Sweeper(database, Config()).sweep_tasks):
            stack.callback(asyncio.create_task(_forever(work)).cancel)
        yield Cloud(world, node, sagas, activities, client, keeper, watch, tasks)


async def _forever(work: Callable[[], Any]) -> None:
    while True:
        await work()
        await asyncio.sleep(0.2)
