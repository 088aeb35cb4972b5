"""Stock units are handed over without a saga; whatever goes wrong on the way, a saga brings to an end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from temporalio.service import RPCError

from integration.compute.stage import someone
from integration.flows.fakenode import Answer
from integration.flows.stage import Cloud
from penstock.compute.model import Allocation, Shape, State
from penstock.compute.store import stock
from penstock.kit.errors import PenstockError
from penstock.wire.tasks import BAD_CODE, UNIT_HANDOFF, UNIT_START, UNIT_STOP, Outcome, TaskBody

SHAPE = Shape(sku="g1.1", gpus=1, image="python:3")


async def ready_stock(cloud: Cloud, count: int) -> list[Allocation]:
    """So much stock, started by sagas that have ended: a create passes a row by that one still looks at."""
    async with cloud.world.db.transaction() as tx:
        await stock.put_floor(tx, SHAPE, count)
    async with asyncio.timeout(30):
        while True:
            await cloud.world.keeper.keep()
            async with cloud.world.db.read() as conn:
                rows = await conn.fetch(
                    "select id from compute.allocations where purpose = 'stock' and state = 'active'"
                )
            if len(rows) == count:
                await asyncio.gather(*(cloud.saga(row["id"]).result() for row in rows))
                return [await cloud.world.row(row["id"]) for row in rows]
            await asyncio.sleep(0.05)


def _answer(kind: str, outcome: Answer) -> Callable[[TaskBody], Awaitable[Answer | None]]:
    async def before(body: TaskBody) -> Answer | None:
        return outcome if body.type == kind else None

    return before


@asynccontextmanager
async def _held(cloud: Cloud, kind: str) -> AsyncIterator[asyncio.Event]:
    """The node does not answer tasks of this kind until the end; the event says that it has one."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def hold(body: TaskBody) -> Answer | None:
        if body.type == kind:
            begun.set()
            await go_on.wait()
        return None

    cloud.node.before = hold
    try:
        yield begun
    finally:
        go_on.set()


async def test_a_handoff_makes_active_with_the_nodes_answer_and_no_saga(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)
    made = await cloud.create(env={"A": "b"})
    row = await cloud.settle(made.id)
    assert (row.state, row.unit_id, row.stock_id) == (State.ACTIVE, kept.unit_id, kept.id)
    assert [move.state for move in row.timeline] == [State.REQUESTED, State.PROVISIONING, State.ACTIVE]
    assert cloud.node.effects == [("start", kept.unit_id), ("handoff", kept.unit_id)]
    assert cloud.node.tenants == {kept.unit_id: made.id}
    with pytest.raises(RPCError, match="not found"):
        await cloud.saga(made.id).describe()


async def test_release_stops_the_unit_and_the_keeper_refills(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)
    made = await cloud.settle((await cloud.create()).id)
    await cloud.world.release(made.id)
    assert (await cloud.settle(made.id)).state is State.RELEASED
    assert cloud.node.units == set()
    (fresh,) = await ready_stock(cloud, 1)
    assert fresh.id != kept.id
    assert cloud.node.units == {fresh.unit_id}


async def test_tenants_never_get_the_same_unit(cloud: Cloud) -> None:
    await ready_stock(cloud, 4)
    results = await asyncio.gather(
        *(cloud.world.create(someone(f"prj_{n}")) for n in range(12)), return_exceptions=True
    )
    made = [result for result in results if isinstance(result, Allocation)]
    assert all(isinstance(result, Allocation | PenstockError) for result in results), results
    rows = [await cloud.settle(row.id) for row in made]
    assert {row.state for row in rows} == {State.ACTIVE}
    assert len({row.unit_id for row in rows}) == len(rows) == 8
    assert len([row for row in rows if row.stock_id]) == 4


async def test_an_answer_that_was_lost_is_found_by_a_saga(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)

    class Deaf:
        async def ended(self, tx: object, *, allocation_id: str, fence: int, succeeded: bool) -> None:
            """Hear nothing."""

    cloud.node.handoffs = Deaf()
    row = await cloud.settle((await cloud.create()).id, timeout_s=60)
    assert (row.state, row.unit_id) == (State.ACTIVE, kept.unit_id)
    assert cloud.node.effects.count(("handoff", kept.unit_id)) == 1
    await cloud.saga(row.id).result()


