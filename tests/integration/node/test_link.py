"""The link and the tasks that come over it, against a small gateway with real mTLS."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from node_gateway import NODE_ID, Gateway
from node_host import LIMITS
from penstock.kit.errors import Unauthenticated
from penstock.node import identity
from penstock.node.errors import Failed
from penstock.node.identity import Identity
from penstock.node.inventory import Simulated
from penstock.node.journal import Journal
from penstock.node.link import Link, Outbox
from penstock.node.logs import Forwarder
from penstock.node.serverclock import ServerClock
from penstock.node.tasks import Executor, Verifier
from penstock.wire.link import LogLine, UnitReport
from penstock.wire.tasks import (
    HEALTH_PROBE,
    TOPOLOGY_DISCOVER,
    UNIT_START,
    UNIT_STOP,
    Outcome,
    SignedTask,
    TaskBody,
    TopologyDiscover,
    UnitStart,
    UnitStarted,
    UnitStop,
)
from waiting import attempts


class NoUnits:
    """What the link asks of units."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()

    def reports(self) -> list[UnitReport]:
        return []


@dataclass
class Agent:
    """A node's link and executor with handlers that only remember."""

    journal: Journal
    executor: Executor
    link: Link
    logs: Forwarder
    outbox: Outbox
    did: list[str] = field(default_factory=list)


@pytest.fixture
async def gateway(node_folder: Path) -> AsyncIterator[Gateway]:
    """A gateway that listens."""
    async with _listening(Gateway(node_folder)) as gateway:
        yield gateway


@pytest.fixture
async def who(gateway: Gateway, node_folder: Path) -> Identity:
    """An enrolled node."""
    return await identity.enrol(node_folder / "node", api_url=gateway.api_url, token="good", node_name="local")


def _build(who: Identity, journal: Journal, handle: Callable[[Any], Any] | None = None) -> Agent:
    clock, outbox, logs = ServerClock(), Outbox(), Forwarder()
    did: list[str] = []

    async def remember(params: Any) -> Any:
        did.append(type(params).__name__)
        if handle is not None:
            return await handle(params)
        return UnitStarted(unit_id="x", pid=7)

    executor = Executor(
        verifier=Verifier(who.node_id, lambda: who.task_keys),
        journal=journal,
        clock=clock,
        handlers=dict.fromkeys((UNIT_START, UNIT_STOP, TOPOLOGY_DISCOVER, HEALTH_PROBE), remember),
        on_result=outbox.put,
    )
    link = Link(
        identity=who,
        clock=clock,
        journal=journal,
        units=NoUnits(),  # pyright: ignore[reportArgumentType]
        inventory=Simulated(who.node_id, 2),
        logs=logs,
        outbox=outbox,
        submit=executor.submit,
        version="1",
        production=False,
    )
    return Agent(journal, executor, link, logs, outbox, did)


@asynccontextmanager
async def _running(agent: Agent) -> AsyncIterator[Agent]:
    task = asyncio.create_task(agent.link.run())
    try:
        yield agent
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await agent.executor.close()


@pytest.fixture
async def agent(who: Identity, node_folder: Path) -> AsyncIterator[Agent]:
    """An agent whose link stands."""
    journal = Journal(node_folder / "journal.db")
    async with _running(_build(who, journal)) as agent:
        yield agent
    journal.close()


def _start(unit_id: str = "alc_x", **changes: Any) -> UnitStart:
    values: dict[str, Any] = {"image": "python:3", "gpu_uuids": [], "limits": LIMITS} | changes
    return UnitStart(unit_id=unit_id, **values)


async def test_enrolment_keeps_the_key_to_itself(who: Identity, node_folder: Path) -> None:
    assert who.node_id == NODE_ID
    for name in ("node.pem", "identity.json"):
        assert stat.S_IMODE((node_folder / "node" / name).stat().st_mode) == 0o600
    again = identity.load(node_folder / "node")
    assert again is not None
    assert again.serial == who.serial
    assert again.came_from("good")
    assert not again.came_from("another")


async def test_a_refused_token_leaves_nothing(gateway: Gateway, node_folder: Path) -> None:
    with pytest.raises(Unauthenticated):
        await identity.enrol(node_folder / "other", api_url=gateway.api_url, token="bad", node_name="local")
    assert identity.load(node_folder / "other") is None


async def test_hello_names_the_node_and_flags_simulation(gateway: Gateway, agent: Agent) -> None:
    hello = await asyncio.wait_for(gateway.hellos.get(), 30)
    assert (hello.node_id, hello.nonce, hello.inventory.simulated) == (NODE_ID, "once", True)
    assert [gpu.uuid for gpu in hello.inventory.gpus] == [f"SIM-{NODE_ID}-0", f"SIM-{NODE_ID}-1"]
    heartbeat = await asyncio.wait_for(gateway.heartbeats.get(), 30)
    assert len(heartbeat.gpus) == 2
    assert agent.link.standing


