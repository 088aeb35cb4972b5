"""When rounds of dispatching happen, and what they cost."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from tests.integration.serverless.stage import Stage, until
from tests.integration.serverless.test_races import add, worker

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import claims


class Announcement:
    """Of one call."""

    acknowledged = False

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


async def test_calls_that_find_no_slot_are_looked_at_together(rounds: Rounds) -> None:
    function_id = await rounds.stage.define()
    await worker(rounds.stage, function_id, slots=1)
    await add(rounds.stage, function_id, *(f"i{number}" for number in range(60)))
    first = rounds.announce(function_id, 2)
    await until(lambda: _all(first))
    before, heard = rounds.count, []
    for _ in range(50):
        heard += rounds.announce(function_id)
        await asyncio.sleep(0.002)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 59
    assert rounds.count - before <= 15
    assert len(rounds.looks.at) <= 17


async def test_a_slot_that_becomes_free_is_used_at_once(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serverless.service.dispatching._FULL_S", 600)
    function_id = await rounds.stage.define()
    await worker(rounds.stage, function_id, slots=1)
    await add(rounds.stage, function_id, "a", "b", "c")
    heard = rounds.announce(function_id, 2)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 2
    await rounds.stage.value("update serverless.workers set inflight = 0")
    rounds.dispatcher.point([function_id])
    await until(lambda: _waits(rounds, 1))


async def test_a_function_with_slots_left_is_not_full(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serverless.service.dispatching._FULL_S", 600)
    function_id = await rounds.stage.define()
    await worker(rounds.stage, function_id, slots=1)
    await add(rounds.stage, function_id, "a", "b")
    heard = rounds.announce(function_id, 2)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 1
    await worker(rounds.stage, function_id, "w2", slots=4)
    rounds.dispatcher.point([function_id])
    await until(lambda: _waits(rounds, 0))
    await add(rounds.stage, function_id, "c")
    heard = rounds.announce(function_id)
    await until(lambda: _all(heard))
    assert await rounds.waiting() == 0


async def _all(heard: list[Announcement]) -> bool:
    return all(each.acknowledged for each in heard)


async def _waits(rounds: Rounds, number: int) -> bool:
    return await rounds.waiting() == number
