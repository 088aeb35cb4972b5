"""A batch that fails: whose fault it is, and what becomes of each message."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, MsgAlreadyAckdError

from penstock.kit.bus import Bus
from penstock.kit.errors import Unavailable
from penstock.serverless.service.consuming import together

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
