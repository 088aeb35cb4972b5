"""Temporal, hints, nodes and units may all be lost: the rows find their way to rest."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from conftest import Servers
from integration.compute.stage import World
from integration.flows.fakenode import Answer
from integration.flows.stage import Cloud, cloud_on
from penstock.compute.model import Deadlines, Limits, State
from penstock.compute.service import watch
from penstock.compute.service.release import Release
from penstock.compute.service.watch import Patience, Watch
from penstock.embedded import temporal
from penstock.embedded.ports import free_port
from penstock.fleet import slots
from penstock.flows.allocation import WORKFLOW, workflow_id
from penstock.flows.reconcile import NodeKeeper, SagaKeeper
from penstock.kit import audit
from penstock.kit.bus import Bus
from penstock.kit.db import Database, Reader
from penstock.wire.tasks import UNIT_START, TaskBody


def held_up(cloud: Cloud) -> tuple[asyncio.Event, asyncio.Event]:
    """The node waits in the middle of its first start; (it has begun, let it go on)."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(body: TaskBody) -> Answer | None:
        if body.type == UNIT_START:
            begun.set()
            await go_on.wait()
        return None

    cloud.node.before = hold
    return begun, go_on


async def test_a_lost_hint_only_costs_time(cloud: Cloud) -> None:
    client, cloud.sagas.client = cloud.sagas.client, None
    made = await cloud.create()
    await asyncio.sleep(0.3)
    assert (await cloud.world.row(made.id)).state is State.REQUESTED
    cloud.sagas.client = client
    assert (await cloud.settle(made.id)).state is State.ACTIVE


async def test_a_terminated_saga_is_started_again_and_starts_no_second_unit(cloud: Cloud) -> None:
    begun, go_on = held_up(cloud)
    made = await cloud.create()
    await begun.wait()
    await cloud.client.get_workflow_handle(workflow_id(made.id)).terminate()
    go_on.set()
    assert (await cloud.settle(made.id)).state is State.ACTIVE
    assert cloud.node.effects == [("start", made.unit_id)]


async def test_temporal_with_all_its_data_may_be_lost(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path
) -> None:
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path) as cloud:
        running = await cloud.active()
        begun, _ = held_up(cloud)
        starting = await cloud.create()
        await begun.wait()
        releasing = running.id
        cloud.sagas.client = None
        await cloud.world.release(releasing)
    cloud.node.before = None
    async with (
        temporal.run(tmp_path / "fresh", free_port(), free_port(), tmp_path / "temporal.log") as (address, _),
        cloud_on(database, nats_bus, address, tmp_path, node=cloud.node) as again,
    ):
        assert (await again.settle(releasing)).state is State.RELEASED
        assert (await again.settle(starting.id)).state is State.ACTIVE
        assert again.node.effects.count(("start", starting.unit_id)) == 1


async def test_a_saga_that_does_not_react_is_replaced(cloud: Cloud) -> None:
    cloud.sagas.client = None
    made = await cloud.create()
    await cloud.client.start_workflow(WORKFLOW, made.id, id=workflow_id(made.id), task_queue="nobody")
    cloud.sagas.client = cloud.client
    keeper = SagaKeeper(Watch(cloud.world.db, Patience(fresh_s=0.1, idle_s=0.2, stuck_s=0.5)), cloud.sagas)
    await asyncio.sleep(0.7)
    await keeper.undriven()
    assert (await cloud.settle(made.id)).state is State.ACTIVE


async def test_two_workers_do_not_ask_for_the_same_row(world: World) -> None:
    await world.add_node(4)
    for _ in range(3):
        await world.create()
    await asyncio.sleep(0.1)
    watch = Watch(world.db, Patience(fresh_s=0.05, idle_s=10))
    found = await asyncio.gather(*(watch.undriven() for _ in range(4)))
    assert sum(map(len, found)) == 3


def keeper_of(cloud: Cloud) -> NodeKeeper:
    return NodeKeeper(cloud.world.db, cloud.watch, Release(cloud.world.limits), cloud.tasks)


async def sql(cloud: Cloud, statement: str, *args: object) -> None:
    async with cloud.world.db.transaction() as tx:
        await tx.execute(statement, *args)


async def count(cloud: Cloud, query: str) -> int:
    async with cloud.world.db.read() as conn:
        return await conn.fetchval(query)


async def test_a_lost_node_is_paid_for_until_its_last_heartbeat(cloud: Cloud) -> None:
    row = await cloud.active()
    assert row.active_at is not None
    await sql(cloud, "update compute.allocations set active_at = active_at - interval '1 h'")
    await sql(cloud, "update fleet.heartbeats set at = now(), listed_at = now() - interval '10 min'")
    await sql(cloud, "update fleet.nodes set state = 'lost'")
    cloud.node.deaf = True
    await keeper_of(cloud).lost_nodes()
    ended = await cloud.settle(row.id)
    assert (ended.state, ended.reason) == (
        State.RELEASE_FAILED,
        "the cleanup was not proved: the node is lost",
    )
    heard = await cloud.world.value("select listed_at from fleet.heartbeats")
    assert ended.billing_ended_at == heard


