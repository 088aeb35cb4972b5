"""Provision and release as one saga: what works, what is undone, and what interrupts what."""

import asyncio
from pathlib import Path

import pytest

from conftest import Servers
from integration.flows.fakenode import Answer
from integration.flows.stage import Cloud, cloud_on
from penstock.compute.model import Deadlines, State
from penstock.flows import activities
from penstock.flows.activities import Timing
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.processes.worker import Settings
from penstock.wire.tasks import UNIT_START, UNIT_STOP, Outcome, TaskBody


async def test_an_allocation_becomes_active_and_is_released(cloud: Cloud) -> None:
    row = await cloud.active(gpus=2)
    assert cloud.node.units == {row.unit_id}
    assert row.active_at is not None
    await cloud.world.release(row.id)
    ended = await cloud.settle(row.id)
    assert ended.state is State.RELEASED
    assert ended.billing_ended_at is not None
    assert cloud.node.units == set()
    assert cloud.node.effects == [("start", row.unit_id), ("stop", row.unit_id)]
    assert await cloud.world.held() == []
    assert await cloud.world.facts(row.id) == [
        (1, "provisioning.requested"),
        (2, "provisioning.started"),
        (3, "provisioning.active"),
        (4, "provisioning.releasing.requested"),
        (5, "provisioning.releasing.completed"),
    ]


async def test_many_at_once_all_become_active_and_are_all_released(cloud: Cloud) -> None:
    rows = await asyncio.gather(*(cloud.active() for _ in range(8)))
    assert len({slot for slot, _ in await cloud.world.held()}) == 8
    await asyncio.gather(*(cloud.world.release(row.id) for row in rows))
    assert {(await cloud.settle(row.id)).state for row in rows} == {State.RELEASED}
    assert cloud.node.units == set()
    assert await cloud.world.held() == []


async def test_a_unit_that_does_not_start_fails_the_allocation_with_the_nodes_words(cloud: Cloud) -> None:
    async def refuse(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "no such image: nope") if body.type == UNIT_START else None

    cloud.node.before = refuse
    row = await cloud.settle((await cloud.create(image="nope")).id)
    assert (row.state, row.reason) == (State.FAILED, "the unit did not start: no such image: nope")
    assert cloud.node.effects == [("stop", row.unit_id)]
    assert await cloud.world.held() == []
    assert await cloud.slot_healths() == {"healthy"}
    assert [kind for _, kind in await cloud.world.facts(row.id)] == [
        "provisioning.requested",
        "provisioning.started",
        "provisioning.failed",
    ]


