"""A receiver of webhooks on loopback with TLS of its own making, and all parts of notices set on it."""

import asyncio
import datetime
import ipaddress
import json
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from penstock.kit import outbox
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.outward import Outward
from penstock.notices import service
from penstock.notices.fanout import Fanout
from penstock.notices.model import Crowd, Delivery, Patience, Webhook
from penstock.notices.sender import Sender
from penstock.notices.service import Change, Webhooks
from penstock.notices.upkeep import Upkeep
from penstock.secrets import keyring
from penstock.secrets.keyring import Keyring
from penstock.secrets.vault import Vault
from penstock.wire import signature
from penstock.wire.egress import Address

HOST = "hooks.example"
LOOPBACK = ipaddress.ip_address("127.0.0.1")
PROJECT, SISTER = f"prj_{'1' * 26}", f"prj_{'2' * 26}"
#: Retries without delay, so that a test decides when each happens.
EAGER = Patience(retry_first_s=0.0, retry_max_s=0.0, failures_max=1000)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Message:
    """What came in."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        """The envelope."""
        return json.loads(self.body)

    def signed_by(self, secret: str) -> bool:
        """Whether a receiver who knows this secret would believe it."""
        return signature.verify(self.body, self.headers[signature.HEADER.lower()], secret, now=time.time())


@dataclass
class Receiver:
    """Answers 200 unless told otherwise, by path."""

    port: int = 0
    seen: list[Message] = field(default_factory=list)
    handlers: dict[str, Handler] = field(default_factory=dict)

    def url(self, path: str = "/", host: str = HOST) -> str:
        """Its address, by name."""
        return f"https://{host}:{self.port}{path}"

    def on(self, path: str, handler: Handler) -> None:
        """Answer so from now on."""
        self.handlers[path] = handler

    def answer(self, path: str, status: int, **headers: str) -> None:
        """Answer with this status from now on."""

        async def handle(_: web.Request) -> web.StreamResponse:
            return web.Response(status=status, headers=headers)

        self.on(path, handle)

    def numbers(self, path: str) -> list[int]:
        """The `n` of the events that came to this path, in order."""
        return [message.event["payload"]["n"] for message in self.seen if message.path == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Message(request.path, headers, await request.read()))
        handler = self.handlers.get(request.path)
        return await handler(request) if handler else web.Response()


def certificates(folder: Path, *, days: int = 1) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For a server of the name HOST, valid for so many days from now (or until so many ago), and for who trusts it."""
    now = datetime.datetime.now(datetime.UTC)
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, HOST)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=30))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / f"receiver{days}.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, ssl.create_default_context(cafile=str(file))