async def test_a_release_asked_for_while_nobody_knew_of_the_loss_is_paid_for_no_longer(cloud: Cloud) -> None:
    row = await cloud.active()
    await sql(cloud, "update compute.allocations set active_at = active_at - interval '1 h'")
    await sql(cloud, "update fleet.heartbeats set at = now(), listed_at = now() - interval '10 min'")
    cloud.node.deaf = True
    async with cloud.world.db.transaction() as tx:
        await Release(cloud.world.limits).by_system(tx, audit.system("test"), row.id, "it hangs")
    await sql(cloud, "update fleet.nodes set state = 'lost'")
    await keeper_of(cloud).lost_nodes()
    left = await cloud.world.row(row.id)
    assert left.billing_ended_at == await cloud.world.value("select listed_at from fleet.heartbeats")


@pytest.mark.parametrize("unheard", [True, False])
async def test_a_release_while_its_node_was_away_is_paid_for_only_if_the_unit_was_still_there(
    cloud: Cloud, *, unheard: bool
) -> None:
    row = await cloud.active()
    await sql(cloud, "update compute.allocations set active_at = active_at - interval '1 h'")
    await cloud.world.release(row.id)
    released = await cloud.settle(row.id)
    await sql(cloud, "update compute.allocations set settled = true")
    await _report(cloud, row.unit_id, "gone", None, "")
    await sql(cloud, "update fleet.unit_reports set seen_at = now() - interval '10 min', unheard = $1", unheard)
    keeper = keeper_of(cloud)
    await keeper.unheard_ends()
    await keeper.unheard_ends()
    seen = await cloud.world.value("select seen_at from fleet.unit_reports")
    left = await cloud.world.row(row.id)
    assert left.billing_ended_at == (seen if unheard else released.billing_ended_at)
    assert await cloud.world.value("select settled from compute.allocations") is not unheard


@pytest.mark.parametrize(
    ("state", "since_s", "paid_to_the_end"), [("exited", 0, False), ("gone", 60, False), ("gone", 0, True)]
)
async def test_a_release_after_the_node_named_the_end_is_paid_for_until_that_end(
    cloud: Cloud, *, state: str, since_s: int, paid_to_the_end: bool
) -> None:
    """A list that lacks the unit may have been on its way when the unit started: only one that stands counts."""
    row = await cloud.active()
    await sql(cloud, "update compute.allocations set active_at = active_at - interval '1 h'")
    await _report(cloud, row.unit_id, state, None, "")
    await sql(
        cloud,
        "update fleet.unit_reports set seen_at = now() - interval '2 min', since = now() - make_interval(secs => $1)",
        since_s,
    )
    ran_until = await cloud.world.value("select ran_until from fleet.unit_ends")
    released = await cloud.world.release(row.id)
    assert released.billing_ended_at is not None
    assert (released.billing_ended_at > ran_until) is paid_to_the_end
    assert paid_to_the_end or released.billing_ended_at == ran_until


async def test_a_node_that_is_back_when_its_loss_is_looked_at_keeps_its_units(cloud: Cloud) -> None:
    row = await cloud.active()
    await sql(cloud, "update fleet.nodes set state = 'lost'")

    class Slow(Watch):
        async def occupied(self, conn: Reader, node_ids: Sequence[str]) -> Sequence[str]:
            found = await super().occupied(conn, node_ids)
            await sql(cloud, "update fleet.nodes set state = 'ready'")
            return found

    watch = Slow(cloud.world.db, cloud.watch.patience)
    await NodeKeeper(cloud.world.db, watch, Release(cloud.world.limits), cloud.tasks).lost_nodes()
    assert (await cloud.world.row(row.id)).state is State.ACTIVE


async def test_what_runs_on_an_unreachable_node_is_kept(cloud: Cloud) -> None:
    row = await cloud.active()
    await sql(cloud, "update fleet.heartbeats set at = now() - interval '1 min'")
    await sql(cloud, "update fleet.nodes set state = 'unreachable'")
    keeper = keeper_of(cloud)
    for look in (keeper.lost_nodes, keeper.failed_gpus, keeper.missing_units, keeper.exited_units, keeper.orphan_units):
        await look()
    await sql(cloud, "update fleet.nodes set state = 'ready'")
    kept = await cloud.world.row(row.id)
    assert (kept.state, kept.billing_ended_at) == (State.ACTIVE, None)


