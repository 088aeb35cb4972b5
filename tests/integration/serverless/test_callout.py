"""Who may connect as a worker, and what it may do: in its own account, with exactly its own subjects."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from nats.aio.msg import Msg

from conftest import Servers
from integration.serverless.sidecars import Worker, bare, fresh_streams, listen, make_worker, refused, sidecar
from penstock.kit.bus import Bus, connect
from penstock.kit.db import Database
from penstock.kit.publish import BadMessage, MessageTooLarge, NotStored
from penstock.kit.pull import Pull
from penstock.serverless import callout, streams
from penstock.serverless.callout import Callout
from penstock.wire import subjects
from penstock.wire.serverless import WORKER_MESSAGE_BYTES_MAX


@pytest.fixture
async def bus(servers: Servers, database: Database, nats_bus: Bus) -> Bus:
    """Fresh streams, and somebody who says who sidecars are."""
    await fresh_streams(nats_bus)
    await Callout(database, nats_bus, (servers.folder / "nats.issuer").read_text()).serve()
    return nats_bus


@pytest.fixture
async def workers(database: Database, bus: Bus) -> tuple[Worker, Worker]:
    """Two, of two functions."""
    return await make_worker(database, bus, "first", 1), await make_worker(database, bus, "second", 2)


async def _violations(bus: Bus, act: Callable[[], Awaitable[object]]) -> list[str]:
    """What the server refused of `act`; the connection stays."""
    said: list[str] = []

    async def on_error(error: Exception) -> None:
        said.append(str(error))

    bus.client._error_cb = on_error
    await act()
    await bus.client.flush()
    assert bus.client.is_connected
    assert bus.client.stats["reconnects"] == 0
    return said


async def test_a_worker_takes_its_attempt_and_answers_through_its_own_account(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    worker, _ = workers
    subject = subjects.dispatch(worker.request, worker.name)
    async with (
        sidecar(servers.nats_url, worker) as own,
        Pull(own, stream=streams.WORK, consumer=worker.name, batch=4) as pull,
    ):
        await bus.publish(subject, b"attempt", msg_id="d1", headers={"Penstock-Mac": "m"})
        (message,) = await pull.take(10)
        assert (message.subject, message.data, message.headers["Penstock-Mac"]) == (subject, b"attempt", "m")
        stored = await own.publish(subjects.result(worker.request), b"result", msg_id="r1")
        assert stored.stream == streams.OUT
        again = await own.publish(subjects.result(worker.request), b"result", msg_id="r1")
        assert (again.duplicate, again.seq) == (True, stored.seq)
        await message.ack_sync()
    assert (await bus.js.stream_info(streams.WORK)).state.messages == 0
    kept = await bus.js.get_msg(streams.OUT, stored.seq)
    assert (kept.subject, kept.data) == (subjects.result(worker.request), b"result")


async def test_a_worker_is_let_in_however_long_it_takes_to_say_who_it_is(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two seconds the server asks for a sign of life, before it answers; after three it gives up."""
    identity = Callout._identity

    async def slowly(self: Callout, asked: callout.Asked) -> str | None:
        await asyncio.sleep(2.6)
        return await identity(self, asked)

    monkeypatch.setattr(Callout, "_identity", slowly)
    async with sidecar(servers.nats_url, workers[0]) as own:
        async with asyncio.timeout(30):
            while not own.client.is_connected:
                await asyncio.sleep(0.01)
        assert (await own.publish(subjects.result(workers[0].request), b"", msg_id="slow")).stream == streams.OUT
        await own.client.flush()
        assert own.client.stats["reconnects"] == 0


