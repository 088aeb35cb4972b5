"""The relay process, when NATS forgets everything under it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress

import pytest
from nats.js.errors import NotFoundError

from conftest import Servers
from penstock.kit import outbox
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.outbox import Event
from penstock.processes import relay


@pytest.fixture
async def running(servers: Servers, database_url: str) -> AsyncIterator[None]:
    """A relay on the test's database."""
    settings = relay.Settings(
        database_url=database_url, nats_url=servers.nats_url, ops_port=0, stream_check_s=0.1, sweep_every_s=1
    )
    async with AsyncExitStack() as stack:
        task = asyncio.create_task(relay.body(stack, settings))
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _commit(database: Database, aggregate: str) -> None:
    async with database.transaction() as tx:
        event = Event(
            type="test.happened", aggregate_id=aggregate, version=1, organisation_id=None, project_id=None, payload={}
        )
        await outbox.append(tx, event)


async def _until_published(bus: Bus, count: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with suppress(NotFoundError):
                if (await bus.js.stream_info("EVENTS")).state.messages == count:
                    return
            await asyncio.sleep(0.02)


@pytest.mark.usefixtures("running")
async def test_the_stream_is_made_again_and_publishing_goes_on(database: Database, nats_bus: Bus) -> None:
    await _commit(database, "before")
    await _until_published(nats_bus, 1)
    await nats_bus.js.delete_stream("EVENTS")
    await _commit(database, "after")
    await _until_published(nats_bus, 1)