async def test_a_task_is_done_and_answered_once(gateway: Gateway, agent: Agent) -> None:
    task = gateway.task(TOPOLOGY_DISCOVER, TopologyDiscover())
    first, *_ = await gateway.ask(task)
    again, *_ = await gateway.ask(task)
    assert first == again
    assert first.outcome is Outcome.SUCCEEDED
    assert msgspec.msgpack.decode(first.answer, type=UnitStarted).pid == 7
    assert agent.did == ["TopologyDiscover"]


def _alter(task: SignedTask, **changes: Any) -> SignedTask:
    return msgspec.structs.replace(task, **changes)


def _redirect(task: SignedTask) -> SignedTask:
    return _alter(task, body=task.body.replace(b"alc_a", b"alc_b"))


_BAD: dict[str, Callable[[Gateway], SignedTask]] = {
    "bad_signature": lambda g: _redirect(g.task(UNIT_START, _start("alc_a"))),
    "bad_signature key": lambda g: _alter(g.task(UNIT_START, _start()), key_id="k2"),
    "bad_signature length": lambda g: _alter(g.task(UNIT_START, _start()), signature=b"short"),
    "bad_signature empty": lambda g: _alter(g.task(UNIT_START, _start()), signature=b""),
    "expired": lambda g: g.task(UNIT_START, _start(), expires_at=g.server_time - timedelta(seconds=1)),
    "wrong_node": lambda g: g.task(UNIT_START, _start(), node_id="nod_00000000000000000000000002"),
    "unknown_type": lambda g: g.task("shell.run", TopologyDiscover()),
    "malformed": lambda g: g.task(UNIT_START, TopologyDiscover()),
    "malformed name": lambda g: g.task(UNIT_START, _start("../../etc")),
    "malformed long": lambda g: g.task(UNIT_START, _start("x" * 65)),
    "malformed variable": lambda g: g.task(UNIT_START, _start(env={"A=B": "c"})),
    "malformed stop": lambda g: g.task(UNIT_STOP, UnitStop(unit_id="../x", gpu_uuids=[])),
    "reserved_env": lambda g: g.task(UNIT_START, _start(env={"LD_PRELOAD": "/tmp/x.so"})),
    "reserved_env driver": lambda g: g.task(UNIT_START, _start(env={"NVIDIA_VISIBLE_DEVICES": "all"})),
    "reserved_env platform": lambda g: g.task(UNIT_START, _start(env={"PENSTOCK_UNIT": "x"})),
}


@pytest.mark.parametrize("case", _BAD)
async def test_a_bad_task_is_refused_without_effect(gateway: Gateway, agent: Agent, case: str) -> None:
    result, *_ = await gateway.ask(_BAD[case](gateway))
    assert result.outcome is Outcome.REFUSED
    assert result.error_code == case.split(maxsplit=1)[0]
    assert agent.did == []
    assert await agent.journal.unfinished() == []
    fences = await agent.journal._call(lambda db: db.execute("select count(*) from fences").fetchone())
    assert fences == (0,)


async def test_a_lower_fence_is_refused_and_a_higher_one_is_remembered(gateway: Gateway, agent: Agent) -> None:
    stop = gateway.task(UNIT_STOP, UnitStop(unit_id="alc_x", gpu_uuids=[]), allocation_id="alc_x", fence=2)
    late = gateway.task(UNIT_START, _start(), allocation_id="alc_x", fence=1)
    other = gateway.task(UNIT_START, _start("alc_y"), allocation_id="alc_y", fence=1)
    results = [(await gateway.ask(task))[0] for task in (stop, late, other)]
    assert [result.outcome for result in results] == [Outcome.SUCCEEDED, Outcome.REFUSED, Outcome.SUCCEEDED]
    assert results[1].error_code == "stale_fence"
    assert agent.did == ["UnitStop", "UnitStart"]


async def test_expiry_is_by_server_time_carried_forward(gateway: Gateway, agent: Agent) -> None:
    """The host's own clock says that all of these expired, or are years away; it does not count."""
    fresh = gateway.task(TOPOLOGY_DISCOVER, expires_at=gateway.server_time + timedelta(seconds=30))
    assert (await gateway.ask(fresh))[0].outcome is Outcome.SUCCEEDED
    gateway.clock_skew += timedelta(hours=1)
    late = gateway.task(TOPOLOGY_DISCOVER, expires_at=gateway.server_time - timedelta(minutes=30))
    gateway.heartbeats = asyncio.Queue()
    for _ in range(2):
        await asyncio.wait_for(gateway.heartbeats.get(), 30)
    assert (await gateway.ask(late))[0].error_code == "expired"


