"""Every step is failed in turn, before and after its effect, and everything is undone; every step is repeated, and has
one effect."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from temporalio import activity
from temporalio.exceptions import ApplicationError

from conftest import Servers
from integration.flows.stage import LIMITS, Cloud, cloud_on
from penstock.compute.model import Deadlines, Limits, State
from penstock.compute.service.waiting import Waiting
from penstock.flows.steps import ACTIONS, ACTIVATE, LOOK, PREPARE_RUNTIME, PROVISION, START_UNIT
from penstock.kit.bus import Bus
from penstock.kit.db import Database

Activity = Callable[..., Awaitable[Any]]
Wrap = Callable[[Activity], Activity]


def named(known: Activity) -> str:
    """An activity's name."""
    return known.__name__


def around(name: str, wrap: Wrap) -> Callable[[Sequence[Activity]], Sequence[Activity]]:
    """Put `wrap` around the activity of this name (or around all)."""

    def apply(known: Sequence[Activity]) -> Sequence[Activity]:
        return [_redefined(each, wrap(each)) if name in (named(each), "*") else each for each in known]

    return apply


def _redefined(original: Activity, wrapped: Activity) -> Activity:
    """An activity of the same name and types, around the original."""

    async def call(argument: Any) -> Any:
        return await wrapped(argument)

    hints = get_type_hints(original)
    call.__annotations__ = dict(zip(("argument", "return"), hints.values(), strict=True))
    call.__name__ = named(original)
    return activity.defn(call)


def failing(moment: str, hits: list[str]) -> Wrap:
    """Fails for good, before or after the effect."""

    def wrap(inner: Activity) -> Activity:
        async def call(argument: Any) -> Any:
            if moment == "after":
                await inner(argument)
            hits.append(named(inner))
            raise ApplicationError("planted", non_retryable=True)

        return call

    return wrap


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", [step.do.name for step in PROVISION])
async def test_a_step_that_fails_is_undone_completely(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path, step: str, moment: str
) -> None:
    hits: list[str] = []
    limits = Limits(deadlines=Deadlines(requested_s=1, provisioning_s=5, releasing_s=20))
    wrap = around(step, failing(moment, hits))
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, wrap=wrap, limits=limits) as cloud:
        runtime = await cloud.runtime() if step == PREPARE_RUNTIME.name else None
        made = await cloud.create(gpus=2, runtime=runtime)
        if step == LOOK.name:
            await _ends_at_its_deadline(cloud, made.id, begun=moment == "after")
            assert set(hits) == {step}, "the fault did not hit"
            return
        row = await cloud.settle(made.id)
        assert hits == [step], "the fault did not hit"
        if (step, moment) == (ACTIVATE.name, "after"):
            assert row.state is State.ACTIVE
            return
        assert row.state is State.FAILED
        assert "planted" in row.reason
        assert cloud.node.units == set()
        assert cloud.node.effects[-1] == ("stop", row.unit_id)
        assert await cloud.world.held() == []
        assert await cloud.slot_healths() == {"healthy"}


async def _ends_at_its_deadline(cloud: Cloud, allocation_id: str, *, begun: bool) -> None:
    """Without a look no saga gets anywhere: the request ends at its own deadline, with nothing started. One that had
    begun waits for a saga that works; sagas are tried again all the time."""
    if begun:
        await cloud.until(allocation_id, lambda row: row.state is State.PROVISIONING)
    else:
        async with asyncio.timeout(30):
            while not await Waiting(cloud.world.db, cloud.world.limits).expire():
                await asyncio.sleep(0.1)
        assert (await cloud.world.row(allocation_id)).state is State.FAILED
        assert await cloud.world.held() == []
    assert cloud.node.effects == []


def twice(inner: Activity) -> Activity:
    """Runs the activity again after it has succeeded, and gives the second answer."""

    async def call(argument: Any) -> Any:
        await inner(argument)
        return await inner(argument)

    return call


def side_by_side(inner: Activity) -> Activity:
    """Runs the activity twice at once."""

    async def call(argument: Any) -> Any:
        first, second = await asyncio.gather(inner(argument), inner(argument))
        assert first == second, (named(inner), first, second)
        return first

    return call


