"""A real mTLS listener in front of the real database, and agents that speak to it with real certificates."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from integration.fleet.agent import Agent, new_key, request_for
from penstock.fleet import pki
from penstock.fleet.enrolment import Addresses, Enrolment
from penstock.fleet.linkserver import LinkServer
from penstock.fleet.model import Config
from penstock.fleet.nodes import Nodes
from penstock.fleet.pki import TaskSigner
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.wire.rest import Enrolled
from penstock.wire.tasks import SecretRef


@pytest.fixture
def config() -> Config:
    """Short times."""
    return Config(heartbeat_s=0.5, lost_after_s=3.0, task_lease_s=2.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The keys of this run's fleet."""
    made = tmp_path_factory.mktemp("pki")
    pki.init(made, ["127.0.0.1", "localhost"])
    return made


@pytest.fixture
def operator() -> Caller:
    """Somebody who may do everything with nodes."""
    return Caller(
        principal_id="usr_default",
        principal_kind="user",
        display_name="Operator",
        organisation_id="org_default",
        project_id="prj_default",
        role="owner",
        actions=frozenset({"nodes.read", "nodes.write", "tasks.read"}),
        operator=True,
    )


class Holders:
    """Who holds slots, as the test says."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}

    async def holders(self, conn: Reader, node_ids: list[str]) -> dict[str, str]:
        """What the test put there."""
        return dict(self.held)


@pytest.fixture
def claims() -> Holders:
    """No slot is held."""
    return Holders()


@pytest.fixture
def nodes(claims: Holders) -> Nodes:
    """The operators' use cases."""
    return Nodes(claims)


@pytest.fixture
def tasks(folder: Path) -> Tasks:
    """Dispatches tasks."""
    return Tasks(TaskSigner.load(folder))


@pytest.fixture
def sweeper(database: Database, config: Config) -> Sweeper:
    """The fleet's timers, wound by hand."""
    return Sweeper(database, config)


@pytest.fixture
def enrolment(folder: Path, config: Config) -> Enrolment:
    """Issues certificates; the address of the link does not matter here."""
    addresses = Addresses(api_url="http://api.example", link_url="https://127.0.0.1:1")
    return Enrolment(folder, addresses, config)


Enrol = Callable[..., Awaitable[Enrolled]]


@pytest.fixture
def enrol(database: Database, enrolment: Enrolment, operator: Caller, tmp_path: Path) -> Enrol:
    """Make a node of this name; its certificate, key and CA are in `tmp_path` under its name."""

    async def make(name: str = "n1", *, gpus_approved: int = 8) -> Enrolled:
        async with database.transaction() as tx:
            token = await enrolment.create_token(tx, operator, node_name=name, gpus_approved=gpus_approved)
        key = new_key()
        async with database.transaction() as tx:
            enrolled = await enrolment.enrol(tx, token=token.token, node_name=name, csr_pem=request_for(key, name))
        Agent.save(tmp_path, name, enrolled, key)
        return enrolled

    return make


class Vault:
    """Secrets as the test says, and who asked for them."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, list[str]]] = []

    async def values(
        self, tx: Tx, *, node_id: str, allocation_id: str, refs: Sequence[SecretRef], serves: bool
    ) -> dict[str, bytes]:
        """What the test put there."""
        self.asked.append((node_id, allocation_id, [f"{ref.name}/{ref.version}" for ref in refs]))
        return {ref.name: self.kept[ref.name] for ref in refs}


@pytest.fixture
def secrets() -> Vault:
    """None."""
    return Vault()


class Gateway:
    """A running listener."""

    def __init__(self, server: LinkServer, url: str) -> None:
        self.server = server
        self.url = url


StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def start_gateway(
    database: Database, nats_bus: Bus, folder: Path, enrolment: Enrolment, config: Config, secrets: Vault
) -> AsyncIterator[StartGateway]:
    """Start as many gateways as the test wants; all end with it."""
    async with AsyncExitStack() as stack:

        async def start(gateway_id: str = "gtw_1") -> Gateway:
            server = LinkServer(
                database, nats_bus, enrolment, secrets, gateway_id=gateway_id, address=f"{gateway_id}:1", config=config
            )
            app = web.Application()
            server.add_routes(app)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=2)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=pki.server_context(folder))
            await site.start()
            loops = asyncio.create_task(server.run())
            stack.push_async_callback(_cancel, loops)
            stack.push_async_callback(server.close)
            host, port = runner.addresses[0][:2]
            return Gateway(server, f"https://{host}:{port}")

        yield start


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def gateway(start_gateway: StartGateway) -> Gateway:
    """One listener."""
    return await start_gateway()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Client connections that end with the test."""
    async with aiohttp.ClientSession() as opened:
        yield opened


Connect = Callable[..., Awaitable[Agent]]


@pytest.fixture
def connect(gateway: Gateway, session: aiohttp.ClientSession, tmp_path: Path) -> Connect:
    """Open a link with the certificate of the node of this name, up to the challenge."""

    async def dial(name: str = "n1", *, url: str | None = None) -> Agent:
        return await Agent.dial(session, url or gateway.url, tmp_path, name)

    return dial
