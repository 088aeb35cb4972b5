"""The agent as a process: enrolment, tasks through to real units, kill -9 at any moment, both ways of stopping."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from node_gateway import NODE_ID, Gateway
from node_host import LIMITS, tenant_folder
from penstock.kit.ids import new_id
from penstock.wire.link import UnitState
from penstock.wire.tasks import (
    HEALTH_PROBE,
    UNIT_START,
    UNIT_STOP,
    CleanupProof,
    HealthReport,
    Outcome,
    SignedTask,
    UnitStart,
    UnitStarted,
    UnitStop,
)


class Agent:
    """The agent's process, which can be killed and started again."""

    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self.folder = folder / "agent"
        self.gateway = gateway
        self.log = folder / "agent.log"
        self.process: asyncio.subprocess.Process | None = None
        self.environment: dict[str, str] = {}

    async def start(self, **changes: str) -> None:
        """Start it."""
        environment = {
            "PATH": os.environ["PATH"],
            "PENSTOCK_API_URL": self.gateway.api_url,
            "PENSTOCK_AGENT_DATA_DIR": str(self.folder),
            "PENSTOCK_AGENT_ENROLMENT_TOKEN": "good",
            "PENSTOCK_AGENT_TENANT_DIR": str(tenant_folder()),
            "PENSTOCK_AGENT_SIMULATED_GPUS": "4",
            "PENSTOCK_AGENT_PRODUCTION": "false",
            "PENSTOCK_AGENT_OPS_PORT": "0",
            "PENSTOCK_AGENT_UID_FIRST": "220000",
        }
        environment |= self.environment | {f"PENSTOCK_AGENT_{name.upper()}": value for name, value in changes.items()}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.processes.agent"),
                stderr=log,
                env=environment,
            )

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its end."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.gateway.asked.clear()
        return await asyncio.wait_for(self.process.wait(), 30)


@pytest.fixture
async def gateway(node_folder: Path) -> AsyncIterator[Gateway]:
    """A gateway that listens."""
    gateway = Gateway(node_folder)
    gateway.clock_skew = timedelta()
    await gateway.start()
    yield gateway
    await gateway.stop()


@pytest.fixture
async def agent(gateway: Gateway, node_folder: Path) -> AsyncIterator[Agent]:
    """An agent that runs; at the end it is stopped together with its units."""
    agent = Agent(node_folder, gateway)
    await agent.start()
    try:
        yield agent
    finally:
        await agent.end(signal.SIGKILL)
        await agent.start(keep_units_on_stop="false")
        try:
            await asyncio.wait_for(gateway.asked.wait(), 30)
        finally:
            await agent.end()


def _start_task(gateway: Gateway, unit_id: str) -> SignedTask:
    params = UnitStart(unit_id=unit_id, image="python:3", gpu_uuids=[f"SIM-{NODE_ID}-0"], limits=LIMITS)
    return gateway.task(UNIT_START, params, allocation_id=unit_id)


def _stop_task(gateway: Gateway, unit_id: str) -> SignedTask:
    params = UnitStop(unit_id=unit_id, gpu_uuids=[f"SIM-{NODE_ID}-0"], grace_s=1)
    return gateway.task(UNIT_STOP, params, allocation_id=unit_id, fence=2)


def _launchers(unit_id: str) -> int:
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += unit_id.encode() in entry.read_bytes()
    return found


async def test_a_unit_lives_and_ends_by_tasks(gateway: Gateway, agent: Agent) -> None:
    unit_id = new_id("alc")
    started, *_ = await gateway.ask(_start_task(gateway, unit_id))
    assert started.outcome is Outcome.SUCCEEDED, started
    assert msgspec.msgpack.decode(started.answer, type=UnitStarted).pid > 0
    report, *_ = await gateway.ask(gateway.task(HEALTH_PROBE))
    health = msgspec.msgpack.decode(report.answer, type=HealthReport)
    assert (health.sandbox, health.units) == ("bubblewrap", [unit_id])
    stopped, *_ = await gateway.ask(_stop_task(gateway, unit_id))
    proof = msgspec.msgpack.decode(stopped.answer, type=CleanupProof)
    assert proof.clean
    assert proof.simulated
    late, *_ = await gateway.ask(_start_task(gateway, unit_id))
    assert (late.outcome, late.error_code) == (Outcome.REFUSED, "stale_fence")
    assert _launchers(unit_id) == 0


