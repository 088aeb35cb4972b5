"""When rounds of dispatching happen, and what they cost."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.integration.serverless.stage import Stage, until
from tests.integration.serverless.test_races import add, worker

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.errors import Unavailable
from penstock.serverless import model
from penstock.serverless.model import Mode
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.ingress import Ingress
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.telling import Teller, invocation_message
from penstock.serverless.store import claims, invocations
from penstock.wire import subjects


class Announcement:
    """Of one call."""

    acknowledged = False
    data = b""
    subject = ""

    def __init__(self) -> None:
        self.reply = f"$JS.ACK.{id(self)}"

    async def ack(self) -> None:
        self.acknowledged = True


class Looks:
    """In a scaler's place."""

    def __init__(self) -> None:
        self.at: list[str] = []

    def look(self, function_id: str) -> None:
        self.at.append(function_id)


class Rounds:
    """A dispatcher at work on an empty stage, and how many rounds it made."""

    def __init__(self, stage: Stage, looks: Looks) -> None:
        self.stage = stage
        self.looks = looks
        self.count = 0
        self.dispatcher = Dispatcher(stage.db, Teller(stage.bus, Keys(stage.db)), cast("Any", looks))

    def announce(self, function_id: str, number: int = 1) -> list[Announcement]:
        made = [Announcement() for _ in range(number)]
        for each in made:
            self.dispatcher.announced(function_id, cast("Any", each))
        return made

    async def waiting(self) -> int:
        return await self.stage.value("select count(*) from serverless.invocations where waiting")


@pytest.fixture
async def rounds(database: Database, nats_bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rounds]:
    made = Rounds(Stage(database, nats_bus), Looks())
    claim = claims.claim

    async def counted(*args: Any, **named: Any) -> Any:
        made.count += 1
        return await claim(*args, **named)

    monkeypatch.setattr(claims, "claim", counted)
    running = asyncio.create_task(made.dispatcher.run())
    yield made
    running.cancel()
    await asyncio.wait([running])


async def full(rounds: Rounds) -> str:
    """A function whose one slot is taken, with one more call that waits."""
    function_id = await rounds.stage.define()
    await worker(rounds.stage, function_id, slots=1)
    await add(rounds.stage, function_id, "a", "b")
    heard = rounds.announce(function_id, 2)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 1
    return function_id


async def test_calls_that_find_no_slot_are_looked_at_together(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serverless.service.dispatching._FULL_S", 0.2)
    function_id = await rounds.stage.define()
    await worker(rounds.stage, function_id, slots=1)
    await add(rounds.stage, function_id, *(f"i{number}" for number in range(60)))
    first = rounds.announce(function_id, 2)
    await until(lambda: _all(first))
    before = rounds.count
    heard = rounds.announce(function_id, 50)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 59
    assert rounds.count - before == 1
    assert rounds.looks.at == [function_id] * 2


async def test_a_call_that_can_find_no_slot_costs_no_round(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serverless.service.dispatching._FULL_S", 600)
    function_id = await full(rounds)
    before = rounds.count
    for _ in range(5):
        rounds.announce(function_id)
        await asyncio.sleep(0.02)
    assert rounds.count == before


async def test_a_slot_that_becomes_free_is_used_at_once(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serverless.service.dispatching._FULL_S", 600)
    function_id = await full(rounds)
    await add(rounds.stage, function_id, "c")
    (late,) = rounds.announce(function_id)
    assert await rounds.waiting() == 2
    for left in (1, 0):
        await rounds.stage.value("update serverless.workers set inflight = 0")
        # What the row knows is from before the call that came last.
        rounds.dispatcher.freed([cast("Any", SimpleNamespace(function_id=function_id, more=False, waiting=False))])
        await until(lambda left=left: _waits(rounds, left))
    assert not late.acknowledged


async def test_a_round_that_is_full_is_not_a_function_that_is(rounds: Rounds) -> None:
    function_id = await rounds.stage.define()
    await worker(rounds.stage, function_id, slots=100)
    await add(rounds.stage, function_id, *(f"i{number}" for number in range(40)))
    heard = rounds.announce(function_id, 40)
    await until(lambda: _all(heard))
    await until(lambda: _waits(rounds, 0))
    assert rounds.looks.at == []


async def test_a_function_with_slots_left_is_not_full(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serverless.service.dispatching._FULL_S", 600)
    function_id = await full(rounds)
    assert await rounds.waiting() == 1
    await worker(rounds.stage, function_id, "w2", slots=4)
    rounds.dispatcher.point([function_id])
    await until(lambda: _waits(rounds, 0))
    await add(rounds.stage, function_id, "c")
    heard = rounds.announce(function_id)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 0


async def test_announcements_that_could_not_be_looked_up_come_again_as_they_were(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rounds.stage.define("known")
    ingress = Ingress(rounds.stage.db, rounds.stage.bus, rounds.dispatcher)
    heard = [Announcement(), Announcement()]
    for each, name in zip(heard, ("known", "other"), strict=True):
        each.data, each.subject = announcement(name), subjects.invoke(name)
    find = invocations.function

    async def away(conn: Any, project_id: str, name: str) -> Any:
        if name == "other":
            raise Unavailable("the database is away")
        return await find(conn, project_id, name)

    with monkeypatch.context() as patched:
        patched.setattr(invocations, "function", away)
        with pytest.raises(Unavailable):
            await ingress.take(cast("Any", heard))
    assert [each.data for each in heard] == [announcement("known"), announcement("other")]
    await ingress.take(cast("Any", heard))
    await until(lambda: _all(heard))


def announcement(name: str) -> bytes:
    row = model.Announcement(
        project_id="prj_default",
        id=f"inv-{name}",
        function_name=name,
        mode=Mode.ASYNC,
        content_type="application/json",
        headers={},
        attributes={},
        payload=None,
        payload_ref=None,
        timeout_s=None,
        reply_to="",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return invocation_message(row)[2]


async def _all(heard: list[Announcement]) -> bool:
    return all(each.acknowledged for each in heard)


async def _waits(rounds: Rounds, number: int) -> bool:
    return await rounds.waiting() == number
