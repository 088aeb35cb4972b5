"""The gateway: the public edge (unit ports, commands) and the mTLS listener of nodes. Composition root.

Any number of replicas may run, and either listener alone (`only`). A stop drains: requests finish, then the nodes are
told to come back or go elsewhere.
"""

import asyncio
import ipaddress
import math
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Annotated, Final, Literal

import asyncpg
from aiohttp import web
from msgspec import Meta

from penstock.access.edge import Edge, EdgeConfig, server
from penstock.access.execution import Executions
from penstock.access.peers import Peers
from penstock.access.ports import Cut
from penstock.access.proxy import Proxy
from penstock.access.service import Access
from penstock.access.sessions import RECHECK_S, Sessions
from penstock.access.tunnels import CHECK_S, Tunnels
from penstock.access.upstream import Connections
from penstock.compute.model import Limits
from penstock.compute.service.advance import Advance
from penstock.compute.units import Units
from penstock.fleet import peer, pki, slots
from penstock.fleet.codeserver import CodeServer
from penstock.fleet.enrolment import Addresses, Enrolment
from penstock.fleet.linkserver import LinkServer
from penstock.fleet.model import Config
from penstock.flows.handoffs import Answers
from penstock.flows.objects import HandlersObjects, ObjectBytes, ObjectSettings, open_objects
from penstock.flows.unitcode import UnitCode
from penstock.flows.unitsecrets import UnitSecrets
from penstock.identity.authenticator import TOUCH_EVERY_S, Authenticator
from penstock.kit import bus, db, process, settings
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.door import Door, Rate
from penstock.kit.errors import Invalid, Unavailable
from penstock.kit.exchanges import CHECK_EVERY_S, Exchanges
from penstock.kit.ids import new_id
from penstock.kit.listener import Listener, listen, tls_context
from penstock.secrets.keyring import Keyring
from penstock.secrets.service import Secrets
from penstock.serverless import schemas
from penstock.serverless.edge import ATTEMPTS, FUNCTIONS, FunctionEdge
from penstock.serverless.following import Followers
from penstock.serverless.model import Limits as FunctionLimits
from penstock.serverless.schemas import Urls
from penstock.serverless.service.codes import Codes
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.unitobjects import UnitObjects
from penstock.wire import subjects

_DRAIN_S: Final = 5.0
#: Connections of nodes that may begin together, and those that may wait, as seconds of the rate that is held.
_BURST_S: Final = 0.1
_WAIT_S: Final = 2.0
_SWEEP_S: Final = 1.0
_EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104 (recognised, not bound)


class Settings(ObjectSettings, frozen=True, kw_only=True):
    """What the gateway needs to know. `advertise` is where other gateways reach the link listener."""

    database_url: str
    nats_url: str
    pki_dir: str
    secrets_dir: str
    only: Literal["", "edge", "link"] = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8081
    tls_cert: str = ""
    tls_key: str = ""
    link_host: str = "127.0.0.1"
    link_port: Annotated[int, Meta(ge=1, le=65535)] = 8443
    advertise: str = ""
    api_url: str = "http://127.0.0.1:8080"
    link_url: str = "wss://127.0.0.1:8443"
    #: Where sidecars of nodes reach NATS; told to nodes that join.
    nodes_nats_url: str = ""
    gateway_url: str = "http://127.0.0.1:8081"
    #: So many invocations of a project may wait.
    waiting_max_per_project: Annotated[int, Meta(ge=1, le=100_000_000)] = 200_000
    database_connections_max: Annotated[int, Meta(ge=2, le=200)] = 10
    trusted_proxies: str | list[str] = ""
    allowed_origins: str | list[str] = ""
    idle_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    upload_bytes_max: Annotated[int, Meta(ge=1 << 20)] = 64 << 30
    #: Told to nodes; the worker counts missed ones by the same setting.
    heartbeat_s: Annotated[float, Meta(gt=0, le=300)] = 5
    #: How many connections of nodes may begin a second; the others wait or come back.
    accepts_per_s: Annotated[float, Meta(gt=0, le=10_000)] = 200
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9101

    @property
    def address(self) -> str:
        """Host and port of the link listener as others reach it."""
        host = socket.getfqdn() if self.link_host in _EVERYWHERE else self.link_host
        return self.advertise or f"{host}:{self.link_port}"


