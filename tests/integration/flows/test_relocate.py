"""A unit that its node never took goes to another, once, within the same create; nothing is charged or held twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from integration.flows.fakenode import Answer, FakeNode
from integration.flows.stage import Cloud
from integration.flows.test_handoff import ready_stock
from penstock.compute.model import State
from penstock.compute.service.advance import Advance
from penstock.compute.service.release import Release
from penstock.fleet import slots
from penstock.flows.handoffs import Answers
from penstock.flows.reconcile import NodeKeeper
from penstock.kit.bus import Bus
from penstock.wire import subjects
from penstock.wire.tasks import UNIT_START, Outcome, TaskBody


@asynccontextmanager
async def another(cloud: Cloud, bus: Bus, *, deaf: bool = False, gpus: int = 8) -> AsyncIterator[FakeNode]:
    """One more node that answers, or does not."""
    node = FakeNode(cloud.world.db, await cloud.world.add_node(gpus), deaf=deaf)
    node.handoffs = Answers(Advance(slots, cloud.world.limits))
    async with node.running(bus):
        yield node


async def test_a_unit_that_its_node_never_took_is_placed_on_another(cloud: Cloud, nats_bus: Bus) -> None:
    cloud.node.deaf = True
    made = await cloud.create()
    assert made.node_id == cloud.node.node_id
    async with another(cloud, nats_bus) as other:
        row = await cloud.settle(made.id)
        assert (row.state, row.node_id, row.relocations) == (State.ACTIVE, other.node_id, 1)
        held = await cloud.world.value("select count(*) from compute.claims where released_at is null")
        assert held == 1
        assert await cloud.slot_healths() == {"healthy"}
        assert "did not take" in row.timeline[-2].reason
        cloud.node.deaf = False
        await cloud.world.release(made.id)
        assert (await cloud.settle(made.id)).state is State.RELEASED
        assert other.effects == [("start", row.unit_id), ("stop", row.unit_id)]
    assert cloud.node.effects == [], "the node that came back ran what was not its own any more"


async def test_a_unit_that_was_sent_stays(cloud: Cloud, nats_bus: Bus) -> None:
    """Nobody knows whether a node that was asked has started it: a second one could run beside it."""
    cloud.node.deaf = True
    made = await cloud.create()
    await cloud.until(made.id, lambda row: row.state is State.PROVISIONING)
    await _until_dispatched(cloud, made.id)
    async with cloud.world.db.transaction() as tx:
        await tx.execute("update fleet.tasks set attempts = 1 where allocation_id = $1", made.id)
    async with another(cloud, nats_bus) as other:
        row = await cloud.settle(made.id, timeout_s=40)
    assert (row.state, row.relocations, other.effects) == (State.FAILED, 0, [])


async def test_a_build_that_was_sent_to_a_node_that_fell_silent_goes_elsewhere(cloud: Cloud, nats_bus: Bus) -> None:
    """Nothing of a tenant's runs in a build: that another node does it too harms nobody."""
    begun, never = asyncio.Event(), asyncio.Event()

    async def hold(body: TaskBody) -> Answer | None:
        begun.set()
        await never.wait()
        return None

    cloud.node.before = hold
    made = await cloud.create(runtime=await cloud.runtime())
    await begun.wait()
    async with another(cloud, nats_bus) as other:
        await asyncio.sleep(2.5)
        assert (await cloud.world.row(made.id)).relocations == 0, "the node answers, and builds"
        async with cloud.world.db.transaction() as tx:
            await tx.execute(
                "update fleet.heartbeats set at = now() - interval '16 s' where node_id = $1", cloud.node.node_id
            )
        row = await cloud.settle(made.id)
        assert (row.state, row.node_id, row.relocations) == (State.ACTIVE, other.node_id, 1)
        assert other.effects == [("build", made.runtime), ("start", row.unit_id)]
        assert await cloud.world.value("select count(*) from compute.claims where released_at is null") == 1
        assert await cloud.slot_healths() == {"healthy"}
        # The first node comes back with its answer, which is nobody's any more.
        never.set()
        await asyncio.sleep(0.5)
        row = await cloud.world.row(made.id)
    assert (row.state, row.node_id) == (State.ACTIVE, other.node_id)
    assert ("start", row.unit_id) not in cloud.node.effects


async def test_without_room_elsewhere_the_node_keeps_the_unit_and_may_come_back(cloud: Cloud, nats_bus: Bus) -> None:
    cloud.node.deaf = True
    async with another(cloud, nats_bus, gpus=1):
        made = await cloud.create(gpus=2)
        await _until_dispatched(cloud, made.id)
        await cloud.until(made.id, lambda row: row.state is State.PROVISIONING)
        await asyncio.sleep(2.5)
        cloud.node.deaf = False
        row = await cloud.settle(made.id)
    assert (row.state, row.node_id, row.relocations) == (State.ACTIVE, cloud.node.node_id, 0)


async def test_after_several_nodes_it_fails_and_says_how_many(cloud: Cloud, nats_bus: Bus) -> None:
    cloud.node.deaf = True
    made = await cloud.create()
    async with (
        another(cloud, nats_bus, deaf=True),
        another(cloud, nats_bus, deaf=True),
        another(cloud, nats_bus, deaf=True),
        another(cloud, nats_bus, deaf=True),
    ):
        row = await cloud.settle(made.id, timeout_s=60)
    assert (row.state, row.relocations) == (State.FAILED, 3)
    assert "3 other nodes before it did not take it" in row.reason
    assert await cloud.world.held() == []


async def test_stock_on_a_node_that_died_is_left_there_and_its_slot_comes_back_by_proof(
    cloud: Cloud, nats_bus: Bus
) -> None:
    (stock,) = await ready_stock(cloud, 1)
    cloud.node.deaf = True
    made = await cloud.create()
    assert made.stock_id == stock.id
    async with another(cloud, nats_bus) as other:
        row = await cloud.settle(made.id)
        assert (row.state, row.node_id, row.stock_id, row.unit_id) == (State.ACTIVE, other.node_id, None, row.id)
        assert other.effects == [("start", row.unit_id)]
        assert await cloud.slot_healths() == {"healthy", "cleanup_blocked"}
        cloud.node.deaf = False
        keeper = NodeKeeper(cloud.world.db, cloud.watch, Release(cloud.world.limits), cloud.tasks)
        async with asyncio.timeout(20):
            while await cloud.slot_healths() != {"healthy"}:
                await keeper.blocked_slots()
                await asyncio.sleep(0.1)
    assert cloud.node.effects == [("start", stock.unit_id), ("stop", stock.unit_id)]
    assert cloud.node.tenants == {}


async def test_a_failure_is_told_at_once(cloud: Cloud, nats_bus: Bus) -> None:
    """An activator that hears it takes the worker's callers up again; otherwise it looks every half minute."""
    told: list[State] = []

    async def hear(subject: str, _: bytes) -> None:
        told.append((await cloud.world.row(subjects.last_token(subject))).state)

    async def break_(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "broken") if body.type == UNIT_START else None

    await nats_bus.on_hint(subjects.ALL_ALLOCATIONS, hear)
    cloud.node.before = break_
    assert (await cloud.settle((await cloud.create()).id)).state is State.FAILED
    async with asyncio.timeout(5):
        while State.FAILED not in told:
            await asyncio.sleep(0.02)


async def _until_dispatched(cloud: Cloud, allocation_id: str) -> None:
    async with asyncio.timeout(20):
        while not await cloud.world.value("select count(*) from fleet.tasks where allocation_id = $1", allocation_id):
            await asyncio.sleep(0.02)