@pytest.mark.parametrize("repeat", [twice, side_by_side])
async def test_steps_that_are_repeated_have_one_effect(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path, repeat: Wrap
) -> None:
    calls: list[str] = []

    def counted(inner: Activity) -> Activity:
        repeated = repeat(inner)

        async def call(argument: Any) -> Any:
            calls.append(named(inner))
            return await repeated(argument)

        return call

    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, wrap=around("*", counted)) as cloud:
        good = await cloud.active(runtime=await cloud.runtime())
        await cloud.world.release(good.id)
        assert (await cloud.settle(good.id)).state is State.RELEASED
        assert cloud.node.effects == [("build", good.runtime), ("start", good.unit_id), ("stop", good.unit_id)]
        assert [version for version, _ in await cloud.world.facts(good.id)] == [1, 2, 3, 4, 5]

        cloud.node.dirty = True
        stuck = await cloud.active()
        await cloud.world.release(stuck.id)
        assert (await cloud.settle(stuck.id)).state is State.RELEASE_FAILED
        assert cloud.node.effects.count(("stop", stuck.unit_id)) == 3
        assert [version for version, _ in await cloud.world.facts(stuck.id)] == [1, 2, 3, 4, 5]
        assert await cloud.world.held() == []


@pytest.mark.parametrize("repeat", [twice, side_by_side])
async def test_undo_that_is_repeated_has_one_effect(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path, repeat: Wrap
) -> None:
    def both(known: Sequence[Activity]) -> Sequence[Activity]:
        broken = around(ACTIVATE.name, failing("before", []))(known)
        undo = {"condemn", "undo_start", "fail"}
        return [_redefined(each, repeat(each)) if named(each) in undo else each for each in broken]

    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, wrap=both) as cloud:
        row = await cloud.settle((await cloud.create()).id)
        assert row.state is State.FAILED
        assert cloud.node.effects == [("start", row.unit_id), ("stop", row.unit_id)]
        assert row.fence == 2
        assert await cloud.world.held() == []


async def test_every_action_of_the_table_is_an_activity(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path
) -> None:
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, limits=LIMITS) as cloud:
        assert {named(each) for each in cloud.activities.all()} == {action.name for action in ACTIONS}
    assert START_UNIT in {step.do for step in PROVISION}


def failing_once(hits: list[str]) -> Wrap:
    """Fails for good the first time, and works from then on."""

    def wrap(inner: Activity) -> Activity:
        async def call(argument: Any) -> Any:
            if named(inner) not in hits:
                hits.append(named(inner))
                raise ApplicationError("planted", non_retryable=True)
            return await inner(argument)

        return call

    return wrap


@pytest.mark.parametrize("action", ["condemn", "undo_start", "fail"])
async def test_an_undo_that_fails_is_taken_up_again(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path, action: str
) -> None:
    hits: list[str] = []

    def both(known: Sequence[Activity]) -> Sequence[Activity]:
        broken = around(ACTIVATE.name, failing("before", []))(known)
        return around(action, failing_once(hits))(broken)

    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, wrap=both) as cloud:
        row = await cloud.settle((await cloud.create()).id)
        assert hits == [action], "the fault did not hit"
        assert row.state is State.FAILED
        assert cloud.node.units == set()
        assert await cloud.world.held() == []
        assert await cloud.slot_healths() == {"healthy"}


@pytest.mark.parametrize("action", ["look", "stop_unit", "finish"])
async def test_a_release_that_fails_is_taken_up_again(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path, action: str
) -> None:
    hits: list[str] = []
    wrap = around(action, failing_once(hits))
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, wrap=wrap) as cloud:
        row = await cloud.active()
        await cloud.world.release(row.id)
        assert (await cloud.settle(row.id)).state is State.RELEASED
        assert hits == [action], "the fault did not hit"
        assert cloud.node.effects == [("start", row.unit_id), ("stop", row.unit_id)]
        assert await cloud.world.held() == []
