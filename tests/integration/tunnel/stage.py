"""Real gateways, a real node tunnel over mTLS and real servers behind it; only the sandbox is missing."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from penstock.embedded.child import free_port
from penstock.fleet.enrolment import Addresses, Enrolment
from penstock.fleet.model import Config
from penstock.identity.authenticator import Authenticator
from penstock.identity.bootstrap import bootstrap
from penstock.identity.model import LOCAL_ADMIN, Claims, Provider, Role
from penstock.identity.service import keys, providers, sessions
from penstock.identity.service.providers import NewMapping
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader
from penstock.kit.ids import new_id
from penstock.node import identity as node_identity
from penstock.node.errors import NoUnit, Refused
from penstock.node.identity import Identity
from penstock.node.tunnel import NodeTunnel
from penstock.processes import gateway
from penstock.wire.rest import EnrolRequest
from penstock.wire.tunnel import ExecExit
from waiting import attempts

UNIT_PORT = 8000


class LocalExecution:
    """A command of this host."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child

    async def wait(self) -> ExecExit:
        code = await self.child.wait()
        return ExecExit(code=code if code >= 0 else 128 - code, exit_class="exited" if code >= 0 else "killed")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


class LocalUnits:
    """Units whose ports are ports of this host and whose commands run here."""

    def __init__(self, unit_id: str) -> None:
        self.unit_id = unit_id
        self.ports: dict[int, int] = {}
        self.connects = 0
        self.executions: list[LocalExecution] = []

    async def connect_port(self, unit_id: str, port: int) -> socket.socket:
        self._check(unit_id)
        if port not in self.ports:
            raise Refused("refused", f"nothing listens on {port}")
        self.connects += 1
        connected = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connected.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", self.ports[port]))
        except BaseException:
            connected.close()
            raise
        return connected

    async def execute(
        self,
        unit_id: str,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> LocalExecution:
        self._check(unit_id)
        if "LD_PRELOAD" in env:
            raise Refused("reserved_env", "the variable LD_PRELOAD is reserved")
        child = await asyncio.create_subprocess_exec(
            *argv,
            env={"PATH": os.environ["PATH"], **env},
            cwd=cwd or None,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        execution = LocalExecution(child)
        self.executions.append(execution)
        return execution

    def _check(self, unit_id: str) -> None:
        if unit_id != self.unit_id:
            raise NoUnit(unit_id)


@dataclass
class Gateway:
    """One gateway process, run in this loop."""

    settings: gateway.Settings
    stack: AsyncExitStack
    task: "asyncio.Task[None]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.port}"

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.stack.aclose()


@dataclass
class World:
    """Everything, with one active allocation whose unit is `units`."""

    database: Database
    database_url: str
    nats_url: str
    folder: Path
    key: str = ""
    allocation_id: str = field(default_factory=lambda: new_id("alc"))
    node_id: str = ""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    gateways: list[Gateway] = field(default_factory=list[Gateway])
    tunnel: "asyncio.Task[None] | None" = None
    identity: Identity | None = None

    def __post_init__(self) -> None:
        self.units = LocalUnits(f"unit-{self.allocation_id}")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def base(self) -> str:
        return self.at(self.gateways[0])

    def at(self, through: Gateway, port: int = UNIT_PORT) -> str:
        return f"{through.url}/u/{self.allocation_id}/{port}"

    async def set_up(self) -> None:
        async with self.database.transaction() as tx:
            self.key = await bootstrap(tx) or ""
        await self.add_gateway()
        await self.add_node()
        await self.set_state("active")
        await self.connect_node()

    async def add_gateway(self, **settings: Any) -> Gateway:
        values: dict[str, Any] = {
            "database_url": self.database_url,
            "nats_url": self.nats_url,
            "pki_dir": str(self.folder),
            "secrets_dir": str(self.folder / "secrets"),
            "objects_url": (self.folder / "objects").absolute().as_uri(),
            "port": free_port(),
            "link_port": free_port(),
            "ops_port": 0,
            "database_connections_max": 4,
        }
        made = gateway.Settings(**(values | settings))
        stack = AsyncExitStack()
        started = Gateway(made, stack, asyncio.create_task(gateway.body(stack, made)))
        self.gateways.append(started)
        await listening(made.link_port if made.only == "link" else made.port, started.task)
        return started

    async def add_node(self) -> None:
        link_url = f"wss://127.0.0.1:{self.gateways[0].settings.link_port}"
        enrolment = Enrolment(self.folder, Addresses(api_url="http://127.0.0.1:1", link_url=link_url), Config())
        async with self.database.transaction() as tx:
            token = await enrolment.create_token(tx, OPERATOR, node_name="local", gpus_approved=1)
        async with enrolment_api(self.database, enrolment) as api_url:
            self.identity = await node_identity.enrol(
                self.folder / "node", api_url=api_url, token=token.token, node_name="local"
            )
        self.node_id = self.identity.node_id

    async def connect_node(self) -> None:
        assert self.identity is not None
        self.tunnel = asyncio.create_task(NodeTunnel(self.identity, self.units).run())
        await self.until_connected()

    async def until_connected(self) -> None:
        async for _ in attempts():
            async with self.database.read() as conn:
                if await conn.fetchval("select true from access.tunnels where node_id = $1", self.node_id):
                    return
        raise AssertionError("the node did not connect")

    async def disconnect_node(self) -> None:
        assert self.tunnel is not None
        self.tunnel.cancel()
        await asyncio.gather(self.tunnel, return_exceptions=True)

    async def set_state(self, state: str, *, project_id: str = "prj_default") -> None:
        async with self.database.transaction() as tx:
            await tx.execute(
                await allocation_statement(tx),
                self.allocation_id,
                state,
                self.node_id,
                self.units.unit_id,
                project_id,
                state == "active",
            )

    async def new_key(self, role: Role = Role.OWNER) -> tuple[str, str]:
        """A further key of the administrator: its id and secret."""
        async with self.database.transaction() as tx:
            key, secret = await keys.mint(
                tx,
                audit.system("test"),
                name="further",
                role=role,
                principal_id=LOCAL_ADMIN,
                organisation_id="org_default",
                project_id="prj_default",
            )
        return key.id, secret

    async def new_session(self) -> tuple[str, str]:
        """A login of a person whose group makes them a developer: its id and secret."""
        caller = await Authenticator(self.database).authenticate(f"Bearer {self.key}", None)
        provider = Provider(
            name="corp",
            issuer="https://id.example",
            client_id="penstock",
            client_secret="",
            audiences=[],
            scopes=["openid"],
            groups_claim="groups",
            session_s=600,
            enabled=True,
        )
        mapping = NewMapping(
            group="devs", role=Role.DEVELOPER, project_id="prj_default", organisation_id=None, operator=False
        )
        claims = Claims(
            issuer=provider.issuer, subject="ada", display_name="Ada", groups=("devs",), nonce=None, expires=0
        )
        person = await Authenticator(self.database).tokens.person(claims)
        async with self.database.transaction() as tx:
            await providers.put(tx, caller, provider)
            await providers.map_group(tx, caller, "corp", mapping)
            opened = await sessions.create(tx, provider, claims, person, "a.b.c")
        return opened.session.id, opened.secret

    async def end_session(self, session_id: str) -> None:
        """As an operator ends it."""
        caller = await Authenticator(self.database).authenticate(f"Bearer {self.key}", None)
        async with self.database.transaction() as tx:
            await sessions.revoke(tx, caller, session_id)

    async def revoke(self, key_id: str) -> None:
        caller = await Authenticator(self.database).authenticate(f"Bearer {self.key}", None)
        async with self.database.transaction() as tx:
            await keys.revoke(tx, caller, key_id)

    @asynccontextmanager
    async def serving(
        self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], port: int = UNIT_PORT
    ) -> AsyncIterator[None]:
        """An aiohttp server in the unit."""
        runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0.2)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.units.ports[port] = runner.addresses[0][1]
        try:
            yield
        finally:
            del self.units.ports[port]
            await runner.cleanup()

    @asynccontextmanager
    async def serving_raw(
        self,
        handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        port: int = UNIT_PORT,
    ) -> AsyncIterator[None]:
        """A bare TCP server in the unit."""
        server = await asyncio.start_server(handler, "127.0.0.1", 0)
        self.units.ports[port] = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            del self.units.ports[port]
            server.close()

    async def tear_down(self) -> None:
        if self.tunnel is not None:
            await self.disconnect_node()
        for each in self.gateways:
            await each.stop()