@pytest.mark.parametrize("told_by", ["signal", "row"])
async def test_release_during_the_start_does_not_wait_for_it(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    starting, go_on = asyncio.Event(), asyncio.Event()

    async def slow(body: TaskBody) -> Answer | None:
        if body.type == UNIT_START:
            starting.set()
            await go_on.wait()
        return None

    if told_by == "signal":
        monkeypatch.setattr(activities, "POLL_S", 60)
    cloud.node.before = slow
    made = await cloud.create()
    await starting.wait()
    if told_by == "row":
        cloud.sagas.client = None
    await cloud.world.release(made.id)
    row = await cloud.settle(made.id, timeout_s=20)
    assert row.state is State.RELEASED
    go_on.set()
    await asyncio.sleep(0.2)
    assert cloud.node.units == set(), "a start that came late was not refused"


async def test_release_while_waiting_for_capacity_ends_without_a_node(cloud: Cloud) -> None:
    await cloud.active(gpus=8)
    waits = await cloud.create(wait_s=60)
    await cloud.world.release(waits.id)
    row = await cloud.settle(waits.id)
    assert (row.state, row.node_id, row.billing_ended_at) == (State.RELEASED, None, None)


async def test_release_before_the_saga_has_begun_starts_nothing(cloud: Cloud) -> None:
    client, cloud.sagas.client = cloud.sagas.client, None
    made = await cloud.create()
    assert (await cloud.world.release(made.id)).state is State.RELEASING
    cloud.sagas.client = client
    assert (await cloud.settle(made.id)).state is State.RELEASED
    assert ("start", made.unit_id) not in cloud.node.effects


async def test_releasing_again_changes_nothing(cloud: Cloud) -> None:
    row = await cloud.active()
    first = await cloud.world.release(row.id, reason="enough")
    again = await cloud.world.release(row.id)
    assert (again.version, again.reason) == (first.version, "enough")
    ended = await cloud.settle(row.id)
    assert (await cloud.world.release(row.id)).version == ended.version


async def test_cleanup_that_is_not_proved_blocks_the_slot_until_a_retry_proves_it(cloud: Cloud) -> None:
    row = await cloud.active(gpus=2)
    cloud.node.dirty = True
    await cloud.world.release(row.id)
    stuck = await cloud.settle(row.id)
    assert stuck.state is State.RELEASE_FAILED
    assert stuck.reason == "the cleanup was not proved: not gpu idle"
    assert stuck.billing_ended_at is not None
    assert cloud.node.effects.count(("stop", row.unit_id)) == 3
    assert await cloud.slot_healths() == {"healthy", "cleanup_blocked"}
    assert await cloud.world.value("select count(*) from fleet.placeable_slots") == 6
    cloud.node.dirty = False
    retried = await cloud.world.release(row.id)
    assert (retried.state, retried.fence) == (State.RELEASING, stuck.fence + 1)
    ended = await cloud.settle(row.id)
    assert (ended.state, ended.billing_ended_at) == (State.RELEASED, stuck.billing_ended_at)
    assert await cloud.slot_healths() == {"healthy"}
    assert await cloud.world.held() == []


async def test_undo_on_an_unreachable_node_fails_and_blocks_the_slots(cloud: Cloud) -> None:
    started = asyncio.Event()

    async def vanish(body: TaskBody) -> Answer | None:
        if body.type == UNIT_START:
            async with cloud.world.db.transaction() as tx:
                await tx.execute("update fleet.nodes set state = 'unreachable'")
            cloud.node.deaf = True
            started.set()
            return Outcome.FAILED, None, "broken"
        return None

    cloud.node.before = vanish
    made = await cloud.create(gpus=2)
    row = await cloud.settle(made.id)
    assert started.is_set()
    assert (row.state, row.reason) == (State.FAILED, "the unit did not start: broken")
    assert await cloud.slot_healths() == {"healthy", "cleanup_blocked"}
    assert await cloud.world.held() == []


async def test_a_start_that_takes_too_long_is_undone_at_the_deadline(cloud: Cloud) -> None:
    async def hang(body: TaskBody) -> Answer | None:
        if body.type == UNIT_START:
            await asyncio.sleep(60)
        return None

    cloud.node.before = hang
    made = await cloud.create()
    await cloud.until(made.id, lambda row: row.state is State.PROVISIONING)
    async with cloud.world.db.transaction() as tx:
        await tx.execute("update compute.allocations set deadline_at = clock_timestamp() + interval '1 s'")
    row = await cloud.settle(made.id, timeout_s=20)
    assert (row.state, row.reason) == (State.FAILED, "the unit was not ready in time")
    assert cloud.node.effects == [("stop", row.unit_id)]
    assert await cloud.world.held() == []


async def test_a_release_that_a_node_never_answers_is_given_up(cloud: Cloud) -> None:
    row = await cloud.active()
    cloud.node.deaf = True
    await cloud.world.release(row.id)
    stuck = await cloud.settle(row.id, timeout_s=30)
    assert stuck.state is State.RELEASE_FAILED
    assert stuck.reason == "the cleanup was not proved: the node did not answer in time"
    assert await cloud.slot_healths() == {"healthy", "cleanup_blocked"}


async def test_release_on_a_lost_node_is_given_up_at_once(cloud: Cloud) -> None:
    row = await cloud.active()
    cloud.node.deaf = True
    async with cloud.world.db.transaction() as tx:
        await tx.execute("update fleet.nodes set state = 'lost'")
    await cloud.world.release(row.id)
    stuck = await cloud.settle(row.id, timeout_s=20)
    assert (stuck.state, stuck.reason) == (
        State.RELEASE_FAILED,
        "the cleanup was not proved: the node is lost",
    )


async def test_release_on_an_unreachable_node_is_given_up_long_before_the_stop_expires(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path
) -> None:
    timing = Timing(stop_s=60, silence_s=1)
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, timing=timing) as cloud:
        row = await cloud.active()
        cloud.node.deaf = True
        async with database.transaction() as tx:
            await tx.execute("update fleet.nodes set state = 'unreachable', state_changed_at = clock_timestamp()")
        await cloud.world.release(row.id)
        stuck = await cloud.settle(row.id, timeout_s=10)
    assert (stuck.state, stuck.reason) == (
        State.RELEASE_FAILED,
        "the cleanup was not proved: the node is unreachable",
    )


def test_a_stop_has_as_long_as_the_node_may_take_and_the_release_longer_than_that() -> None:
    """The node bounds its own steps: the grace, the kill, three ways to delete, and a scrub."""
    assert Timing().stop_s > 5 + 5 + 3 * 120 + 120
    assert Deadlines().releasing_s > Timing().stop_s
    needed = ("database_url", "nats_url", "temporal_address", "pki_dir", "secrets_dir", "objects_url")
    settings = Settings(**dict.fromkeys(needed, ""))  # pyright: ignore[reportArgumentType]
    assert (settings.unit_stop_s, settings.releasing_deadline_s) == (Timing().stop_s, Deadlines().releasing_s)


async def test_stop_that_fails_once_is_tried_again(cloud: Cloud) -> None:
    row = await cloud.active()
    failures = [True]

    async def fail_once(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "busy") if body.type == UNIT_STOP and failures and failures.pop() else None

    cloud.node.before = fail_once
    await cloud.world.release(row.id)
    assert (await cloud.settle(row.id)).state is State.RELEASED


async def test_facts_follow_one_another_without_a_gap_and_the_fence_rises_once(cloud: Cloud) -> None:
    row = await cloud.active()
    await cloud.world.release(row.id)
    ended = await cloud.settle(row.id)
    assert (row.fence, ended.fence) == (1, 2)
    assert [version for version, _ in await cloud.world.facts(row.id)] == list(range(1, ended.version + 1))