async def test_a_handoff_that_fails_ends_in_a_unit_of_its_own_on_the_same_slots(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)
    cloud.node.before = _answer(UNIT_HANDOFF, (Outcome.FAILED, None, "the zygote is gone"))
    row = await cloud.settle((await cloud.create()).id)
    assert (row.state, row.unit_id, row.stock_id) == (State.ACTIVE, row.id, None)
    assert row.gpu_uuids == kept.gpu_uuids
    reasons = [move.reason for move in row.timeline]
    assert reasons == ["", "from warm stock", "the unit did not start: the zygote is gone", ""]
    assert cloud.node.units == {row.unit_id}
    assert cloud.node.effects[1:] == [("stop", kept.unit_id), ("start", row.id)]


async def test_code_that_no_node_can_use_is_not_tried_again(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)
    cloud.node.error_code = BAD_CODE
    cloud.node.before = _answer(UNIT_HANDOFF, (Outcome.FAILED, None, "it has a link"))
    row = await cloud.settle((await cloud.create()).id)
    assert (row.state, row.reason) == (State.FAILED, "the unit did not start: bad_code: it has a link")
    assert [effect for effect in cloud.node.effects if effect[0] == "start"] == [("start", kept.unit_id)]
    assert await cloud.world.held() == []


async def test_a_handoff_and_a_start_that_both_fail_leave_nothing_behind(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)

    async def refuse(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "broken") if body.type in (UNIT_HANDOFF, UNIT_START) else None

    cloud.node.before = refuse
    row = await cloud.settle((await cloud.create()).id)
    assert (row.state, row.reason) == (State.FAILED, "the unit did not start: broken")
    assert cloud.node.units == set()
    assert await cloud.world.held() == []
    assert await cloud.slot_healths() == {"healthy"}
    assert (await cloud.world.row(kept.id)).state is State.RELEASED


async def test_a_unit_that_cannot_be_proved_gone_is_not_followed_by_another(cloud: Cloud) -> None:
    await ready_stock(cloud, 1)

    async def refuse(body: TaskBody) -> Answer | None:
        return (Outcome.FAILED, None, "broken") if body.type in (UNIT_HANDOFF, UNIT_STOP) else None

    cloud.node.before = refuse
    row = await cloud.settle((await cloud.create()).id)
    assert row.state is State.FAILED
    assert "cleanup_blocked" in await cloud.slot_healths()
    assert await cloud.world.held() == []


async def test_a_release_during_a_handoff_stops_the_unit_and_a_late_answer_changes_nothing(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)
    async with _held(cloud, UNIT_HANDOFF) as begun:
        made = await cloud.create()
        await begun.wait()
        await cloud.world.release(made.id)
        assert (await cloud.settle(made.id)).state is State.RELEASED
    await asyncio.sleep(0.2)
    assert (await cloud.world.row(made.id)).state is State.RELEASED
    assert kept.unit_id not in cloud.node.units


async def test_a_handoff_that_is_never_answered_ends_at_the_deadline(cloud: Cloud) -> None:
    (kept,) = await ready_stock(cloud, 1)
    async with _held(cloud, UNIT_HANDOFF) as begun:
        made = await cloud.create()
        await begun.wait()
        async with cloud.world.db.transaction() as tx:
            await tx.execute("update compute.allocations set deadline_at = now() where id = $1", made.id)
        row = await cloud.settle(made.id)
    assert row.state is State.FAILED
    assert kept.unit_id not in cloud.node.units
    assert await cloud.world.held() == []


async def test_stock_that_does_not_fit_makes_room(cloud: Cloud) -> None:
    kept = await ready_stock(cloud, 8)
    made = await cloud.create(image="python:3.12")
    assert made.node_id is None
    row = await cloud.settle(made.id)
    assert (row.state, row.unit_id) == (State.ACTIVE, made.id)
    gone = [each for each in kept if (await cloud.world.row(each.id)).state is State.RELEASED]
    assert [each.unit_id for each in gone] == [each.unit_id for each in kept if each.unit_id not in cloud.node.units]
    assert len(gone) == 1
