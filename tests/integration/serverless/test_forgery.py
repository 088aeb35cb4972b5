"""A sidecar that makes up reply subjects. The server does not check them: whatever answers a sidecar (a message that it
pulled, a status, an acknowledgement) goes where the sidecar says. In its own account that is nowhere that matters."""

import asyncio
import json

import pytest
from nats.js.errors import NotFoundError

from conftest import Servers
from integration.serverless.sidecars import Listener, Worker, fresh_streams, listen, make_worker, sidecar
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.pull import Pull
from penstock.serverless import streams
from penstock.serverless.callout import Callout
from penstock.wire import subjects

_CALLER = "_INBOX.caller.x"


@pytest.fixture
async def bus(nats_bus: Bus) -> Bus:
    """Fresh streams."""
    await fresh_streams(nats_bus)
    return nats_bus


@pytest.fixture
async def thief(database: Database, bus: Bus) -> Worker:
    """Who forges."""
    return await make_worker(database, bus, "thief", 1, slots=100)


@pytest.fixture
async def victim(database: Database, bus: Bus) -> Worker:
    """Whose subjects are forged."""
    return await make_worker(database, bus, "victim", 2)


async def _callout(servers: Servers, database: Database, bus: Bus, account: str) -> None:
    await Callout(database, bus, (servers.folder / "nats.issuer").read_text(), account=account).serve()


def _targets(victim: Worker) -> list[str]:
    return [
        subjects.result(victim.request),
        subjects.metrics(victim.request),
        subjects.output(victim.request),
        subjects.invoke(victim.request),
        subjects.dispatch(victim.request, victim.name),
        subjects.dead_letter("result", victim.request),
        subjects.call(victim.request, victim.name),
        subjects.FUNCTIONS,
        f"$JS.ACK.WORK.{victim.name}.1.1.1.1.0",
        f"$JS.API.CONSUMER.DELETE.WORK.{victim.name}",
        _CALLER,
    ]


async def _forge(own: Bus, bus: Bus, thief: Worker, reply: str, number: int) -> None:
    """Everything that is answered, with `reply` as the place for the answer."""
    ask, work = subjects.next_messages(streams.WORK, thief.name), subjects.dispatch(thief.request, thief.name)
    await bus.publish(work, b'{"forged": true}', msg_id=f"f{number}")
    await own.client.publish(ask, json.dumps({"batch": 1, "expires": 10**9}).encode(), reply=reply)
    await own.client.publish(ask, json.dumps({"batch": 1, "no_wait": True}).encode(), reply=reply)
    await own.client.publish(subjects.result(thief.request), b"mine", reply=reply)
    await own.client.publish(f"$JS.ACK.WORK.{thief.name}.1.{number}.{number}.1.0", b"+NXT", reply=reply)
    await own.client.publish(f"$JS.ACK.WORK.{thief.name}.1.{number}.{number}.1.0", b"", reply=reply)


async def _settled(own: Bus, bus: Bus, thief: Worker) -> None:
    """All forgeries were served: what was to be pulled went to one, or comes to an honest request after them."""
    async with asyncio.timeout(20), Pull(own, stream=streams.WORK, consumer=thief.name, batch=20):
        while (await bus.js.consumer_info(streams.WORK, thief.name)).num_pending:
            await asyncio.sleep(0.02)
    await own.publish(subjects.result(thief.request), b"mine", msg_id="last")
    await bus.client.flush()


async def _attack(servers: Servers, bus: Bus, thief: Worker, victim: Worker) -> Listener:
    heard = await listen(bus, _CALLER, subjects.FUNCTIONS, subjects.CALLS, f"$JS.ACK.WORK.{victim.name}.>")
    async with sidecar(servers.nats_url, thief) as own:
        for number, target in enumerate(_targets(victim), start=1):
            await _forge(own, bus, thief, target, number)
        await _settled(own, bus, thief)
    return heard


async def _stored(bus: Bus) -> set[str]:
    names: set[str] = set()
    for stream in streams.STREAMS:
        names |= set((await bus.js.stream_info(stream.name or "", subjects_filter=">")).state.subjects or {})
    return names


async def test_a_forged_reply_reaches_nobody(
    servers: Servers, database: Database, bus: Bus, thief: Worker, victim: Worker
) -> None:
    await _callout(servers, database, bus, "SIDECARS")
    heard = await _attack(servers, bus, thief, victim)
    assert [message.subject for message in heard.messages] == []
    assert await _stored(bus) <= {subjects.result(thief.request), subjects.dispatch(thief.request, thief.name)}
    assert (await bus.js.consumer_info(streams.WORK, victim.name)).num_pending == 0


async def test_the_same_forgery_works_within_one_account(
    servers: Servers, database: Database, bus: Bus, thief: Worker, victim: Worker
) -> None:
    """So the test above would see it."""
    await _callout(servers, database, bus, "APP")
    heard = await _attack(servers, bus, thief, victim)
    assert {_CALLER, subjects.FUNCTIONS} <= {message.subject for message in heard.messages}
    assert {subjects.result(victim.request), subjects.invoke(victim.request)} <= await _stored(bus)
    with pytest.raises(NotFoundError):
        await bus.js.consumer_info(streams.WORK, victim.name)


async def test_a_message_forged_into_anothers_inbox_is_not_taken(
    servers: Servers, database: Database, bus: Bus, thief: Worker, victim: Worker
) -> None:
    await _callout(servers, database, bus, "SIDECARS")
    async with (
        sidecar(servers.nats_url, thief) as own,
        sidecar(servers.nats_url, victim) as other,
        Pull(other, stream=streams.WORK, consumer=victim.name, batch=8) as pull,
    ):
        # Even if the thief knew the inbox, which has 96 random bits in its name.
        heard = await listen(other, f"{pull._inbox}>")
        await _forge(own, bus, thief, f"{pull._inbox}1", 1)
        await _settled(own, bus, thief)
        await bus.publish(subjects.dispatch(victim.request, victim.name), b"real", msg_id="real")
        taken = await pull.take(10)
        assert [message.data for message in taken] == [b"real"]
        forged = [message for message in heard.messages if message.data == b'{"forged": true}']
        # It is what it was: the thief's own dispatch, whose code is under the thief's key and this subject.
        assert {message.subject for message in forged} == {subjects.dispatch(thief.request, thief.name)}


async def test_an_acknowledgement_cannot_be_forged_for_a_message_of_another(
    servers: Servers, database: Database, bus: Bus, thief: Worker, victim: Worker
) -> None:
    await _callout(servers, database, bus, "SIDECARS")
    await bus.publish(subjects.dispatch(victim.request, victim.name), b"work", msg_id="work")
    async with (
        sidecar(servers.nats_url, thief) as own,
        sidecar(servers.nats_url, victim) as other,
        Pull(other, stream=streams.WORK, consumer=victim.name, batch=1) as pull,
    ):
        (message,) = await pull.take(1)
        await _forge(own, bus, thief, message.reply, 1)
        await own.publish(subjects.result(thief.request), b"mine", msg_id="last")
        assert (await bus.js.consumer_info(streams.WORK, victim.name)).num_ack_pending == 1
        await message.ack_sync()
        assert (await bus.js.consumer_info(streams.WORK, victim.name)).num_ack_pending == 0
