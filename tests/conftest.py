"""Real servers for all tests, started once for a run from the same wheels that `penstock up` uses."""

import asyncio
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
import uvloop

from penstock.embedded import nats, postgres, temporal
from penstock.embedded.child import free_port
from penstock.kit import bus, db
from penstock.kit.bus import EVENTS, Bus
from penstock.kit.db import Database
from penstock.kit.migrate import migrate

# A run in the background may have been started with Ctrl-C ignored, which children inherit; ours must be interruptible.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that processes run on."""
    return {"uvloop": uvloop.new_event_loop}


@dataclass(frozen=True)
class Servers:
    """Where the real servers are. `database_url` is an empty, migrated database: copy it, never write to it."""

    folder: Path
    admin_url: str
    template: str
    nats_url: str
    temporal_address: str


_IN_MEMORY = Path("/dev/shm")
_IN_MEMORY_BYTES = 4 << 30


@contextmanager
def _folder() -> Iterator[Path]:
    """A new folder, in memory where there is plenty: thousands of databases are made in it. Those of runs that were
    killed are removed: nobody holds their locks."""
    free = shutil.disk_usage(_IN_MEMORY).free if os.access(_IN_MEMORY, os.W_OK) else 0
    parent = _IN_MEMORY if free > _IN_MEMORY_BYTES else Path(tempfile.gettempdir())
    for left in parent.glob("penstock-test-*"):
        with suppress(OSError), (left / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="penstock-new-", dir=parent))
    folder = made.with_name(made.name.replace("new", "test", 1))
    with (made / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made.rename(folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
async def servers() -> AsyncIterator[Servers]:
    """Postgres, NATS and Temporal on free ports in a folder of their own."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(_folder())
        log = folder / "log"
        postgres_up, nats_up, temporal_up = await asyncio.gather(
            stack.enter_async_context(postgres.run(folder / "postgres", free_port(), log / "postgres.log")),
            stack.enter_async_context(nats.run(folder / "nats", free_port(), log / "nats.log")),
            stack.enter_async_context(temporal.run(folder / "temporal", free_port(), free_port(), log / "t.log")),
        )
        admin_url = postgres_up[0]
        await _sql(admin_url, "create database penstock_template")
        template_url = admin_url.replace("/postgres", "/penstock_template")
        await asyncio.to_thread(migrate, template_url)
        yield Servers(folder, admin_url, "penstock_template", nats_up[0], temporal_up[0])


async def _sql(url: str, statement: str) -> None:
    conn = await asyncpg.connect(url)
    try:
        await conn.execute(statement)
    finally:
        await conn.close()


@asynccontextmanager
async def fresh_database(servers: Servers) -> AsyncIterator[str]:
    """The URL of a migrated database that nobody else has."""
    name = f"test_{os.urandom(6).hex()}"
    await _sql(servers.admin_url, f"create database {name} template {servers.template} strategy file_copy")
    yield servers.admin_url.rsplit("/", 1)[0] + f"/{name}"
    await _sql(servers.admin_url, f"drop database {name} with (force)")


@pytest.fixture
async def database_url(servers: Servers) -> AsyncIterator[str]:
    """One for a single test."""
    async with fresh_database(servers) as url:
        yield url


@pytest.fixture
async def nats_bus(servers: Servers) -> AsyncIterator[Bus]:
    """A connection to NATS with the EVENTS stream empty."""
    async with bus.connect(servers.nats_url, name="test") as connected:
        await connected.ensure_stream(EVENTS)
        await connected.js.purge_stream("EVENTS")
        yield connected


@pytest.fixture
async def database(database_url: str, nats_bus: Bus) -> AsyncIterator[Database]:
    """The pool of a fresh database whose hints go to the real NATS."""
    async with db.connect(database_url, nats_bus.hint, name="test") as connected:
        yield connected
