"""The relay publishes what was committed, once per message id, in order per aggregate."""

import asyncio

import msgspec

from penstock.kit import deadletters, outbox
from penstock.kit.audit import system
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.outbox import Event
from penstock.kit.relay import ATTEMPTS_MAX, Relay
from penstock.wire.events import Envelope


def fact(aggregate: str, version: int, **payload: object) -> Event:
    return Event(
        type="test.happened",
        aggregate_id=aggregate,
        version=version,
        organisation_id=None,
        project_id=None,
        payload=payload,
    )


async def published(bus: Bus) -> list[Envelope]:
    info = await bus.js.stream_info("EVENTS")
    messages = [await bus.js.get_msg("EVENTS", seq) for seq in range(info.state.first_seq, info.state.last_seq + 1)]
    return [msgspec.json.decode(message.data or b"", type=Envelope) for message in messages]


async def test_committed_events_are_published_in_order_and_rolled_back_ones_never(
    database: Database, nats_bus: Bus
) -> None:
    for version in (1, 2, 3):
        async with database.transaction() as tx:
            await outbox.append(tx, fact("a", version), fact("b", version))
    try:
        async with database.transaction() as tx:
            await outbox.append(tx, fact("a", 4))
            raise RuntimeError("roll back")
    except RuntimeError:
        pass
    assert await Relay(database, nats_bus).drain() == 6
    seen = await published(nats_bus)
    assert [event.version for event in seen if event.aggregate_id == "a"] == [1, 2, 3]
    assert [event.version for event in seen if event.aggregate_id == "b"] == [1, 2, 3]


async def test_two_relays_publish_each_event_once(database: Database, nats_bus: Bus) -> None:
    async with database.transaction() as tx:
        await outbox.append(tx, *(fact(f"agg{n % 40}", n // 40) for n in range(400)))
    relays = [Relay(database, nats_bus) for _ in range(2)]
    counts = [await asyncio.gather(*(relay.drain() for relay in relays)) for _ in range(3)]
    assert sum(map(sum, counts)) == 400
    assert len(await published(nats_bus)) == 400


async def test_a_refused_event_holds_back_its_aggregate_only_until_discarded(database: Database, nats_bus: Bus) -> None:
    async with database.transaction() as tx:
        await outbox.append(tx, fact("big", 1, filler="x" * (2 << 20)), fact("big", 2), fact("small", 1))
    relay = Relay(database, nats_bus)
    for _ in range(ATTEMPTS_MAX + 1):
        await relay.drain()
    assert [event.aggregate_id for event in await published(nats_bus)] == ["small"]
    async with database.read() as conn:
        [letter] = await deadletters.list_dead(conn, limit=10)
    assert letter.attempts == ATTEMPTS_MAX
    async with database.transaction() as tx:
        await deadletters.discard(tx, system("test"), letter.event_id)
    await relay.drain()
    assert [(event.aggregate_id, event.version) for event in await published(nats_bus)] == [
        ("small", 1),
        ("big", 2),
    ]