@asynccontextmanager
async def receive(server_tls: ssl.SSLContext) -> AsyncIterator[Receiver]:
    """A receiver on a free port."""
    receiver = Receiver()
    app = web.Application(client_max_size=1 << 20)
    app.router.add_route("*", "/{path:.*}", receiver.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def to_loopback(_: str, __: int) -> Sequence[Address]:
    """A name service that knows one address."""
    return [LOOPBACK]


def outward(receiver: Receiver, tls: ssl.SSLContext, **others: Any) -> Outward:
    """Strict in all but what a test has to play."""
    played = {"resolve": to_loopback, "permitted": lambda _: True, "ports": (receiver.port,), "tls": tls}
    return Outward(**(played | {"timeout_s": 10.0} | others))


def caller(project_id: str = PROJECT, *, organisation_id: str = "org_default", billing: bool = False) -> Caller:
    """Somebody who may everything with webhooks."""
    actions = {"webhooks.read", "webhooks.write"} | ({"billing.read"} if billing else set())
    return Caller(
        principal_id="usr_default",
        principal_kind="user",
        display_name="someone",
        organisation_id=organisation_id,
        project_id=project_id,
        role="admin",
        actions=frozenset(actions),
    )


@dataclass
class Stage:
    """Notices on one database, and a receiver."""

    db: Database
    receiver: Receiver
    tls: ssl.SSLContext
    vault: Vault
    folder: Path
    patience: Patience = EAGER
    crowd: Crowd = field(default_factory=Crowd)
    said: int = 0

    def sender(self, patience: Patience | None = None, **others: Any) -> Sender:
        """Another process that sends."""
        return Sender(
            self.db, outward(self.receiver, self.tls, **others), self.vault, patience or self.patience, self.crowd
        )

    @property
    def webhooks(self) -> Webhooks:
        """The use cases."""
        return Webhooks(outward(self.receiver, self.tls), self.vault, self.patience)

    async def webhook(
        self, path: str = "/", event_types: Sequence[str] = ("*",), who: Caller | None = None
    ) -> tuple[Webhook, str]:
        """A webhook to the receiver, and its secret."""
        async with self.db.transaction() as tx:
            return await self.webhooks.create(tx, who or caller(), url=self.receiver.url(path), event_types=event_types)

    async def update(self, webhook_id: str, **changes: Any) -> Webhook:
        """Change it."""
        async with self.db.transaction() as tx:
            return await service.update(tx, caller(), webhook_id, Change(**changes))

    async def show(self, webhook_id: str, project_id: str = PROJECT) -> Webhook:
        """As it is now."""
        async with self.db.read() as conn:
            return await service.show(conn, caller(project_id), webhook_id)

    async def deliveries(self, webhook_id: str, project_id: str = PROJECT) -> list[Delivery]:
        """Newest first."""
        async with self.db.read() as conn:
            return await service.list_deliveries(
                conn, caller(project_id), webhook_id, before=None, state=None, limit=500
            )

    async def say(
        self,
        *numbers: int,
        event_type: str = "provisioning.active",
        aggregate_id: str = "",
        project_id: str | None = PROJECT,
        organisation_id: str | None = "org_default",
    ) -> None:
        """Facts, each with its number."""
        events: list[Event] = []
        for number in numbers:
            self.said += 1
            events.append(
                Event(
                    type=event_type,
                    aggregate_id=aggregate_id or new_id("alc"),
                    version=self.said,
                    organisation_id=organisation_id,
                    project_id=project_id,
                    payload={"n": number},
                )
            )
        async with self.db.transaction() as tx:
            await outbox.append(tx, *events)

    async def spread(self) -> int:
        """Let everything said so far become deliveries; other databases' transactions may hold it up a moment."""
        async with asyncio.timeout(20):
            async with self.db.read() as conn:
                wanted = await conn.fetchval("select coalesce(max(tx), '0')::text from kit.outbox")
            count = 0
            while True:
                count += await Fanout(self.db, self.patience, lambda: None).spread()
                async with self.db.read() as conn:
                    if await conn.fetchval("select pg_snapshot_xmin(pg_current_snapshot()) > $1::text::xid8", wanted):
                        return count + await Fanout(self.db, self.patience, lambda: None).spread()
                await asyncio.sleep(0.01)

    async def send(self, sender: Sender | None = None, *, rounds: int = 1) -> int:
        """Send all that is due, so many times (each makes the next try due); how many were sent."""
        sender, count = sender or self.sender(), 0
        for _ in range(rounds):
            started = await sender.start()
            await sender.settle()
            count += started
        return count

    async def drain(self, sender: Sender | None = None) -> int:
        """Send until nothing is due."""
        sender, count = sender or self.sender(), 0
        async with asyncio.timeout(30):
            while sent := await self.send(sender):
                count += sent
        return count

    @property
    def upkeep(self) -> Upkeep:
        """The sweeper."""
        return Upkeep(self.db, self.patience)

    async def sql(self, statement: str, *values: object) -> Any:
        """Look, or turn the clock."""
        async with self.db.read() as conn:
            return await conn.fetchval(statement, *values)


@asynccontextmanager
async def stage_on(database: Database, folder: Path) -> AsyncIterator[Stage]:
    """Everything set up."""
    keyring.init(folder / "keys")
    server_tls, client_tls = certificates(folder)
    async with receive(server_tls) as receiver:
        yield Stage(database, receiver, client_tls, Vault(Keyring(folder / "keys")), folder)
