"""The ways that a saga can go, each as a short play on a cloud. Their histories are kept and replayed."""

import asyncio
from collections.abc import Awaitable, Callable

from integration.flows.fakenode import Answer
from integration.flows.stage import Cloud
from penstock.compute.model import State
from penstock.wire.tasks import UNIT_START, Outcome, TaskBody


async def becomes_active(cloud: Cloud) -> str:
    """A start that works."""
    return (await cloud.active()).id


async def builds_its_runtime(cloud: Cloud) -> str:
    """A start on an environment that the node has to build."""
    return (await cloud.active(runtime=await cloud.runtime())).id


async def is_released(cloud: Cloud) -> str:
    """A release that works."""
    row = await cloud.active()
    await _saga_ended(cloud, row.id)
    await cloud.world.release(row.id)
    await cloud.settle(row.id)
    return row.id


async def is_undone(cloud: Cloud) -> str:
    """A start that fails."""

    async def refuse(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "no such image") if body.type == UNIT_START else None

    cloud.node.before = refuse
    row = await cloud.settle((await cloud.create()).id)
    assert row.state is State.FAILED
    return row.id


async def is_released_while_it_starts(cloud: Cloud) -> str:
    """A release that interrupts the start."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(body: TaskBody) -> Answer | None:
        if body.type == UNIT_START:
            begun.set()
            await go_on.wait()
        return None

    cloud.node.before = hold
    made = await cloud.create()
    await begun.wait()
    await cloud.world.release(made.id)
    assert (await cloud.settle(made.id)).state is State.RELEASED
    go_on.set()
    return made.id


async def cannot_be_released(cloud: Cloud) -> str:
    """A release whose proof never comes."""
    row = await cloud.active()
    await _saga_ended(cloud, row.id)
    cloud.node.dirty = True
    await cloud.world.release(row.id)
    assert (await cloud.settle(row.id)).state is State.RELEASE_FAILED
    return row.id


async def has_nothing_to_do(cloud: Cloud) -> str:
    """A saga for a row that is at rest."""
    row = await cloud.active()
    await _saga_ended(cloud, row.id)
    await cloud.sagas.drive(row.id)
    return row.id


async def _saga_ended(cloud: Cloud, allocation_id: str) -> None:
    await cloud.saga(allocation_id).result()


SCENARIOS: list[Callable[[Cloud], Awaitable[str]]] = [
    becomes_active,
    builds_its_runtime,
    is_released,
    is_undone,
    is_released_while_it_starts,
    cannot_be_released,
    has_nothing_to_do,
]
