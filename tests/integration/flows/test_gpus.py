"""What runs on a GPU that fails leaves, and nothing begins on it until it is proved to work."""

import asyncio
import random
from dataclasses import dataclass

import msgspec

from integration.flows.fakenode import Answer
from integration.flows.stage import LIMITS, Cloud
from penstock.compute.errors import NoSingleNode, OutOfCapacity, Unhealthy
from penstock.compute.model import State
from penstock.compute.service.release import Release
from penstock.fleet import gpus
from penstock.fleet.gpus import Prover
from penstock.fleet.model import Config
from penstock.fleet.store import slots as slot_rows
from penstock.flows.reconcile import NodeKeeper
from penstock.kit.db import Database
from penstock.wire.link import GpuReport
from penstock.wire.tasks import UNIT_START, TaskBody, UnitStart

XID = "XID 79: the GPU has fallen off the bus"


async def report(database: Database, node_id: str, uuid: str, *, failed: bool) -> None:
    """As a heartbeat does."""
    told = GpuReport(uuid=uuid, healthy=not failed, failed=failed, detail=XID if failed else "")
    async with database.transaction() as tx:
        await slot_rows.report_health(tx, [(node_id, uuid, told.healthy, told.detail)])
        await gpus.take_reports(tx, [(node_id, told)])


def keeper_of(cloud: Cloud) -> NodeKeeper:
    return NodeKeeper(cloud.world.db, cloud.watch, Release(LIMITS), cloud.tasks)


async def test_what_runs_on_a_failed_gpu_is_released_with_the_reason_and_others_stay(cloud: Cloud) -> None:
    first, second = await cloud.active(), await cloud.active()
    await report(cloud.world.db, cloud.node.node_id, first.gpu_uuids[0], failed=True)
    keeper = keeper_of(cloud)
    await keeper.failed_gpus()
    ended = await cloud.settle(first.id)
    await keeper.failed_gpus()
    assert (ended.state, ended.reason) == (State.RELEASED, f"the GPU failed: {XID}")
    assert ended.billing_ended_at is not None
    assert (await cloud.world.row(second.id)).state is State.ACTIVE
    assert await cloud.slot_healths() == {"healthy", "quarantined"}


async def test_a_gpu_that_fails_before_the_start_gets_no_unit(cloud: Cloud) -> None:
    client, cloud.sagas.client = cloud.sagas.client, None
    made = await cloud.create()
    [claimed] = await cloud.world.held()
    uuid = await cloud.world.value("select gpu_uuid from fleet.slots where id = $1", claimed[0])
    await report(cloud.world.db, cloud.node.node_id, str(uuid), failed=True)
    cloud.sagas.client = client
    ended = await cloud.settle(made.id)
    assert ended.state is State.FAILED
    assert ended.reason == f"the unit was not started: a GPU is quarantined: {XID}"
    assert ("start", made.unit_id) not in cloud.node.effects


@dataclass
class Chaos:
    """GPUs fail and return while tenants come and go."""

    cloud: Cloud
    random: random.Random
    uuids: list[str]
    started: int = 0

    async def fail_and_return(self, prover: Prover) -> None:
        node_id = self.cloud.node.node_id
        while True:
            uuid = self.random.choice(self.uuids)
            await report(self.cloud.world.db, node_id, uuid, failed=True)
            await asyncio.sleep(self.random.uniform(0, 0.1))
            await report(self.cloud.world.db, node_id, uuid, failed=False)
            await prover.sweep()
            await asyncio.sleep(0.05)

    async def keep(self) -> None:
        keeper = keeper_of(self.cloud)
        while True:
            await keeper.failed_gpus()
            await asyncio.sleep(0.05)

    async def rent(self, times: int) -> None:
        for _ in range(times):
            row = await self.cloud.settle((await self._create()).id, timeout_s=60)
            if row.state is State.ACTIVE:
                self.started += 1
                await self.cloud.world.release(row.id)
            await self.cloud.until(row.id, lambda row: row.ended_at is not None, timeout_s=60)

    async def _create(self):
        while True:
            try:
                return await self.cloud.create()
            except (OutOfCapacity, Unhealthy, NoSingleNode):
                await asyncio.sleep(0.1)


async def test_no_start_is_dispatched_to_a_gpu_in_quarantine_while_64_creates_race(cloud: Cloud) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    async with cloud.world.db.read() as conn:
        uuids = [row["gpu_uuid"] for row in await conn.fetch("select gpu_uuid from fleet.slots")]
    chaos = Chaos(cloud, random.Random(seed), uuids)
    prover = Prover(cloud.world.db, cloud.tasks, Config(gpu_settle_s=0.0))

    async def slow(_: TaskBody) -> Answer | None:
        await asyncio.sleep(chaos.random.uniform(0, 0.05))
        return None

    cloud.node.before = slow
    faults = [asyncio.create_task(chaos.fail_and_return(prover)), asyncio.create_task(chaos.keep())]
    try:
        async with asyncio.TaskGroup() as tenants:
            for _ in range(8):
                tenants.create_task(chaos.rent(8))
    finally:
        for fault in faults:
            fault.cancel()
        ended = await asyncio.gather(*faults, return_exceptions=True)
    assert all(isinstance(error, asyncio.CancelledError) for error in ended), ended
    await _check(cloud, chaos)


async def _check(cloud: Cloud, chaos: Chaos) -> None:
    """By the database's clock: starts were dispatched outside of their GPUs' quarantines only, and the faults hit."""
    async with cloud.world.db.read() as conn:
        spells = await conn.fetch(
            "select gpu_uuid, since, coalesce(returned_at, 'infinity') as until from fleet.gpu_quarantines"
        )
        starts = await conn.fetch("select body, created_at from fleet.tasks where type = $1", UNIT_START)
        hit = await conn.fetchval(
            "select count(*) from compute.allocations where reason like '%the GPU failed%' or reason like '%a GPU is%'"
        )
        returned = await conn.fetchval("select count(*) from fleet.gpu_quarantines where returned_at is not null")
    for start in starts:
        body = msgspec.msgpack.decode(start["body"], type=TaskBody)
        mine = msgspec.msgpack.decode(body.params, type=UnitStart).gpu_uuids
        at = start["created_at"]
        wrong = [spell for spell in spells if spell["gpu_uuid"] in mine and spell["since"] < at < spell["until"]]
        assert not wrong
    assert chaos.started > 0
    assert returned > 0
    assert hit > 0