OPERATOR = Caller(
    principal_id="usr_default",
    principal_kind="user",
    display_name="Operator",
    organisation_id="org_default",
    project_id="prj_default",
    role="owner",
    actions=frozenset({"nodes.read", "nodes.write"}),
    operator=True,
)
#: What the gateway reads of an allocation is given; all else is empty.
GIVEN = ("id", "state", "node_id", "unit_id", "project_id", "deadline_at")
EMPTY = {"text": "''", "jsonb": "'[]'", "ARRAY": "'{}'", "boolean": "false"}


async def allocation_statement(conn: Reader) -> str:
    rows = await conn.fetch(
        "select column_name as name, data_type as type from information_schema.columns where table_schema = 'compute'"
        " and table_name = 'allocations' and is_nullable = 'NO' and column_default is null"
    )
    rest = {row["name"]: EMPTY.get(row["type"], "1") for row in rows if row["name"] not in GIVEN}
    rest |= {"purpose": "'interactive'", "labels": "'{}'", "env": "'{}'"}
    return (
        f"insert into compute.allocations ({', '.join((*GIVEN, *rest))}) values ($1, $2, $3, $4, $5,"
        f" case when $6 then null else now() end, {', '.join(rest.values())})"
        " on conflict (id) do update set state = $2, deadline_at = excluded.deadline_at"
    )


@asynccontextmanager
async def enrolment_api(database: Database, enrolment: Enrolment) -> AsyncIterator[str]:
    """The one route of the api that a node needs."""

    async def handler(request: web.BaseRequest) -> web.Response:
        wanted = msgspec.json.decode(await request.read(), type=EnrolRequest)
        async with database.transaction() as tx:
            enrolled = await enrolment.enrol(tx, token=wanted.token, node_name=wanted.node_name, csr_pem=wanted.csr_pem)
        return web.Response(status=201, body=msgspec.json.encode(enrolled), content_type="application/json")

    runner = web.ServerRunner(web.Server(handler, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def listening(port: int, task: "asyncio.Task[None]") -> None:
    async for _ in attempts():
        if task.done():
            task.result()
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
    raise AssertionError(f"nothing listens on {port}")


async def send_raw(gateway_url: str, data: bytes) -> bytes:
    """What a client gets for bytes that no decent client would send, until the connection closes."""
    host, _, port = gateway_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


def error_of(body: Any) -> str:
    """The code in an error envelope, whose whole shape is checked."""
    assert set(body) == {"error"}
    assert {"code", "message", "correlation_id"} <= set(body["error"])
    return body["error"]["code"]


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