class NodeCertificates:
    """Fleet's answer to who is at the other end."""

    def __init__(self, peers: peer.Peers) -> None:
        self._peers = peers

    async def admit(self, request: web.BaseRequest, cut: Cut) -> tuple[str, AbstractContextManager[None]]:
        """The node behind the connection; its certificate is watched while the context is entered."""
        found = await self._peers.identify(request)
        return found.node_id, self._peers.hold(found, cut)

    def is_gateway(self, request: web.BaseRequest) -> bool:
        """Whether another gateway is at the other end."""
        return peer.is_gateway(request)


async def body(stack: AsyncExitStack, settings: Settings) -> None:
    """Serve until cancelled. The stack is unwound from the last entry: edge, links, listeners, connections."""
    nats_bus = await stack.enter_async_context(bus.connect(settings.nats_url, name="gateway"))
    database = await stack.enter_async_context(
        db.connect(
            settings.database_url,
            nats_bus.hint,
            connections_max=settings.database_connections_max,
            name="gateway",
        )
    )
    await process.serve_ops(stack, settings.ops_port)
    folder = Path(settings.pki_dir)
    gateway_id = new_id("gtw")
    config = Config(heartbeat_s=settings.heartbeat_s, accepts_per_s=settings.accepts_per_s)
    addresses = Addresses(
        api_url=settings.api_url,
        link_url=settings.link_url,
        gateway_url=settings.gateway_url,
        nats_url=settings.nodes_nats_url,
    )
    enrolment = Enrolment(folder, addresses, config)
    links = LinkServer(
        database,
        nats_bus,
        enrolment,
        UnitSecrets(Units(), Secrets(Keyring(Path(settings.secrets_dir)))),
        gateway_id=gateway_id,
        address=settings.address,
        config=config,
        handoffs=Answers(Advance(slots, Limits())),
    )
    codes = CodeServer(links.peers, UnitCode(database, Units(), Codes(), open_objects(database, settings)))
    peers = Peers(_peer_tls(folder))
    stack.push_async_callback(peers.close)
    tunnels = Tunnels(database, NodeCertificates(links.peers), peers, gateway_id=gateway_id, address=settings.address)
    process.settle_memory()
    process.allow_many_files()
    async with asyncio.TaskGroup() as tasks:
        if settings.only != "edge":
            await _listen_to_nodes(stack, settings, links, tunnels, codes)
            tasks.create_task(links.run())
            tasks.create_task(process.every(CHECK_S, tunnels.check, name="tunnels_check"))
        if settings.only != "link":
            await _listen_to_people(stack, tasks, settings, database, nats_bus, tunnels)


def _peer_tls(folder: Path) -> ssl.SSLContext:
    """Gateways are known by the URI in their certificate, not by a host name."""
    context = pki.peer_context(folder)
    context.check_hostname = False
    return context


async def _listen_to_nodes(
    stack: AsyncExitStack, settings: Settings, links: LinkServer, tunnels: Tunnels, codes: CodeServer
) -> None:
    app = web.Application()
    links.add_routes(app)
    codes.add_routes(app)
    tunnels.add_routes(app)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    assert runner.server is not None
    door = Door(
        runner.server,
        tls=pki.server_context(Path(settings.pki_dir)),
        rate=Rate(per_s=settings.accepts_per_s, burst=math.ceil(settings.accepts_per_s * _BURST_S)),
        waiting_max=math.ceil(settings.accepts_per_s * _WAIT_S),
        crowded=lambda: links.crowded,
    )
    try:
        await door.open(settings.link_host, settings.link_port)
    except OSError as error:
        raise _cannot_listen(settings.link_host, settings.link_port, error) from error
    stack.push_async_callback(door.close)
    stack.push_async_callback(links.close)
    stack.push_async_callback(tunnels.close)


