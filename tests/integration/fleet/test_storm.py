"""All nodes at once: the accept rate is held, everyone comes back by themselves, and no task is lost."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from conftest import Servers
from integration.fleet.conftest import Gateway
from penstock.embedded.ports import free_port
from penstock.fleet import admission
from penstock.fleet.enrolment import Enrolment
from penstock.fleet.model import Config
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.node import identity, simulation
from penstock.node.identity import Identity
from penstock.node.simulation import SimulatedNode
from penstock.secrets import keyring
from penstock.wire.rest import EnrolRequest
from penstock.wire.tasks import HEALTH_PROBE, HealthProbe, SignedTask, TaskBody

NODES = 50
TASKS = 150
ACCEPTS_PER_S = 20


class Hosts:
    """Makes identities as hosts do: over HTTP, with a token and a key of their own."""

    def __init__(self, database: Database, enrolment: Enrolment, operator: Caller, folder: Path) -> None:
        self._database = database
        self._enrolment = enrolment
        self._operator = operator
        self._folder = folder
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        """`POST /api/v1/enrolments`."""
        wanted = msgspec.json.decode(await request.read(), type=EnrolRequest)
        async with self._database.transaction() as tx:
            enrolled = await self._enrolment.enrol(
                tx, token=wanted.token, node_name=wanted.node_name, csr_pem=wanted.csr_pem
            )
        return web.Response(status=201, body=msgspec.json.encode(enrolled))

    async def enrol(self, name: str, link_url: str) -> Identity:
        """One node."""
        async with self._database.transaction() as tx:
            token = await self._enrolment.create_token(tx, self._operator, node_name=name, gpus_approved=2)
        who = await identity.enrol(self._folder / name, api_url=self.url, token=token.token, node_name=name)
        who.move(link_url)
        return who


@pytest.fixture
async def hosts(database: Database, enrolment: Enrolment, operator: Caller, tmp_path: Path) -> AsyncIterator[Hosts]:
    made = Hosts(database, enrolment, operator, tmp_path / "hosts")
    app = web.Application()
    app.router.add_post("/api/v1/enrolments", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = "http://{}:{}".format(*runner.addresses[0][:2])
    yield made
    await runner.cleanup()


class GatewayProcess:
    """A real process that can be killed and started again on the same port."""

    def __init__(self, environ: dict[str, str], port: int) -> None:
        self._environ = environ
        self._port = port
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Until it listens."""
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.command", "serve", "gateway", "--only", "link"), env=self._environ
        )
        async with asyncio.timeout(60):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    writer.close()
                    return
                assert self._child.returncode is None
                await asyncio.sleep(0.05)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                self._child.send_signal(number)
            await self._child.wait()


@pytest.fixture
async def gateway_process(
    servers: Servers, database_url: str, folder: Path, tmp_path: Path
) -> AsyncIterator[tuple[GatewayProcess, str]]:
    keyring.init(tmp_path / "secrets")
    port = free_port()
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_NATS_URL": servers.nats_url,
        "PENSTOCK_PKI_DIR": str(folder),
        "PENSTOCK_SECRETS_DIR": str(tmp_path / "secrets"),
        "PENSTOCK_OBJECTS_URL": (tmp_path / "objects").as_uri(),
        "PENSTOCK_GATEWAY_LINK_PORT": str(port),
        "PENSTOCK_GATEWAY_OPS_PORT": "0",
        "PENSTOCK_GATEWAY_HEARTBEAT_S": "1",
        "PENSTOCK_GATEWAY_ACCEPTS_PER_S": str(ACCEPTS_PER_S),
        "PENSTOCK_GATEWAY_LOG_LEVEL": "error",
    }
    process = GatewayProcess(environ, port)
    yield process, f"https://127.0.0.1:{port}"
    await process.kill()


class Executions:
    """How often each task arrived."""

    def __init__(self) -> None:
        self.arrivals: dict[str, int] = {}

    def arrive(self, signed: SignedTask) -> None:
        """A frame brought it."""
        task_id = msgspec.msgpack.decode(signed.body, type=TaskBody).task_id
        self.arrivals[task_id] = self.arrivals.get(task_id, 0) + 1


