"""What compute answers to other domains, and the ends of billing."""

from datetime import UTC, datetime, timedelta

import pytest

from integration.compute.stage import World, someone
from penstock.compute.claims import Claims
from penstock.compute.model import Event, State
from penstock.compute.occupancy import Occupancy
from penstock.compute.service.release import Release
from penstock.compute.store import allocations
from penstock.compute.store.allocations import Change
from penstock.compute.units import Units
from penstock.kit import audit
from penstock.kit.errors import Conflict, StaleRow

ACTOR = audit.system("test")


async def test_claims_units_and_occupancy_tell_what_is_held(world: World) -> None:
    node_id = await world.add_node(2)
    caller = someone("prj_a")
    made = await world.create(caller, ports=[80])
    slot = (await world.held())[0][0]
    async with world.db.read() as conn:
        assert await Claims().holders(conn, [node_id]) == {slot: made.id}
        assert await Claims().holders(conn, []) == {}
        found = await Units().find(conn, project_id="prj_a", allocation_id=made.id)
        assert found is not None
        assert (found.node_id, found.unit_id, found.state) == (node_id, made.unit_id, State.REQUESTED)
        assert await Units().find(conn, project_id="prj_b", allocation_id=made.id) is None
        assert await Occupancy().occupied(conn, "prj_a") == "allocations"
        assert await Occupancy().occupied(conn, "prj_b") == ""


async def test_second_writer_loses(world: World) -> None:
    await world.add_node(1)
    made = await world.create()
    change = Change(reason="", deadline_s=10)
    async with world.db.transaction() as tx:
        await allocations.move(tx, made, Event.PLACED, change)
    with pytest.raises(StaleRow):
        async with world.db.transaction() as tx:
            await allocations.move(tx, made, Event.RELEASE, change)
    assert (await world.row(made.id)).state is State.PROVISIONING
    assert [version for version, _ in await world.facts(made.id)] == [1, 2]


async def test_a_move_that_the_table_lacks_is_refused(world: World) -> None:
    await world.add_node(1)
    made = await world.create()
    with pytest.raises(Conflict, match="requested cannot take ready"):
        async with world.db.transaction() as tx:
            await allocations.move(tx, made, Event.READY, Change(reason="", deadline_s=None))


async def activated(world: World) -> str:
    made = await world.create()
    async with world.db.transaction() as tx:
        begun = await allocations.move(tx, made, Event.PLACED, Change(reason="", deadline_s=10))
        await allocations.move(tx, begun, Event.READY, Change(reason="", deadline_s=None))
        await tx.execute("update compute.allocations set active_at = now() - interval '1 h'")
    return made.id


async def test_billing_ends_with_the_release_and_never_later(world: World) -> None:
    await world.add_node(1)
    allocation_id = await activated(world)
    released = await world.release(allocation_id)
    assert released.billing_ended_at is not None
    assert released.ended_at is None
    async with world.db.transaction() as tx:
        stuck = await allocations.move(tx, released, Event.EXHAUSTED, Change(reason="", deadline_s=None))
        retried = await allocations.move(tx, stuck, Event.RETRY, Change(reason="", deadline_s=10))
        ended = await allocations.move(tx, retried, Event.PROVED, Change(reason="", deadline_s=None))
    assert {row.billing_ended_at for row in (stuck, retried, ended)} == {released.billing_ended_at}


@pytest.mark.parametrize(
    ("heard_ago", "billed_until_heard"), [(timedelta(minutes=10), True), (timedelta(hours=2), False)]
)
async def test_a_lost_node_ends_billing_at_its_last_heartbeat_but_not_before_the_start(
    world: World, heard_ago: timedelta, billed_until_heard: bool
) -> None:
    node_id = await world.add_node(1)
    allocation_id = await activated(world)
    heard = datetime.now(UTC) - heard_ago
    async with world.db.transaction() as tx:
        assert await Release(world.limits).node(tx, ACTOR, node_id, "the node is lost", ended_at=heard) == 1
    row = await world.row(allocation_id)
    assert (row.state, row.reason) == (State.RELEASING, "the node is lost")
    assert row.billing_ended_at == (heard if billed_until_heard else row.active_at)


async def test_what_never_ran_is_never_billed(world: World) -> None:
    await world.add_node(1)
    made = await world.create()
    assert (await world.release(made.id)).billing_ended_at is None
