"""Streams on a disk that fills up and gets its space back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.embedded import nats
from penstock.embedded.child import Child, free_port
from penstock.embedded.server import running
from penstock.flows import problems
from penstock.kit import bus, db, outbox
from penstock.kit.bus import EVENTS, Bus
from penstock.kit.db import Database
from penstock.kit.outbox import Event
from penstock.kit.process import every
from penstock.kit.publish import NotStored
from penstock.kit.streamguard import StreamGuard
from penstock.processes import relay
from penstock.serverless import streams
from penstock.wire import subjects
from small_disk import full, on_small_disk
from waiting import attempts

#: Promised: everything works again so soon after there is space.
AGAIN_S = 30.0


@dataclass
class Small:
    """NATS on its small disk, and a database that knows what is wrong."""

    child: Child
    store: Path
    url: str
    bus: Bus
    database: Database

    async def problems(self) -> dict[str, str]:
        async with self.database.read() as conn:
            return {found.id: found.kind for found in await problems.find(conn)}

    async def until_problem(self, stream: str, *, there: bool) -> None:
        async for _ in attempts(0.1):
            if (stream in await self.problems()) is there:
                return
        pytest.fail(f"{stream} is {'not ' if there else ''}among {await self.problems()}")


@pytest.fixture
async def small(tmp_path: Path, database_url: str) -> AsyncIterator[Small]:
    store = tmp_path / "nats"
    server = on_small_disk(nats.prepare(store, free_port(), tmp_path / "nats.log"), store, mib=8)
    async with (
        running(server) as (url, child),
        bus.connect(url, name="test") as connected,
        db.connect(database_url, connected.hint, name="test") as database,
    ):
        yield Small(child, store, url, connected, database)


async def _until_stored(small: Small, subject: str, name: str) -> float:
    began = time.monotonic()
    async for _ in attempts():
        try:
            await small.bus.publish(subject, bytes(2000), msg_id=f"{name}{time.monotonic()}")
        except NotStored:
            continue
        return time.monotonic() - began
    pytest.fail(f"{subject} is not stored")


async def test_streams_of_functions_store_again_after_a_full_disk(small: Small) -> None:
    async def ensure() -> None:
        await streams.ensure(small.bus)

    await ensure()
    guards = [StreamGuard(small.bus, small.database, config, ensure) for config in streams.STREAMS]
    looking = [asyncio.create_task(every(1, guard.probe, name="probe")) for guard in guards]
    with full(small.child, small.store):
        for subject in (subjects.invoke("f"), subjects.result("f")):
            with pytest.raises(NotStored):
                await small.bus.publish(subject, bytes(20_000), msg_id="in-vain")
        for stream in (streams.WORK, streams.OUT):
            await small.until_problem(stream, there=True)
    took_s = [await _until_stored(small, subject, "again") for subject in (subjects.invoke("f"), subjects.result("f"))]
    assert sum(took_s) < AGAIN_S
    for stream in (streams.WORK, streams.OUT):
        await small.until_problem(stream, there=False)
    for task in looking:
        task.cancel()
    await asyncio.gather(*looking, return_exceptions=True)


async def test_events_are_published_after_a_full_disk(small: Small, database_url: str) -> None:
    settings = relay.Settings(database_url=database_url, nats_url=small.url, ops_port=0, stream_check_s=0.5)
    async with AsyncExitStack() as stack:
        running_relay = asyncio.create_task(relay.body(stack, settings))
        await _commit(small.database, "before")
        await _until_waiting(small.database, 0)
        with full(small.child, small.store):
            await _commit(small.database, "meanwhile", bytes_=50_000)
            await small.until_problem(EVENTS.name or "", there=True)
        began = time.monotonic()
        await _until_waiting(small.database, 0)
        assert time.monotonic() - began < AGAIN_S
        await small.until_problem(EVENTS.name or "", there=False)
        running_relay.cancel()
        await asyncio.gather(running_relay, return_exceptions=True)


async def test_a_refusal_with_a_reason_makes_no_stream_anew(nats_bus: Bus, database: Database) -> None:
    made: list[None] = []

    async def ensure() -> None:
        made.append(None)

    guard = StreamGuard(nats_bus, database, EVENTS, ensure, silence_s=0)
    for _ in range(3):
        await guard.refused(NotStored("maximum bytes exceeded", refusal=10077))
    assert not made
    await guard.refused(NotStored("silent"))
    await nats_bus.publish(subjects.event("test.written"), b"{}", msg_id="meanwhile")
    await guard.refused(NotStored("silent"))
    assert not made, "a stream that wrote something is slow, not broken"
    await guard.refused(NotStored("silent"))
    assert made


async def _commit(database: Database, aggregate: str, *, bytes_: int = 1) -> None:
    async with database.transaction() as tx:
        await outbox.append(
            tx,
            Event(
                type="test.happened",
                aggregate_id=aggregate,
                version=1,
                organisation_id=None,
                project_id=None,
                payload={"text": "x" * bytes_},
            ),
        )


async def _until_waiting(database: Database, count: int) -> None:
    async for _ in attempts():
        async with database.read() as conn:
            if await conn.fetchval("select count(*) from kit.waiting") == count:
                return
    pytest.fail("events still wait")