async def test_releases_on_a_retired_node_end(cloud: Cloud) -> None:
    runs, stuck = await cloud.active(), await cloud.active()
    cloud.node.dirty = True
    await cloud.world.release(stuck.id)
    assert (await cloud.settle(stuck.id)).state is State.RELEASE_FAILED
    cloud.node.deaf = True
    await sql(cloud, "update fleet.nodes set state = 'retired'")
    keeper = keeper_of(cloud)
    await keeper.lost_nodes()
    await keeper.failed_releases()
    assert (await cloud.settle(runs.id)).state is State.RELEASED
    ended = await cloud.until(stuck.id, lambda row: row.state is State.RELEASED)
    assert ended.reason == "the node is retired"
    assert await cloud.world.held() == []


async def test_failed_releases_that_are_not_due_do_not_hold_up_those_that_are(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [await cloud.active() for _ in range(4)]
    cloud.node.dirty = True
    for row in rows:
        await cloud.world.release(row.id)
        await cloud.settle(row.id)
    exhausted, elsewhere, early, due = (row.id for row in rows)
    await sql(cloud, "update compute.allocations set changed_at = now() - interval '1 h' where id <> $1", early)
    await sql(
        cloud,
        "update compute.allocations set changed_at = now() - interval '2 h',"
        " timeline = (select jsonb_agg(last.line) from generate_series(1, 11),"
        " lateral (select timeline -> -1 as line) last)"
        " where id = $1",
        exhausted,
    )
    silent = await cloud.world.add_node(1, state="unreachable")
    await sql(cloud, "update compute.allocations set node_id = $2 where id = $1", elsewhere, silent)
    monkeypatch.setattr(watch, "BATCH", 1)
    await keeper_of(cloud).failed_releases()
    states = {row.id: (await cloud.world.row(row.id)).state for row in rows}
    assert states.pop(due) is State.RELEASING
    assert set(states.values()) == {State.RELEASE_FAILED}


async def test_a_draining_node_keeps_its_work_until_the_grace_is_over(cloud: Cloud) -> None:
    made = await cloud.settle((await cloud.create()).id)
    await sql(cloud, "update fleet.nodes set state = 'draining', release_at = clock_timestamp() + interval '1 hour'")
    keeper = keeper_of(cloud)
    await keeper.draining_nodes()
    warned = await cloud.world.row(made.id)
    assert (warned.state, warned.reason.partition(":")[0]) == (State.ACTIVE, "the node is draining")
    await keeper.draining_nodes()
    assert (await cloud.world.row(made.id)).version == warned.version
    await sql(cloud, "update fleet.nodes set state = 'ready'")
    await keeper.draining_nodes()
    assert (await cloud.world.row(made.id)).reason == ""
    await sql(cloud, "update fleet.nodes set state = 'draining'")
    await sql(cloud, "update fleet.nodes set release_at = clock_timestamp() - interval '1 second'")
    await keeper.draining_nodes()
    assert (await cloud.settle(made.id)).state is State.RELEASED


async def test_a_draining_node_is_left(cloud: Cloud) -> None:
    row = await cloud.active()
    await sql(cloud, "update fleet.nodes set state = 'draining'")
    await keeper_of(cloud).draining_nodes()
    ended = await cloud.settle(row.id)
    assert (ended.state, ended.reason) == (State.RELEASED, "the node is draining")


async def test_a_unit_that_exits_gives_its_gpus_back(cloud: Cloud) -> None:
    row = await cloud.active()
    await _report(cloud, row.unit_id, "exited", 137, "oom")
    await keeper_of(cloud).exited_units()
    ended = await cloud.settle(row.id)
    assert (ended.state, ended.reason) == (State.RELEASED, "the unit ran out of memory")


async def test_a_unit_that_its_node_forgot_is_released_once_there_was_time_to_report_it(cloud: Cloud) -> None:
    row = await cloud.active()
    keeper = keeper_of(cloud)
    await keeper.missing_units()
    assert (await cloud.world.row(row.id)).state is State.ACTIVE
    await sql(cloud, "update fleet.heartbeats set at = now() + interval '2 s', listed_at = now() + interval '2 s'")
    await _report(cloud, row.unit_id, "running", None, "")
    await keeper.missing_units()
    assert (await cloud.world.row(row.id)).state is State.ACTIVE
    seen = "update fleet.unit_reports set state = 'gone', seen_at = now() - interval '1 hour'"
    await sql(cloud, "update compute.allocations set active_at = active_at - interval '2 hours'")
    await sql(cloud, seen)
    await keeper.missing_units()
    ended = await cloud.settle(row.id)
    assert (ended.state, ended.reason) == (State.RELEASED, "the unit is gone from its node")
    assert ended.billing_ended_at is not None
    assert ended.active_at is not None
    paid_s = (ended.billing_ended_at - ended.active_at).total_seconds()
    assert paid_s == pytest.approx(3600, abs=60), "time was paid for in which nobody had the unit"


async def test_a_node_that_comes_back_while_it_is_looked_for_keeps_its_units(cloud: Cloud) -> None:
    """It fell silent before it could report the unit, and its first list comes in the middle of the look."""
    row = await cloud.active()
    await sql(cloud, "update compute.allocations set active_at = active_at - interval '1 min'")
    await sql(cloud, "update fleet.heartbeats set at = at - interval '1 min', listed_at = at - interval '1 min'")

    class Slow(Watch):
        async def unreported(self) -> Sequence[watch.Unreported]:
            found = await super().unreported()
            await sql(cloud, "update fleet.heartbeats set at = clock_timestamp(), listed_at = clock_timestamp()")
            await _report(cloud, row.unit_id, "running", None, "")
            return found

    keeper = NodeKeeper(
        cloud.world.db, Slow(cloud.world.db, cloud.watch.patience), Release(cloud.world.limits), cloud.tasks
    )
    await keeper.missing_units()
    assert (await cloud.world.row(row.id)).state is State.ACTIVE


async def test_units_that_nobody_owns_are_stopped_once(cloud: Cloud) -> None:
    row = await cloud.active()
    await _report(cloud, row.unit_id, "running", None, "")
    await _report(cloud, "stray", "running", None, "")
    cloud.node.units.add("stray")
    keeper = keeper_of(cloud)
    await keeper.orphan_units()
    assert cloud.node.units == {row.unit_id, "stray"}, "a unit was stopped before its grace was over"
    await sql(cloud, "update fleet.unit_reports set since = now() - interval '1 min'")
    await keeper.orphan_units()
    await keeper.orphan_units()
    await _until(lambda: _done("stray" not in cloud.node.units))
    await asyncio.sleep(0.2)
    assert cloud.node.effects.count(("stop", "stray")) == 1
    assert row.unit_id in cloud.node.units


async def test_a_failed_release_is_tried_again_when_the_node_answers(cloud: Cloud) -> None:
    row = await cloud.active()
    cloud.node.dirty = True
    await cloud.world.release(row.id)
    await cloud.settle(row.id)
    cloud.node.dirty = False
    keeper = keeper_of(cloud)
    await keeper.failed_releases()
    assert (await cloud.world.row(row.id)).state is State.RELEASE_FAILED
    await asyncio.sleep(1.1)
    await keeper.failed_releases()
    assert (await cloud.settle(row.id)).state is State.RELEASED


async def test_releasing_past_its_deadline_still_ends(
    database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path
) -> None:
    limits = Limits(deadlines=Deadlines(requested_s=30, provisioning_s=20, releasing_s=0.5))
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path, limits=limits) as cloud:
        row = await cloud.active()
        cloud.node.deaf = True
        await cloud.world.release(row.id)
        assert (await cloud.settle(row.id, timeout_s=30)).state is State.RELEASE_FAILED