async def test_orders_and_answers_reach_the_worker_that_they_are_for(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    first, second = workers
    async with sidecar(servers.nats_url, first) as own, sidecar(servers.nats_url, second) as other:
        heard = await listen(
            own, subjects.control(first.request, first.name), subjects.call_answer(first.request, first.name)
        )
        others = await listen(other, subjects.control(second.request, second.name))
        calls = await listen(bus, subjects.CALLS)
        await bus.client.publish(subjects.control(first.request, first.name), b"stop")
        await bus.client.publish(subjects.call_answer(first.request, first.name), b"answer")
        await own.client.publish(subjects.call(first.request, first.name), b"call")
        await _until(lambda: len(heard.messages) == 2 and len(calls.messages) == 1)
        assert [message.data for message in heard.messages] == [b"stop", b"answer"]
        assert others.messages == []


async def test_strangers_stay_out_and_learn_nothing(servers: Servers, bus: Bus, workers: tuple[Worker, Worker]) -> None:
    first, second = workers
    for user, password in (
        ("", ""),
        ("penstock", "wrong"),
        (first.name, second.token),
        (first.name, ""),
        ("nobody", first.token),
        (f"{first.name}\0", first.token),
    ):
        assert await refused(servers.nats_url, user, password) == "-ERR 'Authorization Violation'", user


async def test_a_worker_that_is_gone_stays_out(
    servers: Servers, database: Database, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    worker, _ = workers
    async with database.transaction() as tx:
        await tx.execute("update serverless.workers set state = 'gone', gone_at = now() where id = $1", worker.name)
    assert "Authorization Violation" in await refused(servers.nats_url, worker.name, worker.token)
    await streams.forget_worker(bus, worker.name)
    await streams.forget_worker(bus, worker.name)


async def test_an_identity_ends_and_is_asked_for_again(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = workers
    monkeypatch.setattr(callout, "LIFE_S", 1)
    async with (
        sidecar(servers.nats_url, worker) as own,
        Pull(own, stream=streams.WORK, consumer=worker.name, batch=4) as pull,
    ):
        await _until(lambda: own.client.stats["reconnects"] >= 1)
        await bus.publish(subjects.dispatch(worker.request, worker.name), b"attempt", msg_id="d1")
        (message,) = await pull.take(10)
        assert message.data == b"attempt"


async def test_nothing_of_another_worker_can_be_asked_for(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    first, second = workers
    inbox = f"{subjects.worker_inbox(first.name)}.x"
    foreign = [
        subjects.next_messages(streams.WORK, second.name),
        subjects.next_messages(streams.WORK, streams.ACTIVATOR),
        subjects.next_messages(streams.OUT, streams.RESULTS),
        f"$JS.ACK.WORK.{second.name}.1.1.1.1.0",
        subjects.result(second.request),
        subjects.metrics(second.request),
        subjects.output(second.request),
        subjects.call(second.request, second.name),
        subjects.invoke(first.request),
        subjects.dispatch(first.request, first.name),
        subjects.control(first.request, first.name),
        subjects.FUNCTIONS,
        subjects.event("x"),
        subjects.AUTH_CALLOUT,
    ]
    async with sidecar(servers.nats_url, first) as own:

        async def publish_all() -> None:
            for subject in foreign:
                await own.client.publish(subject, b"{}", reply=inbox)

        said = await _violations(own, publish_all)
    assert len(said) == len(foreign)
    assert all("permissions violation for publish" in text for text in said)


async def test_nats_38_the_api_of_jetstream_is_closed(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    first, _ = workers
    calls = ["INFO", "STREAM.INFO.WORK", "STREAM.PURGE.WORK", "STREAM.DELETE.OUT", "STREAM.MSG.GET.OUT"]
    calls += [f"CONSUMER.INFO.WORK.{first.name}", f"CONSUMER.DELETE.WORK.{first.name}", "CONSUMER.CREATE.WORK"]
    inbox = f"{subjects.worker_inbox(first.name)}.x"
    async with sidecar(servers.nats_url, first) as own:

        async def call_all() -> None:
            for call in calls:
                await own.client.publish(f"$JS.API.{call}", b"", reply=inbox)

        said = await _violations(own, call_all)
    assert len(said) == len(calls)
    log = (servers.folder / "log" / "nats.log").read_text()
    assert f'SIDECARS/user:{first.name}" - Publish Violation - Subject "$JS.API.STREAM.PURGE.WORK"' in log


async def test_nats_39_nobody_hears_what_is_not_for_him(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    first, second = workers
    wanted = [">", "_INBOX.>", "runtime.serverless.>", "$SYS.>", "_R_.>", f"{subjects.worker_inbox(second.name)}.>"]
    async with sidecar(servers.nats_url, first) as own:

        async def subscribe_all() -> None:
            for subject in wanted:
                await own.client.subscribe(subject)

        said = await _violations(own, subscribe_all)
    assert len([text for text in said if "permissions violation for subscription" in text]) == len(wanted)


async def test_nats_05_a_message_above_the_limit_fails_at_its_publisher(
    servers: Servers, bus: Bus, workers: tuple[Worker, Worker]
) -> None:
    worker, _ = workers
    async with sidecar(servers.nats_url, worker) as own:
        for size in (own.client.max_payload + 1, own.client.max_payload, WORKER_MESSAGE_BYTES_MAX):
            with pytest.raises(MessageTooLarge, match="limit"):
                await own.publish(subjects.result(worker.request), bytes(size), msg_id="r1")
        assert own.client.is_connected
        assert own.client.stats["reconnects"] == 0
    assert (await bus.js.stream_info(streams.OUT)).state.messages == 0


async def test_nats_06_07_an_id_is_there_and_is_one_line(bus: Bus) -> None:
    for msg_id in ("", "a\r\nPenstock-Mac: forged", "a\nb", "a\x00b", "a b", "é", "x" * 256):
        with pytest.raises(BadMessage, match="Nats-Msg-Id"):
            await bus.publish(subjects.invoke("first"), b"{}", msg_id=msg_id)
    for headers in ({"A": "b\r\nNats-Rollup: all"}, {"Nats-Rollup": "all"}, {"A\nB": "c"}):
        with pytest.raises(BadMessage, match="header"):
            await bus.publish(subjects.invoke("first"), b"{}", msg_id="a", headers=headers)
    assert (await bus.js.stream_info(streams.WORK)).state.messages == 0


async def test_what_no_stream_takes_is_not_stored(bus: Bus) -> None:
    with pytest.raises(NotStored):
        await bus.publish("runtime.nobody", b"{}", msg_id="a")


async def test_a_stream_keeps_what_it_holds_until_it_is_acknowledged(bus: Bus) -> None:
    for stream in (streams.WORK, streams.OUT):
        info = await bus.js.stream_info(stream)
        # Only exhausted messages are deleted, when their dead letter is stored.
        assert (info.config.deny_delete, info.config.deny_purge, info.config.allow_direct) == (False, True, False)
        assert (info.config.max_age, info.config.duplicate_window) == (3600, 120)
    await streams.ensure(bus)


async def test_a_message_that_nobody_acknowledges_is_reported(
    bus: Bus, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "ACK_WAIT_S", 0.2)
    monkeypatch.setattr(streams, "DELIVERIES_MAX", 2)
    told: list[streams.Exhausted] = []

    async def handle(exhausted: streams.Exhausted) -> None:
        told.append(exhausted)

    await streams.on_exhausted(bus, handle)
    await streams.ensure_worker(bus, request="third", worker="unit-third-worker-00000003", slots=1)
    await bus.publish(subjects.dispatch("third", "unit-third-worker-00000003"), b"poison", msg_id="p")
    async with Pull(bus, stream=streams.WORK, consumer="unit-third-worker-00000003", batch=4) as pull:
        taken: list[Msg] = []
        while len(taken) < 2:
            taken += await pull.take(10)
        await _until(lambda: bool(told))
    assert (told[0].stream, told[0].consumer, told[0].deliveries) == ("WORK", "unit-third-worker-00000003", 2)
    assert (await bus.js.get_msg("WORK", told[0].stream_seq)).data == b"poison"


async def test_our_own_user_needs_no_activator(servers: Servers) -> None:
    async with asyncio.timeout(30), connect(servers.nats_url, name="test") as own:
        assert own.client.is_connected
    assert "Authorization Violation" in await refused(servers.nats_url, "penstock", "")
    assert bare(servers.nats_url).startswith("nats://127.0.0.1:")


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)