async def _until_linked(nodes: list[SimulatedNode], *, standing: bool = True) -> None:
    async with asyncio.timeout(60):
        while any(node.link.standing is not standing for node in nodes):
            await asyncio.sleep(0.02)


async def _dispatch(database: Database, tasks: Tasks, nodes: list[SimulatedNode]) -> list[str]:
    async with database.transaction() as tx:
        return [
            await tasks.dispatch(
                tx,
                node_id=nodes[number % len(nodes)].who.node_id,
                type=HEALTH_PROBE,
                allocation_id=None,
                fence=0,
                params=HealthProbe(),
                dedupe_key=new_id("tst"),
                expires_s=120,
            )
            for number in range(TASKS // 3)
        ]


async def _until_succeeded(database: Database, task_ids: list[str]) -> None:
    async with asyncio.timeout(60):
        while True:
            async with database.read() as conn:
                query = "select count(*) from fleet.tasks where id = any($1) and state = 'succeeded'"
                if await conn.fetchval(query, task_ids) == len(task_ids):
                    return
            await asyncio.sleep(0.05)


async def _took_s(database: Database) -> float:
    """From the first link of this storm to the last."""
    async with database.read() as conn:
        query = "select extract(epoch from max(connected_at) - min(connected_at))::float8 from fleet.links"
        return await conn.fetchval(query)


async def test_a_gateway_killed_under_load_gets_its_nodes_back_at_a_held_rate_and_loses_no_task(
    database: Database, tasks: Tasks, hosts: Hosts, gateway_process: tuple[GatewayProcess, str]
) -> None:
    """Row runner_ws-38 of bad_inputs.csv, with fewer nodes."""
    gateway, url = gateway_process
    starting = asyncio.create_task(gateway.start())
    identities = await asyncio.gather(*(hosts.enrol(f"sim-{number:04}", url) for number in range(NODES)))
    await starting
    seen = Executions()
    nodes = [SimulatedNode(who, gpus=2, task_s=0.02, on_task=seen.arrive) for who in identities]
    running = asyncio.create_task(simulation.run(nodes))
    # The processes' own times, so that a slow machine does not make anybody unreachable.
    sweeper = Sweeper(database, Config(heartbeat_s=10))
    try:
        await _until_linked(nodes)
        slowest_s = 0.8 * (NODES - 2) / ACCEPTS_PER_S
        assert await _took_s(database) >= slowest_s
        task_ids = await _dispatch(database, tasks, nodes)
        await gateway.kill()
        task_ids += await _dispatch(database, tasks, nodes)
        await _until_linked(nodes, standing=False)
        await gateway.start()
        await _until_linked(nodes)
        assert await _took_s(database) >= slowest_s
        task_ids += await _dispatch(database, tasks, nodes)
        await _until_succeeded(database, task_ids)
        await sweeper.sweep_nodes()
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert seen.arrivals.keys() == set(task_ids)
    async with database.read() as conn:
        states = await conn.fetch("select distinct state from fleet.nodes")
        facts = {row["type"] for row in await conn.fetch("select distinct type from kit.outbox")}
    assert [row["state"] for row in states] == ["ready"]
    assert not facts & {"fleet.node_unreachable", "fleet.node_lost"}


async def test_a_busy_gateway_says_when_to_come_back_and_the_node_does(
    gateway: Gateway, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "WAITING_MAX", 0)
    node = SimulatedNode(await hosts.enrol("sim-0001", gateway.url), gpus=1, task_s=0)
    pauses: list[float] = []
    monkeypatch.setattr(node.link, "_pace", _Noted(pauses))
    running = asyncio.create_task(node.run())
    try:
        async with asyncio.timeout(30):
            while len(pauses) < 2:
                await asyncio.sleep(0.01)
        monkeypatch.setattr(admission, "WAITING_MAX", 1)
        await _until_linked([node])
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert pauses[:2] == [1.0, 1.0]


class _Noted:
    """A pace that notes what the gateway asks for and does not wait for it."""

    def __init__(self, pauses: list[float]) -> None:
        self._pauses = pauses

    def busy(self, retry_after_s: float) -> None:
        self._pauses.append(retry_after_s)

    def pause_s(self, *, stood_s: float) -> float:
        return 0.01