async def _report(cloud: Cloud, unit_id: str, state: str, code: int | None, exit_class: str) -> None:
    await sql(
        cloud,
        "insert into fleet.unit_reports (node_id, unit_id, state, exit_code, exit_class) values ($1, $2, $3, $4, $5)"
        " on conflict (node_id, unit_id) do update set state = $3, exit_code = $4, exit_class = $5",
        cloud.node.node_id,
        unit_id,
        state,
        code,
        exit_class,
    )


async def _done(value: bool) -> bool:
    return value


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await true():
            await asyncio.sleep(0.02)


async def test_a_blocked_slot_returns_only_when_a_later_stop_proves_it_clean(cloud: Cloud) -> None:
    row = await cloud.active()
    await cloud.world.release(row.id)
    assert (await cloud.settle(row.id)).state is State.RELEASED
    async with cloud.world.db.transaction() as tx:
        held = await tx.fetch("select slot_id from compute.claims where allocation_id = $1", row.id)
        await slots.block(tx, [claim["slot_id"] for claim in held], "the node did not answer")
    blocked = "select count(*) from fleet.slots where health = 'cleanup_blocked'"
    keeper = keeper_of(cloud)
    cloud.node.dirty = True
    await keeper.blocked_slots()
    await asyncio.sleep(0.5)
    await keeper.blocked_slots()
    assert await count(cloud, blocked) == 1
    cloud.node.dirty = False
    await sql(cloud, "update fleet.tasks set dedupe_key = dedupe_key || '/an earlier minute'")
    await keeper.blocked_slots()
    await asyncio.sleep(0.5)
    await keeper.blocked_slots()
    assert await count(cloud, blocked) == 0