async def _listen_to_people(
    stack: AsyncExitStack,
    tasks: asyncio.TaskGroup,
    settings: Settings,
    database: Database,
    nats_bus: Bus,
    tunnels: Tunnels,
) -> None:
    authenticator, units = Authenticator(database), Units()
    await authenticator.watch(nats_bus)
    access = Access(database, authenticator, units)
    sessions = Sessions(database, authenticator, units)
    await _watch(nats_bus, access, sessions)
    exchanges = Exchanges(authenticator.still_valid)
    connections = Connections(tunnels.open, silent_s=settings.idle_s)
    stack.callback(connections.close)
    edge = Edge(
        access,
        sessions,
        Proxy(connections, upload_bytes_max=settings.upload_bytes_max),
        Executions(access, sessions, tunnels.open),
        config=_edge_config(settings),
        ready=lambda: _answers(database),
        others=await _functions(stack, settings, database, nats_bus, authenticator, exchanges),
    )
    await _open(stack, settings, server(edge))
    tasks.create_task(process.every(RECHECK_S, sessions.recheck, name="sessions_recheck"))
    tasks.create_task(process.every(CHECK_EVERY_S, exchanges.recheck, name="exchanges_recheck"))
    tasks.create_task(process.every(_SWEEP_S, connections.sweep, name="connections_sweep"))
    tasks.create_task(process.every(TOUCH_EVERY_S, authenticator.touch, name="touch_keys"))


async def _open(stack: AsyncExitStack, settings: Settings, public: Listener) -> None:
    runner = web.ServerRunner(public, shutdown_timeout=_DRAIN_S)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    tls = tls_context(settings.tls_cert, settings.tls_key, field="gateway.tls_cert")
    try:
        sockets = await listen(public, settings.host, settings.port, tls=tls)
    except OSError as error:
        raise _cannot_listen(settings.host, settings.port, error) from error
    stack.callback(sockets.close)


async def _functions(
    stack: AsyncExitStack,
    settings: Settings,
    database: Database,
    nats_bus: Bus,
    authenticator: Authenticator,
    exchanges: Exchanges,
) -> Mapping[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]]:
    """The ingress of functions, by prefix."""
    objects = ObjectBytes(open_objects(database, settings))
    invoker = Invoker(
        database,
        nats_bus,
        objects,
        FunctionLimits(waiting_max_per_project=settings.waiting_max_per_project),
        still_valid=authenticator.still_valid,
    )
    await invoker.start()
    urls = Urls(api_url=settings.api_url, gateway_url=settings.gateway_url)
    followers = Followers(database, authenticator.still_valid, lambda shown: schemas.invocation(shown, urls))
    await followers.watch(nats_bus)
    stack.callback(followers.close)
    # Apart from payloads and results, so that uploads of handlers do not take their places.
    handlers = UnitObjects(HandlersObjects(open_objects(database, settings)))
    edge = FunctionEdge(database, authenticator, invoker, objects, followers, handlers, exchanges)
    return {FUNCTIONS: edge.call, ATTEMPTS: edge.attempt}


async def _watch(nats_bus: Bus, access: Access, sessions: Sessions) -> None:
    """Hints make it quick; what they miss is found by the regular checks."""

    async def allocation_changed(subject: str, _: bytes) -> None:
        allocation_id = subjects.last_token(subject)
        access.forget(allocation_id)
        await sessions.recheck_allocation(allocation_id)

    async def revoked(_: str, __: bytes) -> None:
        access.forget()
        await sessions.recheck_keys()
        access.forget()

    await nats_bus.on_hint(subjects.ALL_ALLOCATIONS, allocation_changed)
    await nats_bus.on_hint(subjects.REVOKED, revoked)


async def _answers(database: Database) -> bool:
    try:
        async with database.read() as conn:
            return bool(await conn.fetchval("select true"))
    except (Unavailable, asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        return False


def _cannot_listen(host: str, port: int, error: OSError) -> Unavailable:
    return Unavailable(f"cannot listen on {host}:{port}: {error.strerror}")


def _edge_config(settings: Settings) -> EdgeConfig:
    try:
        proxies = [ipaddress.ip_network(text, strict=False) for text in _texts(settings.trusted_proxies)]
    except ValueError as error:
        raise Invalid(f"trusted_proxies: {error}", field="gateway.trusted_proxies") from error
    return EdgeConfig(
        allowed_origins=frozenset(_texts(settings.allowed_origins)),
        trusted_proxies=proxies,
        upload_bytes_max=settings.upload_bytes_max,
    )


def _texts(value: str | list[str]) -> list[str]:
    """A list, or its members separated by commas as environments have them."""
    if isinstance(value, list):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "gateway", os.environ)
    process.main(
        "gateway",
        lambda stack: body(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )
