"""A durable consumer's messages, through everything that may happen to the server."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig

from penstock.embedded import nats
from penstock.embedded.ports import free_port
from penstock.kit import pull as pulling
from penstock.kit.bus import Bus, connect
from penstock.kit.publish import NotStored
from penstock.kit.pull import InProgress, Pull

_STREAM, _CONSUMER, _SUBJECT = "PULLED", "reader", "pulled.one"


async def _ensure(bus: Bus, *, ack_wait_s: float = 30) -> None:
    await bus.ensure_stream(StreamConfig(name=_STREAM, subjects=["pulled.*"]))
    await bus.js.add_consumer(
        _STREAM, ConsumerConfig(durable_name=_CONSUMER, ack_policy=AckPolicy.EXPLICIT, ack_wait=ack_wait_s)
    )


@pytest.fixture
async def bus(nats_bus: Bus) -> AsyncIterator[Bus]:
    """With an empty stream and its consumer."""
    await _ensure(nats_bus)
    yield nats_bus
    await nats_bus.js.delete_stream(_STREAM)


def _pull(bus: Bus, batch: int = 8, expires_s: float = 30.0) -> Pull:
    return Pull(bus, stream=_STREAM, consumer=_CONSUMER, batch=batch, ensure=lambda: _ensure(bus), expires_s=expires_s)


async def _publish(bus: Bus, *bodies: str) -> None:
    """Until the stream has them: it may be away just now."""
    async with asyncio.timeout(30):
        for body in bodies:
            while True:
                try:
                    await bus.publish(_SUBJECT, body.encode(), msg_id=body)
                    break
                except NotStored:
                    await asyncio.sleep(0.05)


async def _take(pull: Pull, number: int, *, most: int = 100) -> list[Msg]:
    taken: list[Msg] = []
    async with asyncio.timeout(30):
        while len(taken) < number:
            taken += await pull.take(most)
    return taken


def _bodies(messages: list[Msg]) -> list[str]:
    return [message.data.decode() for message in messages]


async def test_one_message_does_not_wait_for_others(bus: Bus) -> None:
    async with _pull(bus, batch=100) as pull:
        await _publish(bus, "alone")
        async with asyncio.timeout(15):
            (message,) = await pull.take(100)
    assert message.data == b"alone"


async def test_what_came_together_is_taken_together_up_to_the_most(bus: Bus) -> None:
    await _publish(bus, *map(str, range(10)))
    async with _pull(bus, batch=16) as pull:
        async with asyncio.timeout(30):
            while len(pull._ready) < 10:
                await asyncio.sleep(0.01)
        assert _bodies(await pull.take(6)) == [str(number) for number in range(6)]
        assert _bodies(await pull.take(6)) == [str(number) for number in range(6, 10)]


@pytest.mark.parametrize("batch", [1, 7])
async def test_requests_are_renewed_and_what_waits_is_bounded(bus: Bus, batch: int) -> None:
    await asyncio.gather(*(bus.publish(_SUBJECT, b"x", msg_id=str(number)) for number in range(100)))
    most = 0
    async with _pull(bus, batch=batch) as pull:
        seen: list[int] = []
        async with asyncio.timeout(30):
            while len(seen) < 100:
                most = max(most, len(pull._ready))
                for message in await pull.take(3):
                    seen.append(message.metadata.sequence.stream)
                    await message.ack()
        assert pull._failures == 0
    assert seen == sorted(set(seen))
    assert most <= batch


async def test_a_request_whose_time_is_over_is_made_again(bus: Bus) -> None:
    async with _pull(bus, expires_s=0.3) as pull:
        async with asyncio.timeout(30):
            while pull._count < 3:
                await asyncio.sleep(0.02)
        await _publish(bus, "late")
        assert _bodies(await _take(pull, 1)) == ["late"]


async def test_a_deleted_consumer_is_made_again(bus: Bus) -> None:
    async with _pull(bus) as pull:
        await _publish(bus, "first")
        await (await _take(pull, 1))[0].ack_sync()
        await bus.js.delete_consumer(_STREAM, _CONSUMER)
        await _publish(bus, "second")
        assert _bodies(await _take(pull, 2)) == ["first", "second"]


async def test_a_request_that_got_lost_is_noticed_by_the_silence(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "_HEARTBEAT_S", 0.1)
    monkeypatch.setattr(pulling, "_SILENCE_S", 0.5)
    pull = _pull(bus)
    pull._next, real = "nobody.listens", pull._next
    heard = await bus.client.subscribe("nobody.listens")
    async with pull:
        async with asyncio.timeout(15):
            await heard.next_msg(timeout=15)
        pull._next = real
        await _publish(bus, "found")
        assert _bodies(await _take(pull, 1)) == ["found"]
    await heard.unsubscribe()


async def test_what_is_no_message_of_the_consumer_is_dropped(bus: Bus) -> None:
    async with _pull(bus) as pull:
        inbox = f"{pull._inbox}1"
        await bus.client.publish(inbox, b"forged")
        await bus.client.publish(inbox, b"forged", reply="$JS.ACK.PULLED.other.1.1.1.1.0")
        await bus.client.publish(inbox, b"forged", reply="$JS.ACK.PULLED.readers.1.1.1.1.0")
        await _publish(bus, "real")
        assert _bodies(await _take(pull, 1)) == ["real"]


async def test_what_nobody_took_is_given_back(bus: Bus) -> None:
    async with _pull(bus) as pull:
        await _publish(bus, "first", "second")
        async with asyncio.timeout(30):
            while len(pull._ready) < 2:
                await asyncio.sleep(0.01)
        assert len(await pull.take(1)) == 1
    async with _pull(bus) as again:
        assert _bodies(await _take(again, 1)) == ["second"]


async def test_a_message_that_takes_long_is_not_delivered_again_while_it_is_held(bus: Bus) -> None:
    await _ensure(bus, ack_wait_s=1)
    async with _pull(bus) as pull, InProgress(every_s=0.2) as held:
        await _publish(bus, "long")
        (message,) = await _take(pull, 1)
        held.hold(message)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.2):
                await pull.take(1)
        held.let_go(message)
        (again,) = await _take(pull, 1)
        assert (again.data, again.metadata.num_delivered) == (b"long", 2)


async def test_a_message_that_waits_to_be_taken_is_not_delivered_again(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "IN_PROGRESS_EVERY_S", 0.2)
    await _ensure(bus, ack_wait_s=1)
    async with _pull(bus) as pull:
        await _publish(bus, "patient")
        await asyncio.sleep(2.5)
        (message,) = await _take(pull, 1)
        assert message.metadata.num_delivered == 1
        await message.ack_sync()
        info = await bus.js.consumer_info(_STREAM, _CONSUMER)
        assert (info.num_redelivered, info.num_ack_pending) == (0, 0)


@asynccontextmanager
async def _server(folder: Path, port: int) -> AsyncIterator[str]:
    async with nats.run(folder / "nats", port, folder / "log") as (url, _):
        yield url


async def test_it_goes_on_after_the_server_was_away_and_after_its_store_was_deleted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    port = free_port()
    async with _server(tmp_path, port) as url:
        stack = connect(url, name="test")
        bus = await stack.__aenter__()
        await _ensure(bus)
        pull = await _pull(bus).__aenter__()
        await _publish(bus, "before")
        (before,) = await _take(pull, 1)
        await before.ack_sync()
    async with _server(tmp_path, port):
        await _publish(bus, "restarted")
        (message,) = await _take(pull, 1)
        assert message.data == b"restarted"
        await message.ack_sync()
    shutil.rmtree(tmp_path / "nats")
    async with _server(tmp_path, port):
        await _publish(bus, "restored")
        assert _bodies(await _take(pull, 1)) == ["restored"]
        await pull.__aexit__(None, None, None)
        await stack.__aexit__(None, None, None)
