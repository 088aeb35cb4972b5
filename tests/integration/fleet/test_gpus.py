"""GPUs that fail get no work until they are proved to work, whoever races."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from integration.fleet.agent import Agent, inventory
from integration.fleet.conftest import Connect, Enrol, Gateway
from penstock.fleet import gpus, slots
from penstock.fleet.errors import GpuNotQuarantined
from penstock.fleet.gpus import Prover
from penstock.fleet.model import Config
from penstock.fleet.tasks import Tasks
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import Denied, NotFound
from penstock.wire.link import GpuReading, GpuReport, Heartbeat, HeartbeatAck, Welcome
from penstock.wire.tasks import GPU_PROBE, GpuKind, GpuProbed, TaskBody

WELL = GpuReport(uuid="GPU-1", healthy=True)
FAILED = GpuReport(uuid="GPU-1", healthy=False, failed=True, detail="XID 79: the GPU has fallen off the bus")
HOT = GpuReport(uuid="GPU-1", healthy=False, detail="too hot")


@pytest.fixture
def prover(database: Database, tasks: Tasks, config: Config) -> Prover:
    """Probes by hand; a GPU has settled at once."""
    return Prover(database, tasks, replace(config, gpu_settle_s=0.0))


@pytest.fixture
async def agent(enrol: Enrol, connect: Connect) -> Agent:
    """A node with two GPUs whose link stands."""
    await enrol()
    agent = await connect()
    await agent.join()
    return agent


async def say(agent: Agent, *reports: GpuReport) -> None:
    """Heartbeat, and wait until it is stored."""
    await agent.beat(gpus=list(reports))
    await agent.expect(HeartbeatAck)


async def healths(database: Database) -> dict[str, str]:
    async with database.read() as conn:
        return {row["gpu_uuid"]: row["health"] for row in await conn.fetch("select gpu_uuid, health from fleet.slots")}


async def facts(database: Database) -> list[tuple[str, int]]:
    async with database.read() as conn:
        rows = await conn.fetch("select type, version from kit.outbox where type like 'fleet.gpu_%' order by seq")
    return [(row["type"].removeprefix("fleet.gpu_"), row["version"]) for row in rows]


async def slot_of(database: Database, gpu: str = "GPU-1") -> str:
    async with database.read() as conn:
        return await conn.fetchval("select id from fleet.slots where gpu_uuid = $1", gpu)


async def quarantine_row(database: Database) -> dict[str, object]:
    async with database.read() as conn:
        row = await conn.fetchrow("select * from fleet.gpu_quarantines order by since desc limit 1")
    assert row is not None
    return dict(row)


async def probed(agent: Agent, body: TaskBody, *, passed: bool, detail: str = "") -> None:
    assert body.type == GPU_PROBE
    await agent.answer(body.task_id, body.fence, GpuProbed(gpu_uuid="GPU-1", passed=passed, detail=detail))


async def test_a_failed_gpu_stays_out_though_it_is_reported_well_until_a_probe_passes(
    agent: Agent, database: Database, prover: Prover
) -> None:
    await say(agent, FAILED)
    assert await healths(database) == {"GPU-0": "healthy", "GPU-1": "quarantined"}
    await prover.sweep()
    assert (await quarantine_row(database))["probe_task_id"] is None
    await say(agent, WELL)
    assert (await healths(database))["GPU-1"] == "quarantined"
    await prover.sweep()
    await probed(agent, await agent.task(), passed=False, detail="its memory could not be written and read back")
    await prover.sweep()
    row = await quarantine_row(database)
    assert (row["probe_detail"], row["probe_task_id"]) == ("its memory could not be written and read back", None)
    assert (await healths(database))["GPU-1"] == "quarantined"
    await prover.sweep()
    await probed(agent, await agent.task(), passed=True)
    await prover.sweep()
    assert await healths(database) == {"GPU-0": "healthy", "GPU-1": "healthy"}
    assert await facts(database) == [("quarantined", 1), ("returned", 2)]
    async with database.read() as conn:
        actions = await conn.fetch("select action from kit.audit where target_id = $1 order by at", row["id"])
    assert [action["action"] for action in actions] == ["gpus.quarantine", "gpus.return"]


async def test_a_gpu_that_has_not_settled_is_not_probed(
    agent: Agent, database: Database, tasks: Tasks, config: Config
) -> None:
    await say(agent, FAILED)
    await say(agent, WELL)
    await Prover(database, tasks, config).sweep()
    assert (await quarantine_row(database))["probe_task_id"] is None


async def test_a_passed_probe_does_not_return_a_gpu_that_its_node_still_reports_as_failed(
    agent: Agent, database: Database, prover: Prover, operator: Caller
) -> None:
    await say(agent, FAILED)
    async with database.transaction() as tx:
        await gpus.ask_return(tx, operator, node_id=agent.node_id, slot_id=await slot_of(database))
    await prover.sweep()
    await probed(agent, await agent.task(), passed=True)
    await prover.sweep()
    assert (await healths(database))["GPU-1"] == "quarantined"
    await say(agent, WELL)
    await prover.sweep()
    assert (await healths(database))["GPU-1"] == "healthy"


async def test_a_degraded_gpu_returns_by_itself(agent: Agent, database: Database) -> None:
    await say(agent, HOT)
    assert (await healths(database))["GPU-1"] == "degraded"
    await say(agent, WELL)
    assert (await healths(database))["GPU-1"] == "healthy"
    assert await facts(database) == []


async def test_an_operators_quarantine_ends_only_when_asked(
    agent: Agent, database: Database, prover: Prover, operator: Caller
) -> None:
    slot_id = await slot_of(database)
    async with database.transaction() as tx:
        with pytest.raises(GpuNotQuarantined):
            await gpus.ask_return(tx, operator, node_id=agent.node_id, slot_id=slot_id)
    for _ in range(2):
        async with database.transaction() as tx:
            shown = await gpus.quarantine(
                tx, operator, node_id=agent.node_id, slot_id=slot_id, reason="fan is loud", drain=False
            )
    assert (shown.health, shown.health_detail) == ("quarantined", "fan is loud")
    await say(agent, WELL)
    await prover.sweep()
    row = await quarantine_row(database)
    assert (row["probe_task_id"], row["release_reason"], row["version"]) == (None, "", 1)
    await say(agent, FAILED)
    row = await quarantine_row(database)
    assert (row["cause"], row["detail"]) == ("operator", "fan is loud")
    assert row["release_reason"] == "the GPU failed: XID 79: the GPU has fallen off the bus"
    await say(agent, WELL)
    async with database.transaction() as tx:
        await gpus.ask_return(tx, operator, node_id=agent.node_id, slot_id=slot_id)
    await prover.sweep()
    await probed(agent, await agent.task(), passed=True)
    await prover.sweep()
    assert (await healths(database))["GPU-1"] == "healthy"


async def test_tenants_and_wrong_slots_are_refused(agent: Agent, database: Database, operator: Caller) -> None:
    slot_id = await slot_of(database)
    tenant = replace(operator, actions=frozenset(), operator=False)
    with pytest.raises(Denied):
        async with database.transaction() as tx:
            await gpus.quarantine(tx, tenant, node_id=agent.node_id, slot_id=slot_id, reason="", drain=False)
    with pytest.raises(NotFound):
        async with database.transaction() as tx:
            await gpus.quarantine(tx, operator, node_id="nod_x", slot_id=slot_id, reason="", drain=False)
    assert await healths(database) == {"GPU-0": "healthy", "GPU-1": "healthy"}


async def test_all_shares_go_with_their_gpu_also_those_made_later(
    enrol: Enrol, connect: Connect, database: Database
) -> None:
    def shares(count: int) -> Awaitable[None]:
        listed = inventory(count)
        gpus_ = [
            type(gpu)(
                **{name: getattr(gpu, name) for name in ("uuid", "index", "model", "memory_bytes")},
                kind=GpuKind.MIG,
                parent_uuid="GPU-whole",
                profile="1g.10gb",
            )
            for gpu in listed.gpus
        ]
        return agent.send(agent.hello(inventory=type(listed)(gpus=gpus_, simulated=True)))

    await enrol()
    agent = await connect()
    await shares(2)
    await agent.expect(Welcome)
    await say(agent, FAILED, GpuReport(uuid="GPU-0", healthy=False, failed=True, detail=FAILED.detail))
    assert set((await healths(database)).values()) == {"quarantined"}
    assert (await quarantine_row(database))["gpu_uuid"] == "GPU-whole"
    assert await facts(database) == [("quarantined", 1)]
    agent = await connect()
    await shares(3)
    await agent.expect(Welcome)
    assert await healths(database) == dict.fromkeys(("GPU-0", "GPU-1", "GPU-2"), "quarantined")


async def test_work_that_begins_and_a_quarantine_exclude_one_another(agent: Agent, database: Database) -> None:
    """Whoever is first: no start is committed after the quarantine."""
    slot_id = await slot_of(database)
    begun = asyncio.Event()
    order: list[str] = []

    async def start(hold: Callable[[], Awaitable[object]]) -> None:
        async with database.transaction() as tx:
            assert await slots.unfit(tx, [slot_id]) == ""
            begun.set()
            await hold()
            order.append("start")

    async def fail() -> None:
        await begun.wait()
        async with database.transaction() as tx:
            await gpus.take_reports(tx, [(agent.node_id, FAILED)])
        order.append("quarantine")

    failing = asyncio.create_task(fail())
    await start(lambda: asyncio.wait({failing}, timeout=0.3))
    await failing
    assert order == ["start", "quarantine"]
    async with database.transaction() as tx:
        assert await slots.unfit(tx, [slot_id]) == "a GPU is quarantined: XID 79: the GPU has fallen off the bus"


async def test_readings_are_stored_together_and_only_of_the_current_link(
    agent: Agent, gateway: Gateway, database: Database
) -> None:
    reading = GpuReading(
        uuid="GPU-1", temperature_c=41, power_w=62.5, memory_used_bytes=1 << 40, ecc_corrected=7, faults=1
    )
    beat = Heartbeat(sent_at=(await _now(database)), units=[], gpus=[], readings=[reading])
    await agent.send(beat)
    await agent.expect(HeartbeatAck)
    await gateway.server._heartbeats.flush_readings()
    async with database.read() as conn:
        found = (await gpus.conditions(conn, [agent.node_id])).readings[agent.node_id, "GPU-1"]
    assert (found.temperature_c, found.power_w, found.utilization_percent) == (41, 62.5, None)
    assert (found.memory_used_bytes, found.ecc_corrected, found.faults) == (1 << 40, 7, 1)
    async with database.read() as conn:
        await conn.execute("truncate fleet.gpu_readings")
        await conn.execute("update fleet.links set link_id = 'lnk_newer'")
    gateway.server._heartbeats._readings = {link.key: [reading] for link in gateway.server._links}
    await gateway.server._heartbeats.flush_readings()
    async with database.read() as conn:
        assert await conn.fetchval("select count(*) from fleet.gpu_readings") == 0


async def _now(database: Database) -> object:
    async with database.read() as conn:
        return await conn.fetchval("select clock_timestamp()")
