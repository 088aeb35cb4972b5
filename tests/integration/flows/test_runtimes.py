"""The saga's step that has a node build an environment."""

import asyncio

from integration.flows.fakenode import Answer
from integration.flows.stage import Cloud
from penstock.compute.model import State
from penstock.wire.tasks import RUNTIME_BUILD, Outcome, TaskBody


async def test_the_environment_is_built_before_the_unit_starts(cloud: Cloud) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(body: TaskBody) -> Answer | None:
        if body.type == RUNTIME_BUILD:
            begun.set()
            await go_on.wait()
        return None

    cloud.node.before = hold
    made = await cloud.create(runtime=await cloud.runtime())
    await begun.wait()
    building = await cloud.world.row(made.id)
    assert (building.state, building.reason) == (State.PROVISIONING, "building the runtime")
    go_on.set()
    row = await cloud.settle(made.id)
    assert (row.state, row.reason) == (State.ACTIVE, "")
    assert cloud.node.effects == [("build", made.runtime), ("start", made.unit_id)]


async def test_a_build_that_fails_shows_the_installers_words(cloud: Cloud) -> None:
    async def refuse(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "hash mismatch for tiny==1.0") if body.type == RUNTIME_BUILD else None

    cloud.node.before = refuse
    row = await cloud.settle((await cloud.create(runtime=await cloud.runtime())).id)
    assert row.state is State.FAILED
    assert row.reason == "the runtime was not built: hash mismatch for tiny==1.0"
    assert ("start", row.unit_id) not in cloud.node.effects
    assert await cloud.world.held() == []
    assert await cloud.slot_healths() == {"healthy"}


async def test_a_release_does_not_wait_for_the_build(cloud: Cloud) -> None:
    begun, never = asyncio.Event(), asyncio.Event()

    async def hold(body: TaskBody) -> Answer | None:
        if body.type == RUNTIME_BUILD:
            begun.set()
            await never.wait()
        return None

    cloud.node.before = hold
    made = await cloud.create(runtime=await cloud.runtime())
    await begun.wait()
    await cloud.world.release(made.id)
    assert (await cloud.settle(made.id)).state is State.RELEASED
    never.set()
