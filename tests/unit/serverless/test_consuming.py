"""A batch that fails: whose fault it is, and what becomes of each message."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, MsgAlreadyAckdError

from penstock.kit.bus import Bus
from penstock.kit.errors import Unavailable
from penstock.kit.pull import InProgress, Pull
from penstock.serverless.service import consuming
from penstock.serverless.service.consuming import Consumer, together

ACK, TERM = b"", b"+TERM"


class Recorder:
    """A connection (and its bus) that only remembers what was published."""

    def __init__(self) -> None:
        self.client = self
        self.sent: list[tuple[str, bytes]] = []

    async def publish(self, subject: str, payload: bytes = b"", **_: Any) -> None:
        self.sent.append((subject, payload))

    def message(self, name: str, *, delivered: int = 1) -> Msg:
        reply = f"$JS.ACK.OUT.results.{delivered}.{len(name)}.1.1700000000000000000.{name}"
        return Msg(_client=cast("Any", self), subject="runtime.serverless.result.f", data=name.encode(), reply=reply)

    def said(self, message: Msg) -> list[bytes]:
        return [payload for subject, payload in self.sent if subject == message.reply]


class Taker:
    """Acknowledges all but those that it was told to fail at."""

    def __init__(self, **failures: Exception) -> None:
        self.failures = {name.encode(): error for name, error in failures.items()}
        self.batches: list[list[bytes]] = []

    async def __call__(self, messages: Sequence[Msg]) -> None:
        self.batches.append([message.data for message in messages])
        for message in messages:
            if message.data in self.failures:
                raise self.failures[message.data]
            await message.ack()


@pytest.mark.parametrize(
    "error",
    [Unavailable("away"), TimeoutError(), ConnectionResetError(), ConnectionClosedError(), MsgAlreadyAckdError()],
)
async def test_an_outage_holds_what_is_not_settled_and_gives_nothing_up(error: Exception) -> None:
    bus = Recorder()
    held = batch = [bus.message(name, delivered=5) for name in ("1", "2", "3")]
    batch, taker = list(batch), Taker(**{"2": error})
    with pytest.raises(type(error)):
        await together(cast("Bus", bus), held, taker)
    assert held == batch[1:]
    assert [bus.said(message) for message in batch] == [[ACK], [], []]
    taker.failures.clear()
    await together(cast("Bus", bus), held, taker)
    assert held == []
    assert [bus.said(message) for message in batch] == [[ACK], [ACK], [ACK]]


async def test_an_outage_among_single_messages_holds_the_failed_and_the_rest() -> None:
    bus = Recorder()
    batch = [bus.message(name, delivered=5) for name in ("1", "2", "3", "4")]
    held, taker = list(batch), Taker(**{"1": ValueError("poison"), "3": Unavailable("away")})
    with pytest.raises(Unavailable):
        await together(cast("Bus", bus), held, taker)
    assert held == [batch[0], batch[2], batch[3]]
    assert [bus.said(message) for message in batch] == [[], [ACK], [], []]


async def test_a_message_that_was_settled_before_its_batch_failed_is_not_touched_again() -> None:
    bus = Recorder()
    batch = [bus.message(name, delivered=5) for name in ("1", "2", "3")]
    held, taker = list(batch), Taker(**{"2": ValueError("poison")})
    await together(cast("Bus", bus), held, taker)
    assert taker.batches == [[b"1", b"2", b"3"], [b"2"], [b"3"]]
    assert [bus.said(message) for message in batch] == [[ACK], [TERM], [ACK]]
    assert held == []


async def test_a_message_is_buried_after_the_good_ones_were_taken() -> None:
    bus = Recorder()
    batch = [bus.message(name, delivered=5) for name in ("1", "2")]
    await together(cast("Bus", bus), list(batch), Taker(**{"1": ValueError("poison")}))
    subjects = [subject for subject, _ in bus.sent]
    assert subjects == [batch[1].reply, "runtime.serverless.dlq.result.f", batch[0].reply]


class Waiting:
    """A pull with these batches, and nothing after them."""

    def __init__(self, *batches: list[Msg]) -> None:
        self.batches = list(batches)

    async def take(self, most: int) -> list[Msg]:
        if not self.batches:
            await asyncio.Event().wait()
        batch = self.batches.pop(0)
        assert len(batch) <= most
        return batch


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consuming, "_AGAIN_MAX_S", 0.001)
    monkeypatch.setattr(consuming, "_OTHERS_S", 0.01)


def _consumer(bus: Recorder, pull: Waiting, taker: Taker) -> Consumer:
    return Consumer(cast("Bus", bus), cast("Pull", pull), InProgress(), taker)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("place", range(3))
async def test_a_message_that_alone_is_too_slow_for_the_database_holds_up_no_other(place: int) -> None:
    bus = Recorder()
    first = [bus.message(name, delivered=5) for name in ("1", "2", "3")]
    later = [bus.message(name) for name in ("4", "5")]
    taker = Taker(**{str(place + 1): Unavailable("too slow")})
    consumer = _consumer(bus, Waiting(first, later), taker)
    for _ in range(6):
        async with asyncio.timeout(1):
            await consumer.turn()
        if bus.said(first[place]):
            break
    assert [bus.said(each) for each in first if each is not first[place]] == [[ACK], [ACK]]
    assert bus.said(first[place]) == [TERM]


@pytest.mark.usefixtures("impatient")
async def test_an_outage_of_any_length_gives_no_message_up() -> None:
    bus = Recorder()
    batch = [bus.message(name, delivered=5) for name in ("1", "2", "3")]
    taker = Taker(**{name: Unavailable("away") for name in ("1", "2", "3", "4")})
    consumer = _consumer(bus, Waiting(batch, [bus.message("4")]), taker)
    for _ in range(20):
        await consumer.turn()
    assert not any(bus.said(each) for each in batch)
    taker.failures.clear()
    await consumer.turn()
    assert [bus.said(each) for each in batch] == [[ACK], [ACK], [ACK]]