async def test_killed_at_random_it_neither_repeats_nor_loses_a_task(gateway: Gateway, agent: Agent) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    hit = 0
    for _ in range(6):
        unit_id = new_id("alc")
        task = _start_task(gateway, unit_id)
        await gateway.send(task)
        await asyncio.sleep(chance.uniform(0, 0.06))
        hit += gateway.results.empty()
        await agent.end(signal.SIGKILL)
        await agent.start()
        await gateway.send(task)
        started = await asyncio.wait_for(gateway.results.get(), 30)
        assert started.outcome is Outcome.SUCCEEDED, (seed, started)
        assert _launchers(unit_id) == 1, seed
        while not gateway.results.empty():
            assert gateway.results.get_nowait().task_id == started.task_id
        stopping = _stop_task(gateway, unit_id)
        await gateway.send(stopping)
        while (stopped := await asyncio.wait_for(gateway.results.get(), 30)).task_id == started.task_id:
            pass
        assert msgspec.msgpack.decode(stopped.answer, type=CleanupProof).clean, seed
        assert _launchers(unit_id) == 0, seed
    assert hit, f"no kill came before a result; seed {seed}"


async def test_units_outlive_a_stop_and_are_adopted(gateway: Gateway, agent: Agent) -> None:
    unit_id = new_id("alc")
    await gateway.ask(_start_task(gateway, unit_id))
    assert await agent.end() == 0
    assert _launchers(unit_id) == 1
    await agent.start()
    await asyncio.wait_for(gateway.asked.wait(), 30)
    gateway.heartbeats = asyncio.Queue()
    heartbeat = await asyncio.wait_for(gateway.heartbeats.get(), 20)
    assert [(unit.unit_id, unit.state) for unit in heartbeat.units] == [(unit_id, UnitState.RUNNING)]


async def test_told_not_to_keep_units_it_ends_them_first(gateway: Gateway, agent: Agent) -> None:
    await agent.end()
    await agent.start(keep_units_on_stop="false")
    unit_id = new_id("alc")
    await gateway.ask(_start_task(gateway, unit_id))
    assert _launchers(unit_id) == 1
    assert await agent.end() == 0
    assert _launchers(unit_id) == 0
    assert list((agent.folder / "units").iterdir()) == []


async def test_two_agents_do_not_share_a_folder(gateway: Gateway, agent: Agent, node_folder: Path) -> None:
    await asyncio.wait_for(gateway.asked.wait(), 30)
    second = Agent(node_folder, gateway)
    second.log = node_folder / "second.log"
    await second.start()
    assert second.process is not None
    assert await asyncio.wait_for(second.process.wait(), 30) == 1
    assert "another agent" in second.log.read_text()
    await gateway.ask(gateway.task(HEALTH_PROBE))


async def test_without_a_token_it_says_what_it_needs(gateway: Gateway, node_folder: Path) -> None:
    agent = Agent(node_folder, gateway)
    for token, complaint in (("", "penstock node enroll"), ("bad", "401")):
        await agent.start(enrolment_token=token)
        assert agent.process is not None
        assert await asyncio.wait_for(agent.process.wait(), 30) == 1
        assert complaint in agent.log.read_text()


async def test_a_certificate_is_renewed_before_its_end(gateway: Gateway, node_folder: Path) -> None:
    gateway.certificate_life_s = 2.0
    agent = Agent(node_folder, gateway)
    await agent.start()
    try:
        await asyncio.wait_for(gateway.hellos.get(), 30)
        gateway.certificate_life_s = 3600.0
        await asyncio.wait_for(gateway.hellos.get(), 30)
        assert len(set(gateway.serials)) == 2
        assert (await gateway.ask(gateway.task(HEALTH_PROBE)))[0].outcome is Outcome.SUCCEEDED
    finally:
        await agent.end()