async def test_results_are_sent_again_until_acknowledged(gateway: Gateway, agent: Agent) -> None:
    gateway.acknowledge = False
    task = gateway.task(TOPOLOGY_DISCOVER)
    first, *_ = await gateway.ask(task)
    await gateway.cut()
    again = await asyncio.wait_for(gateway.results.get(), 20)
    assert again == first
    assert len(await agent.journal.unacknowledged()) == 1
    gateway.acknowledge = True
    await gateway.cut()
    assert await asyncio.wait_for(gateway.results.get(), 20) == first
    async for _ in attempts():
        if not await agent.journal.unacknowledged():
            break
    assert await agent.journal.unacknowledged() == []
    assert agent.did == ["TopologyDiscover"]


async def test_a_task_that_had_begun_is_resumed_and_its_result_kept(
    gateway: Gateway, who: Identity, node_folder: Path
) -> None:
    journal = Journal(node_folder / "journal.db")
    begun = asyncio.Event()

    async def hang(_: Any) -> Any:
        begun.set()
        await asyncio.sleep(600)

    task = gateway.task(UNIT_START, _start(), allocation_id="alc_x")
    async with _running(_build(who, journal, hang)):
        await gateway.send(task)
        await asyncio.wait_for(begun.wait(), 30)
    journal.close()
    journal = Journal(node_folder / "journal.db")
    agent = _build(who, journal)
    await agent.executor.resume()
    async with _running(agent):
        result = await asyncio.wait_for(gateway.results.get(), 20)
        assert result.outcome is Outcome.SUCCEEDED
        assert agent.did == ["UnitStart"]
        again, *_ = await gateway.ask(task)
        assert again == result
        assert agent.did == ["UnitStart"]
    journal.close()


async def test_a_start_that_expired_while_the_agent_was_away_is_undone(
    gateway: Gateway, who: Identity, node_folder: Path
) -> None:
    journal = Journal(node_folder / "journal.db")
    start = gateway.task(UNIT_START, _start(), allocation_id="alc_x")
    stop = gateway.task(UNIT_STOP, UnitStop(unit_id="alc_y", gpu_uuids=[]), allocation_id="alc_y")
    for signed in (start, stop):
        await journal.begin(msgspec.msgpack.decode(signed.body, type=TaskBody), signed, expired=False)
    gateway.clock_skew += timedelta(days=1)
    stopped: list[str] = []

    async def note(params: Any) -> Any:
        stopped.append(params.unit_id)
        return UnitStarted(unit_id="x", pid=7)

    agent = _build(who, journal, note)
    await agent.executor.resume()
    async with _running(agent):
        results = [await asyncio.wait_for(gateway.results.get(), 20) for _ in range(2)]
        again, *_ = await gateway.ask(start)
    assert sorted((r.outcome, r.error_code) for r in results) == [(Outcome.FAILED, "expired"), (Outcome.SUCCEEDED, "")]
    assert again in results
    assert agent.did == ["UnitStop", "UnitStop"]
    assert sorted(stopped) == ["alc_x", "alc_y"]
    journal.close()


async def test_fences_are_forgotten_once_no_older_task_can_be_fresh(gateway: Gateway, node_folder: Path) -> None:
    journal = Journal(node_folder / "journal.db")

    async def kept_after(allocation_id: str, hours: float) -> list[str]:
        expires_at = gateway.server_time + timedelta(hours=hours)
        signed = gateway.task(UNIT_START, _start(), allocation_id=allocation_id, expires_at=expires_at)
        await journal.begin(msgspec.msgpack.decode(signed.body, type=TaskBody), signed, expired=False)
        rows = await journal._call(lambda db: db.execute("select allocation_id from fences order by 1").fetchall())
        return [row[0] for row in rows]

    assert await kept_after("alc_a", 0) == ["alc_a"]
    assert await kept_after("alc_b", 12) == ["alc_a", "alc_b"]
    assert await kept_after("alc_c", 25) == ["alc_b", "alc_c"]
    assert await kept_after("alc_b", 35) == ["alc_b", "alc_c"]
    assert await kept_after("alc_d", 50) == ["alc_b", "alc_d"]
    journal.close()


