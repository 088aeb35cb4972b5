"""One connection, through cancellations that come at bad moments."""

import asyncio
import logging

import pytest
from nats.js.api import RetentionPolicy, StreamConfig
from tests.conftest import Servers

from penstock.kit.bus import Bus, connect


async def test_it_goes_on_reading_after_a_flush_that_was_cancelled(nats_bus: Bus) -> None:
    """The pong of the cancelled flush comes all the same."""
    heard = asyncio.Event()

    async def hear(_: str, __: bytes) -> None:
        heard.set()

    await nats_bus.on_hint("test.cancelled.flush", hear)
    flush = asyncio.create_task(nats_bus.client.flush())
    await asyncio.sleep(0)
    flush.cancel()
    await asyncio.gather(flush, return_exceptions=True)
    assert flush.cancelled()

    await nats_bus.client.flush(timeout=30)
    nats_bus.hint("test.cancelled.flush")
    async with asyncio.timeout(30):
        await heard.wait()


async def test_it_closes_to_the_end_when_its_owner_is_cancelled_twice(
    servers: Servers, nats_bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """What was sent before arrives, and nothing is left to complain about."""
    said: list[bytes] = []

    async def hear(_: str, payload: bytes) -> None:
        said.append(payload)

    opened: asyncio.Future[Bus] = asyncio.get_running_loop().create_future()

    async def own() -> None:
        async with connect(servers.nats_url, name="owner") as bus:
            await bus.on_hint("test.owner.*", hear)
            opened.set_result(bus)
            await asyncio.Event().wait()

    await nats_bus.on_hint("test.owner.last", hear)
    await nats_bus.client.flush()
    owner = asyncio.create_task(own())
    bus = await opened
    await bus.client.publish("test.owner.last", b"last word")
    with caplog.at_level(logging.ERROR):
        owner.cancel()
        await asyncio.sleep(0.0005)
        owner.cancel()
        await asyncio.gather(owner, return_exceptions=True)
        assert owner.cancelled()
        assert bus.client.is_closed
    await nats_bus.client.flush()
    assert b"last word" in said
    assert not caplog.records


async def test_a_stream_that_cannot_be_changed_is_made_anew(nats_bus: Bus) -> None:
    js = nats_bus.js
    await js.add_stream(StreamConfig(name="OLD", subjects=["old.*"], deny_delete=True))
    await js.publish("old.one", b"")
    await nats_bus.ensure_stream(StreamConfig(name="OLD", subjects=["old.*"], retention=RetentionPolicy.WORK_QUEUE))
    found = await js.stream_info("OLD")
    assert (found.config.retention, found.config.deny_delete) == (RetentionPolicy.WORK_QUEUE, False)
    await js.delete_stream("OLD")
