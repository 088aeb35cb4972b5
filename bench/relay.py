"""The relay against a bare client that publishes the same bytes, pipelined, to the same server."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.figures import Figure, bound, median_of_three, percentile, rate
from penstock.embedded import nats, postgres
from penstock.embedded.child import free_port
from penstock.kit import bus, db, outbox, relay
from penstock.kit.bus import EVENTS, Bus
from penstock.kit.db import Database
from penstock.kit.migrate import migrate
from penstock.kit.outbox import COLUMNS, Event
from penstock.kit.relay import Relay
from penstock.wire import subjects

EVENTS_COUNT = 100_000
AGGREGATES = 10_000
IDLE_SAMPLES = 300


@asynccontextmanager
async def _servers() -> AsyncIterator[tuple[Database, Bus]]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        url, _ = await stack.enter_async_context(postgres.run(folder / "postgres", free_port(), folder / "pg.log"))
        nats_url, _ = await stack.enter_async_context(nats.run(folder / "nats", free_port(), folder / "nats.log"))
        await asyncio.to_thread(migrate, url)
        connected = await stack.enter_async_context(bus.connect(nats_url, name="bench"))
        await connected.ensure_stream(EVENTS)
        yield await stack.enter_async_context(db.connect(url, connected.hint)), connected


def _event(number: int) -> Event:
    return Event(
        type="bench.happened",
        aggregate_id=f"agg_{number % AGGREGATES}",
        version=number // AGGREGATES,
        organisation_id="org_default",
        project_id="prj_default",
        payload={"number": number, "filler": "x" * 64},
    )


async def _fill(database: Database) -> None:
    async with database.transaction() as tx:
        await tx.execute("truncate kit.outbox, kit.waiting")
        await tx.conn.copy_records_to_table(
            "outbox",
            schema_name="kit",
            columns=COLUMNS.split(", "),
            records=[_event(number).columns() for number in range(EVENTS_COUNT)],
        )
    async with database.read() as conn:
        await conn.execute("vacuum analyze kit.outbox, kit.waiting")


async def _bare_rate(database: Database, connected: Bus) -> float:
    """The same bytes and message ids, from memory, without Postgres."""
    await _fill(database)
    await connected.js.purge_stream("EVENTS")
    async with database.read() as conn:
        rows = await conn.fetch("select *, payload::text as payload from kit.outbox order by seq")
    messages = [(subjects.event(row["type"]), relay.encode(row), row["event_id"]) for row in rows]
    began = time.perf_counter()
    for subject, payload, event_id in messages:
        await connected.js.publish_async(subject, payload, headers={"Nats-Msg-Id": event_id})
    await connected.js.publish_async_completed()
    return EVENTS_COUNT / (time.perf_counter() - began)


async def _relay_rate(database: Database, connected: Bus) -> float:
    await _fill(database)
    await connected.js.purge_stream("EVENTS")
    worker = Relay(database, connected)
    began = time.perf_counter()
    drained = 0
    while drained < EVENTS_COUNT:
        drained += await worker.drain()
    return EVENTS_COUNT / (time.perf_counter() - began)


async def _idle_p99_ms(database: Database, connected: Bus) -> float:
    """From the commit's return to the message at a subscriber, one event at a time."""
    arrived: asyncio.Queue[float] = asyncio.Queue()

    async def receive(_: object) -> None:
        arrived.put_nowait(time.perf_counter())

    async with database.transaction() as tx:
        await tx.execute("truncate kit.outbox, kit.waiting")
    subscription = await connected.client.subscribe(subjects.ALL_EVENTS, cb=receive)
    running = asyncio.create_task(Relay(database, connected).run())
    await asyncio.sleep(0.5)
    samples: list[float] = []
    for number in range(IDLE_SAMPLES):
        async with database.transaction() as tx:
            await outbox.append(tx, _event(EVENTS_COUNT + number))
        committed = time.perf_counter()
        samples.append((await asyncio.wait_for(arrived.get(), 10) - committed) * 1000)
        await asyncio.sleep(0.01)
    running.cancel()
    await subscription.unsubscribe()
    return percentile(samples, 0.99)


async def run() -> list[Figure]:
    """Drain rate and idle latency."""
    async with _servers() as (database, connected):
        bare = await median_of_three(lambda: _bare_rate(database, connected))
        drained = await median_of_three(lambda: _relay_rate(database, connected))
        idle = await median_of_three(lambda: _idle_p99_ms(database, connected))
    return [
        rate("relay.drain", drained, "events/s", bare, 0.5),
        bound("relay.commit_to_publish_p99", idle, "ms", 50),
    ]