async def test_one_allocations_tasks_take_turns_and_others_do_not_wait(
    gateway: Gateway, who: Identity, node_folder: Path
) -> None:
    journal = Journal(node_folder / "journal.db")
    order: list[str] = []
    release = asyncio.Event()

    async def slow(params: Any) -> Any:
        order.append(f"begin {params.unit_id}")
        if isinstance(params, UnitStart) and params.unit_id == "alc_a":
            await release.wait()
        order.append(f"end {params.unit_id}")
        return UnitStarted(unit_id=params.unit_id, pid=1)

    async with _running(_build(who, journal, slow)):
        await gateway.send(
            gateway.task(UNIT_START, _start("alc_a"), allocation_id="alc_a"),
            gateway.task(UNIT_STOP, UnitStop(unit_id="alc_a", gpu_uuids=[]), allocation_id="alc_a", fence=2),
            gateway.task(UNIT_START, _start("alc_b"), allocation_id="alc_b"),
        )
        await asyncio.wait_for(gateway.results.get(), 30)
        release.set()
        for _ in range(2):
            await asyncio.wait_for(gateway.results.get(), 30)
    assert sorted(order[:3]) == ["begin alc_a", "begin alc_b", "end alc_b"]
    assert order[3:] == ["end alc_a", "begin alc_a", "end alc_a"]
    journal.close()


async def test_a_failure_is_told_with_its_code(gateway: Gateway, who: Identity, node_folder: Path) -> None:
    journal = Journal(node_folder / "journal.db")

    async def fail(params: Any) -> Any:
        if isinstance(params, UnitStart):
            raise Failed("unknown_image", "no such image")
        raise RuntimeError("a bug")

    async with _running(_build(who, journal, fail)):
        known, *_ = await gateway.ask(gateway.task(UNIT_START, _start()))
        bug, *_ = await gateway.ask(gateway.task(TOPOLOGY_DISCOVER))
    assert (known.outcome, known.error_code) == (Outcome.FAILED, "unknown_image")
    assert (bug.outcome, bug.error_code) == (Outcome.FAILED, "internal")
    journal.close()


async def test_output_goes_over_the_link(gateway: Gateway, agent: Agent) -> None:
    line = LogLine(unit_id="alc_x", stream="stdout", at=gateway.server_time, text="hello")
    agent.logs.put(line)
    async for _ in attempts():
        if gateway.lines:
            break
    assert gateway.lines == [line]


@asynccontextmanager
async def _listening(gateway: Gateway) -> AsyncIterator[Gateway]:
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


async def _dial_once(who: Identity, folder: Path) -> None:
    journal = Journal(folder / "journal.db")
    try:
        await asyncio.wait_for(_build(who, journal).link._serve_once(), 30)
    finally:
        journal.close()


async def test_a_node_does_not_talk_to_a_gateway_that_is_none(node_folder: Path) -> None:
    """Another node of the same CA pretends to be a gateway."""
    async with _listening(Gateway(node_folder, uri="penstock://node/nod_other")) as pretender:
        who = await identity.enrol(node_folder / "n", api_url=pretender.api_url, token="good", node_name="local")
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="not a gateway's"):
            await _dial_once(who, node_folder)
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await who.renew(session)
        assert pretender.serials == []


async def test_a_node_does_not_talk_to_another_cas_gateway(gateway: Gateway, who: Identity, node_folder: Path) -> None:
    async with _listening(Gateway(node_folder)) as stranger:
        who.move(stranger.link_url)
        with pytest.raises(aiohttp.ClientError):
            await _dial_once(who, node_folder)
        assert stranger.serials == []


async def test_renewal_replaces_key_and_certificate_and_the_link_uses_them(
    gateway: Gateway, agent: Agent, who: Identity, node_folder: Path
) -> None:
    await asyncio.wait_for(gateway.hellos.get(), 30)
    old_pem = (node_folder / "node" / "node.pem").read_bytes()
    old_serial = who.serial
    async with aiohttp.ClientSession() as session:
        await who.renew(session)
    agent.link.reconnect()
    await asyncio.wait_for(gateway.hellos.get(), 20)
    assert who.serial != old_serial
    assert int(gateway.serials[-1], 16) == who.serial
    new_pem = (node_folder / "node" / "node.pem").read_bytes()
    assert new_pem.split(b"-----END PRIVATE KEY-----")[0] != old_pem.split(b"-----END PRIVATE KEY-----")[0]
    assert stat.S_IMODE((node_folder / "node" / "node.pem").stat().st_mode) == 0o600
    kept = identity.load(node_folder / "node")
    assert kept is not None
    assert kept.serial == who.serial
    assert kept.came_from("good")


async def test_an_odd_frame_ends_the_link_and_the_node_comes_back(gateway: Gateway, agent: Agent) -> None:
    await asyncio.wait_for(gateway.hellos.get(), 30)
    assert gateway._socket is not None
    await gateway._socket.send_bytes(b"\xc1 no message")
    await asyncio.wait_for(gateway.hellos.get(), 20)
    assert (await gateway.ask(gateway.task(TOPOLOGY_DISCOVER)))[0].outcome is Outcome.SUCCEEDED
