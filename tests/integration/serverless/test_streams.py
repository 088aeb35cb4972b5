"""The streams of functions: how much of them one function can fill."""

from dataclasses import replace

import pytest

from conftest import Servers
from integration.serverless.sidecars import Worker, fresh_streams, make_worker, sidecar
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.publish import NotStored
from penstock.serverless import streams
from penstock.serverless.callout import Callout
from penstock.wire import subjects

#: All limits of OUT but the size of a message are so many times smaller: a flood is in proportion what it is in truth.
SCALE = 64
OUT = next(config for config in streams.STREAMS if config.name == streams.OUT)


@pytest.fixture
async def bus(servers: Servers, database: Database, nats_bus: Bus) -> Bus:
    """Fresh streams that nobody takes from, and somebody who says who sidecars are."""
    await fresh_streams(nats_bus)
    await Callout(database, nats_bus, (servers.folder / "nats.issuer").read_text()).serve()
    return nats_bus


async def _flood(own: Bus, subject: str, body: bytes) -> int:
    """How many of the largest messages are stored before the server refuses."""
    for number in range(1000):
        try:
            await own.publish(subject, body, msg_id=f"{subject}-{number}")
        except NotStored as error:
            if error.refusal:
                return number
            raise
    raise AssertionError("nothing was refused")


async def test_one_workers_largest_messages_leave_room_for_the_results_of_others(
    servers: Servers, database: Database, bus: Bus
) -> None:
    """While nobody takes anything, as when the database is away."""
    assert OUT.max_bytes
    assert OUT.max_msgs_per_subject
    assert OUT.max_msg_size
    scaled = replace(
        OUT, max_bytes=OUT.max_bytes // SCALE, max_msgs_per_subject=max(1, OUT.max_msgs_per_subject // SCALE)
    )
    await bus.js.update_stream(scaled)
    hostile: Worker = await make_worker(database, bus, "hostile", 1)
    quiet: Worker = await make_worker(database, bus, "quiet", 2)
    body = bytes(OUT.max_msg_size - 1024)
    async with sidecar(servers.nats_url, hostile) as own:
        for subject in (subjects.result, subjects.metrics, subjects.output):
            assert await _flood(own, subject(hostile.request), body) == scaled.max_msgs_per_subject
    async with sidecar(servers.nats_url, quiet) as own:
        for number in range(scaled.max_msgs_per_subject or 0):
            await own.publish(subjects.result(quiet.request), body, msg_id=f"quiet-{number}")


async def test_the_consumers_of_more_workers_than_a_page_of_the_server_are_all_seen(bus: Bus) -> None:
    names = {f"wrk_{number}" for number in range(300)}
    for name in names:
        await streams.ensure_worker(bus, request="req_many", worker=name, slots=1)
    assert await streams.consumers(bus, streams.WORK) >= names
