"""Warm stock: floors are kept, each unit goes to one tenant, and stock is never in a tenant's way."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from integration.compute.stage import ACTIONS, Asked, World, someone
from penstock.compute.errors import BadGpuCount, OutOfCapacity, QuotaExceeded, UnknownSku
from penstock.compute.model import Allocation, Draft, Purpose, Shape, State
from penstock.compute.service import stock
from penstock.compute.service.advance import Advance, Verdict
from penstock.compute.service.release import Release
from penstock.compute.service.waiting import Waiting
from penstock.compute.service.watch import Patience, Watch
from penstock.compute.store import allocations, catalogue, sweeps
from penstock.compute.store.stock import Standing
from penstock.fleet import slots
from penstock.kit import audit
from penstock.kit import db as kit_db
from penstock.kit.errors import Denied, NotFound
from penstock.wire.rest import StockFloorPut

OPERATOR = someone(actions=ACTIONS | {"stock.read", "stock.write"}, operator=True)
SHAPE = Shape(sku="g1.1", gpus=1, image="python:3")


def _nobody(subject: str, payload: bytes) -> None:
    """Hints that nobody hears."""


async def floor(world: World, count: int, *, gpus: int = 1, image: str = "python:3") -> Standing:
    async with world.db.transaction() as tx:
        return await stock.put(tx, OPERATOR, "g1.1", StockFloorPut(floor=count, gpus=gpus, image=image))


async def standing(world: World) -> Standing:
    async with world.db.read() as conn:
        return (await stock.page(conn, OPERATOR, after=None, limit=10))[0]


async def living(world: World) -> Sequence[Allocation]:
    async with world.db.read() as conn:
        rows = await conn.fetch("select * from compute.allocations where purpose = 'stock' and ended_at is null")
    return [allocations.of_row(row) for row in rows]


async def start(world: World) -> list[Allocation]:
    """Play the sagas of all stock that starts."""
    moves, started = Advance(slots, world.limits), list[Allocation]()
    for each in await living(world):
        if each.state is State.REQUESTED:
            async with world.db.transaction() as tx:
                await moves.begin(tx, each.id)
                await moves.activate(tx, each.id, each.fence)
            started.append(await world.row(each.id))
    return started


async def stop(world: World, allocation_id: str) -> None:
    """Play the saga of a release whose cleanup is proved."""
    row = await world.row(allocation_id)
    async with world.db.transaction() as tx:
        assert await Advance(slots, world.limits).finish(tx, allocation_id, row.fence) is Verdict.DONE


async def stocked(world: World, count: int, *, gpus: int = 1, image: str = "python:3") -> list[Allocation]:
    """Ready stock, and a node that has room for no more."""
    await world.add_node(count * gpus)
    await floor(world, count, gpus=gpus, image=image)
    ready = list[Allocation]()
    while len(ready) < count:
        await world.keeper.keep()
        ready += await start(world)
    return ready


async def test_two_keepers_bring_a_floor_up_without_overshooting(world: World) -> None:
    await world.add_node(16)
    await floor(world, 6)
    while (await standing(world)).ready < 6:
        await asyncio.gather(*(world.keeper.keep() for _ in range(4)))
        assert len(await living(world)) <= 6
        assert (await standing(world)).starting <= stock.STARTING_MAX
        await start(world)
    await asyncio.gather(*(world.keeper.keep() for _ in range(4)))
    made = await living(world)
    assert [row.state for row in made] == [State.ACTIVE] * 6
    assert {(row.project_id, row.price_microusd_per_hour, row.purpose) for row in made} == {
        ("prj_platform", 0, Purpose.STOCK)
    }
    assert await world.value("select count(*) from compute.quotas") == 0
    assert await world.value("select count(*) from kit.audit where action = 'stock.start'") == 6


async def test_a_handoff_is_one_transaction_with_timeline_facts_and_claims(world: World) -> None:
    (kept,) = await stocked(world, 1)
    tenant = someone("prj_tenant")
    made = await world.create(tenant, env={"A": "b"}, command=["sleep", "1"], ports=[80], name="n", labels={"l": "v"})
    assert (made.state, made.unit_id, made.stock_id) == (State.PROVISIONING, kept.unit_id, kept.id)
    assert (made.project_id, made.node_id, made.fence, made.version) == ("prj_tenant", kept.node_id, 1, 2)
    assert (made.env, made.command, made.ports, made.name) == ({"A": "b"}, ["sleep", "1"], [80], "n")
    assert (made.gpu_uuids, made.price_microusd_per_hour) == (kept.gpu_uuids, 3_490_000)
    assert made.deadline_at is not None
    assert [(move.state, move.reason) for move in made.timeline] == [
        (State.REQUESTED, ""),
        (State.PROVISIONING, "from warm stock"),
    ]
    left = await world.row(kept.id)
    assert (left.state, left.reason, left.ended_at is not None) == (State.RELEASED, f"handed over to {made.id}", True)
    assert await world.facts(made.id) == [(1, "provisioning.requested"), (2, "provisioning.started")]
    assert (await world.facts(kept.id))[-1] == (4, "provisioning.releasing.completed")
    assert [holder for _, holder in await world.held()] == [made.id]
    assert isinstance(world.handoffs, Asked)
    assert [asked.id for asked in world.handoffs.allocations] == [made.id]
    assert (await standing(world)).handed_over == 1


async def test_facts_of_a_handoff_carry_the_same_as_others(world: World) -> None:
    (kept,) = await stocked(world, 1)
    made = await world.create()
    for row, state, reason in (
        (made, State.REQUESTED, ""),
        (made, State.PROVISIONING, "from warm stock"),
        (await world.row(kept.id), State.RELEASED, f"handed over to {made.id}"),
    ):
        expected = Draft.payload(row, state=state, reason=reason, node_id=row.node_id)
        found = await world.value(
            "select payload from kit.outbox where aggregate_id = $1 and payload ->> 'state' = $2", row.id, state
        )
        assert found == expected
    order = "select array_agg(version order by seq) from kit.outbox where aggregate_id = $1"
    assert await world.value(order, made.id) == [1, 2]


async def test_no_saga_is_started_for_a_handoff_until_it_is_overdue_for_an_answer(world: World) -> None:
    await stocked(world, 1)
    made = await world.create()
    watch = Watch(world.db, Patience(fresh_s=0, idle_s=1))
    assert made.id not in [found.id for found in await watch.undriven()]
    await asyncio.sleep(1.1)
    assert made.id in [found.id for found in await watch.undriven()]


async def test_64_racers_on_8_units_each_get_one_of_their_own(world: World, database_url: str) -> None:
    units = {row.unit_id for row in await stocked(world, 8)}
    async with kit_db.connect(database_url, _nobody, connections_max=32) as crowd:
        racers = World(crowd)
        callers = [someone(f"prj_{n}") for n in range(8)]
        results = await asyncio.gather(*(racers.create(callers[n % 8]) for n in range(64)), return_exceptions=True)
    made = [result for result in results if isinstance(result, Allocation)]
    assert all(isinstance(result, Allocation | OutOfCapacity) for result in results), results
    assert {row.unit_id for row in made} == units
    assert len(made) == 8
    held = await world.held()
    assert {holder for _, holder in held} == {row.id for row in made}
    assert set(Counter(slot for slot, _ in held).values()) == {1}


@pytest.mark.parametrize(
    "ask", [{"image": "python:3.12"}, {"gpus": 2}], ids=["another image", "another number of gpus"]
)
async def test_what_does_not_fit_the_stock_takes_free_slots(world: World, ask: dict[str, Any]) -> None:
    await stocked(world, 1)
    await world.add_node(2)
    made = await world.create(**ask)
    assert (made.state, made.stock_id) == (State.REQUESTED, None)
    assert (await standing(world)).ready == 1


async def test_stock_on_a_node_or_gpu_out_of_service_is_not_given_away_and_leaves(world: World) -> None:
    (kept,) = await stocked(world, 1)
    async with world.db.transaction() as tx:
        await tx.execute("update fleet.slots set quarantined = true")
    with pytest.raises(OutOfCapacity):
        await world.create(image="x")
    await world.add_node(1)
    assert (await world.create()).stock_id is None
    assert (await standing(world)).ready == 0
    await world.keeper.keep()
    assert (await world.row(kept.id)).state is State.RELEASING


async def test_a_changed_offer_replaces_the_stock_that_was_made_for_the_old_one(world: World) -> None:
    (kept,) = await stocked(world, 1)
    await world.add_node(2)
    async with world.db.transaction() as tx:
        await tx.execute("update compute.skus set memory_bytes_per_gpu = memory_bytes_per_gpu * 2")
    assert (await world.create()).stock_id is None
    await world.keeper.keep()
    assert (await world.row(kept.id)).state is State.RELEASING
    fresh = [row for row in await living(world) if row.id != kept.id]
    assert [row.memory_bytes for row in fresh] == [kept.memory_bytes * 2]


async def test_a_worker_of_a_function_gets_stock_only_where_a_sidecar_is(world: World) -> None:
    [unit] = await stocked(world, 1)
    with pytest.raises(OutOfCapacity):
        await world.create(purpose=Purpose.FUNCTION_WORKER)
    assert (await world.row(unit.id)).state is State.ACTIVE, "it does not give way for what it cannot help"
    async with world.db.transaction() as tx:
        await tx.execute("update fleet.nodes set serves_functions = true")
    assert (await world.create(purpose=Purpose.FUNCTION_WORKER)).stock_id == unit.id


async def test_quota_applies_to_what_comes_from_stock(world: World) -> None:
    (kept,) = await stocked(world, 1)
    async with world.db.transaction() as tx:
        await catalogue.put_quota(tx, "prj_default", 0)
    with pytest.raises(QuotaExceeded):
        await world.create()
    assert (await world.row(kept.id)).state is State.ACTIVE


async def test_lowering_a_floor_releases_the_newest_and_removing_it_the_rest(world: World) -> None:
    kept = await stocked(world, 3)
    await floor(world, 1)
    await world.keeper.keep()
    states = [(await world.row(row.id)).state for row in sorted(kept, key=lambda row: row.id)]
    assert states == [State.ACTIVE, State.RELEASING, State.RELEASING]
    async with world.db.transaction() as tx:
        await stock.remove(tx, OPERATOR, SHAPE)
    await world.keeper.keep()
    assert {(await world.row(row.id)).state for row in kept} == {State.RELEASING}
    with pytest.raises(NotFound, match="no floor"):
        async with world.db.transaction() as tx:
            await stock.remove(tx, OPERATOR, SHAPE)


async def test_a_floor_without_room_says_why_and_never_waits(world: World) -> None:
    await world.add_node(1)
    await floor(world, 2)
    await world.keeper.keep()
    now = await standing(world)
    assert (now.starting, now.floor.reason) == (1, "out of capacity: 1 GPU of SKU g1.1 asked for, 0 free")
    assert await world.value("select count(*) from compute.waiting") == 0


async def test_failed_starts_are_tried_ever_more_seldom_and_the_floor_says_so(world: World) -> None:
    await world.add_node(8)
    await floor(world, 1)
    for failures in (1, 2, 3):
        await world.keeper.keep()
        (row,) = await living(world)
        await _fail(world, row)
        await world.keeper.keep()
        assert await living(world) == []
        assert (
            await standing(world)
        ).floor.reason == f"{failures} starts failed in a row, the next waits a while: no such image"
        async with world.db.transaction() as tx:
            await tx.execute(
                "update compute.allocations set changed_at = changed_at - make_interval(secs => $1)", 2**failures
            )
    await world.keeper.keep()
    await start(world)
    await world.keeper.keep()
    assert (await standing(world)).floor.reason == ""


async def test_units_that_went_with_their_host_are_replaced_without_a_pause(world: World) -> None:
    for row in await stocked(world, 2):
        async with world.db.transaction() as tx:
            await tx.execute(
                "update compute.allocations set state = 'released', reason = 'the unit is gone from its node',"
                " active_at = active_at - interval '2 minutes', ended_at = clock_timestamp(),"
                " changed_at = clock_timestamp() where id = $1",
                row.id,
            )
    await world.add_node(2)
    await world.keeper.keep()
    assert len(await living(world)) == 2
    assert (await standing(world)).floor.reason == ""


async def _fail(world: World, row: Allocation) -> None:
    moves = Advance(slots, world.limits)
    async with world.db.transaction() as tx:
        await moves.begin(tx, row.id)
        await moves.condemn(tx, row.id, row.fence, "no such image")
        await moves.fail(tx, row.id, unproved="")


async def test_stock_takes_nothing_that_a_tenant_waits_for(world: World) -> None:
    await world.add_node(2)
    waits = await world.create(gpus=4, wait_s=60)
    await floor(world, 1)
    await world.keeper.keep()
    assert await living(world) == []
    assert (await standing(world)).floor.reason == "tenants wait for these GPUs"
    await world.release(waits.id)
    await world.keeper.keep()
    assert len(await living(world)) == 1


async def test_a_tenant_is_not_refused_while_stock_holds_slots_that_would_do(world: World) -> None:
    (kept,) = await stocked(world, 1)
    made = await world.create(image="python:3.12")
    assert (made.state, made.node_id) == (State.REQUESTED, None)
    assert made.reason == "waiting: warm stock is being stopped to make room"
    left = await world.row(kept.id)
    assert (left.state, left.yields_to) == (State.RELEASING, made.id)
    assert await Waiting(world.db, world.limits).place_all() == 0
    with pytest.raises(OutOfCapacity):
        await world.create(image="python:3.12")
    await stop(world, kept.id)
    placed = await world.row(made.id)
    assert (placed.node_id, placed.gpu_uuids) == (kept.node_id, kept.gpu_uuids)
    assert [holder for _, holder in await world.held()] == [made.id]


async def test_free_slots_and_those_of_several_stock_units_add_up(world: World) -> None:
    kept = await stocked(world, 2)
    node_id = kept[0].node_id
    assert node_id is not None
    await world.grow(node_id, 4)
    made = await world.create(gpus=4)
    assert made.node_id is None
    await stop(world, kept[0].id)
    assert (await world.row(made.id)).node_id is None
    await stop(world, kept[1].id)
    placed = await world.row(made.id)
    assert (placed.node_id, len(placed.gpu_uuids)) == (node_id, 4)
    assert {holder for _, holder in await world.held()} == {made.id}


async def test_slots_that_the_tenant_does_not_need_go_back_to_the_pool(world: World) -> None:
    (kept,) = await stocked(world, 1, gpus=4)
    made = await world.create(image="python:3.12")
    await stop(world, kept.id)
    assert [holder for _, holder in await world.held()] == [made.id]
    assert (await world.create(gpus=2, image="python:3.12")).node_id is not None


async def test_a_tenant_who_gives_up_leaves_the_slots_to_others(world: World) -> None:
    (kept,) = await stocked(world, 1)
    made = await world.create(image="python:3.12")
    await world.release(made.id)
    await stop(world, made.id)
    await stop(world, kept.id)
    assert await world.held() == []


async def test_a_stock_unit_that_cannot_be_stopped_sends_the_tenant_back_to_the_queue(world: World) -> None:
    (kept,) = await stocked(world, 1)
    made = await world.create(image="python:3.12")
    async with world.db.transaction() as tx:
        await Advance(slots, world.limits).abandon(tx, kept.id, (await world.row(kept.id)).fence, why="dirty")
    node_id = await world.add_node(1)
    assert await Waiting(world.db, world.limits).place_all() == 1
    assert (await world.row(made.id)).node_id == node_id


async def test_room_that_is_not_made_in_time_fails_the_request_with_the_reason(world: World) -> None:
    await stocked(world, 1)
    made = await world.create(image="python:3.12")
    async with world.db.transaction() as tx:
        await tx.execute("update compute.allocations set deadline_at = now() where id = $1", made.id)
    await Waiting(world.db, world.limits).expire()
    row = await world.row(made.id)
    assert row.state is State.FAILED
    assert row.reason == "no room could be made in time (warm stock is being stopped to make room)"


async def test_a_request_that_waits_gets_the_slots_of_stock(world: World) -> None:
    (kept,) = await stocked(world, 1)
    async with world.db.transaction() as tx:
        await tx.execute("update fleet.nodes set state = 'cordoned'")
    waits = await world.create(image="python:3.12", wait_s=60)
    assert (await world.row(kept.id)).yields_to is None
    async with world.db.transaction() as tx:
        await tx.execute("update fleet.nodes set state = 'ready'")
    assert await Waiting(world.db, world.limits).place_all() == 0
    assert (await world.row(waits.id)).reason == "waiting: warm stock is being stopped to make room"
    await stop(world, kept.id)
    assert (await world.row(waits.id)).node_id == kept.node_id


async def test_stock_that_is_already_leaving_makes_room_as_well(world: World) -> None:
    (kept,) = await stocked(world, 1)
    async with world.db.transaction() as tx:
        await Release(world.limits).by_system(tx, audit.system("test"), kept.id, "why", only_if=State.ACTIVE)
    made = await world.create()
    assert (made.node_id, made.stock_id) == (None, None)
    with pytest.raises(OutOfCapacity):
        await world.create()
    await stop(world, kept.id)
    assert (await world.row(made.id)).node_id == kept.node_id


async def test_stock_that_was_handed_over_cannot_be_released(world: World) -> None:
    (kept,) = await stocked(world, 1)
    made = await world.create()
    async with world.db.transaction() as tx:
        done = await Release(world.limits).by_system(tx, audit.system("test"), kept.id, "why")
    assert done is not None
    assert (done.state, done.fence) == (State.RELEASED, kept.fence)
    assert [holder for _, holder in await world.held()] == [made.id]


async def test_a_release_that_races_with_a_handoff_has_one_winner(world: World) -> None:
    kept = await stocked(world, 8)

    async def release(stock_id: str) -> None:
        async with world.db.transaction() as tx:
            await Release(world.limits).by_system(tx, audit.system("test"), stock_id, "why", only_if=State.ACTIVE)

    results = await asyncio.gather(
        *(release(row.id) for row in kept[::2]), *(world.create() for _ in range(8)), return_exceptions=True
    )
    made = [result for result in results if isinstance(result, Allocation)]
    for row in kept:
        now = await world.row(row.id)
        taken = [each for each in made if each.stock_id == row.id]
        assert (now.state, len(taken)) in {(State.RELEASED, 1), (State.RELEASING, 0), (State.ACTIVE, 0)}
    assert len({each.unit_id for each in made if each.stock_id}) == len([each for each in made if each.stock_id])


async def test_a_unit_that_was_handed_over_is_no_orphan_of_its_stock(world: World) -> None:
    (kept,) = await stocked(world, 1)
    made = await world.create()
    async with world.db.transaction() as tx:
        await tx.execute(
            "insert into fleet.unit_reports (node_id, unit_id, state, exit_class, since)"
            " values ($1, $2, 'running', '', now() - interval '1 hour')",
            kept.node_id,
            kept.unit_id,
        )
        await tx.execute("update compute.allocations set ended_at = now() - interval '30 min' where id = $1", kept.id)
    async with world.db.read() as conn:
        assert await sweeps.orphans(conn, grace_s=1, limit=10) == []
        await conn.execute(
            "update compute.allocations set ended_at = now() - interval '1 min', state = 'released', deadline_at = null"
            " where id = $1",
            made.id,
        )
        assert [found.allocation_id for found in await sweeps.orphans(conn, grace_s=1, limit=10)] == [made.id]


async def test_floors_are_for_operators_and_checked(world: World) -> None:
    tenant = someone(actions=ACTIONS | {"stock.read", "stock.write"})
    async with world.db.transaction() as tx:
        with pytest.raises(Denied):
            await stock.put(tx, tenant, "g1.1", StockFloorPut(floor=1))
        with pytest.raises(Denied):
            await stock.page(tx, tenant, after=None, limit=1)
        with pytest.raises(UnknownSku):
            await stock.put(tx, OPERATOR, "none", StockFloorPut(floor=1))
        with pytest.raises(BadGpuCount):
            await stock.put(tx, OPERATOR, "g1.1", StockFloorPut(floor=1, gpus=3))
