"""Workers' rows, and connections as their sidecars have them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from nats.aio.msg import Msg
from nats.js.errors import NotFoundError

from penstock.kit.bus import Bus, connect
from penstock.kit.db import Database
from penstock.serverless import streams
from penstock.serverless.service.workers import token_hash
from penstock.wire import subjects


@dataclass(frozen=True)
class Worker:
    """A worker of a function, with what its sidecar knows."""

    name: str
    request: str
    token: str


async def fresh_streams(bus: Bus) -> None:
    """Whatever others have left in them is gone."""
    for stream in streams.STREAMS:
        with suppress(NotFoundError):
            await bus.js.delete_stream(stream.name or "")
    await streams.ensure(bus)


async def make_worker(database: Database, bus: Bus, request: str, number: int, *, slots: int = 1) -> Worker:
    """A worker that may connect."""
    worker = Worker(f"unit-{request}-worker-{number:08d}", request, f"token-{request}-{number}")
    async with database.transaction() as tx:
        await tx.execute(
            "insert into serverless.functions (id, project_id, organisation_id, name, current_version, serving_version,"
            " created_by, created_kind) values ($1, 'prj_default', 'org_default', $1, 1, 1, 'usr_default', 'user')"
            " on conflict do nothing",
            request,
        )
        await tx.execute(
            "insert into serverless.workers (id, function_id, project_id, request, version, allocation_id, state,"
            " slots, token_hash, mac_key, lease_until)"
            " values ($1, $2, 'prj_default', $2, 1, $1, 'ready', 1, $3, '\\x00', now() + interval '1 minute')",
            worker.name,
            request,
            token_hash(worker.token),
        )
    await streams.ensure_worker(bus, request=request, worker=worker.name, slots=slots)
    return worker


def bare(url: str) -> str:
    """The server's address without our own name and password."""
    return "nats://" + url.rpartition("@")[2]


@asynccontextmanager
async def sidecar(url: str, worker: Worker) -> AsyncIterator[Bus]:
    """Connected as the worker's sidecar connects."""
    prefix = subjects.worker_inbox(worker.name)
    async with (
        asyncio.timeout(30),
        connect(bare(url), name="sidecar", user=worker.name, password=worker.token, inbox_prefix=prefix) as bus,
    ):
        yield bus


async def refused(url: str, user: str, password: str) -> str:
    """What the server says to somebody who must not come in, before it hangs up."""
    host, _, port = bare(url).removeprefix("nats://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(20):
            await reader.readline()
            options = {"user": user, "pass": password, "verbose": False, "pedantic": False, "lang": "test"}
            writer.write(f"CONNECT {json.dumps(options)}\r\nPING\r\n".encode())
            return (await reader.read()).decode().strip()
    finally:
        writer.close()
        await writer.wait_closed()


@dataclass
class Listener:
    """Everything that came to some subjects."""

    messages: list[Msg] = field(default_factory=list)

    async def receive(self, message: Msg) -> None:
        """Keep it."""
        self.messages.append(message)


async def listen(bus: Bus, *names: str) -> Listener:
    """Hear these from now on."""
    listener = Listener()
    for name in names:
        await bus.client.subscribe(name, cb=listener.receive)
    await bus.client.flush()
    return listener
