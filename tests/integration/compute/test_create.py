"""Creating: refusals have reasons, slots are never held twice, requests wait in turn."""

import asyncio
from collections import Counter

import pytest

from integration.compute.stage import ACTIONS, NoSecrets, World, someone
from penstock.billing.errors import InsufficientFunds
from penstock.compute.errors import (
    BadGpuCount,
    NoSingleNode,
    OutOfCapacity,
    Policy,
    QuotaExceeded,
    Unhealthy,
    UnknownSku,
)
from penstock.compute.model import Allocation, State
from penstock.compute.service.create import Create
from penstock.compute.service.waiting import Waiting
from penstock.compute.store import catalogue
from penstock.kit import db as kit_db
from penstock.kit.db import Database, Tx
from penstock.kit.errors import PenstockError
from penstock.wire.rest import AllocationCreate


async def test_create_claims_slots_and_writes_row_fact_timeline_and_audit_together(world: World) -> None:
    node_id = await world.add_node(4)
    made = await world.create(gpus=2, labels={"team": "a"}, command=["sleep", "1"], ports=[80], env={"A": "b"})
    assert (made.state, made.node_id, made.version, made.fence) == (State.REQUESTED, node_id, 1, 1)
    assert made.price_microusd_per_hour == 2 * 3_490_000
    assert (made.memory_bytes, made.cpus) == (2 * 2 << 30, 2.0)
    assert (made.labels, made.command, made.ports, made.env) == ({"team": "a"}, ["sleep", "1"], [80], {"A": "b"})
    assert len(await world.held()) == 2
    assert await world.facts(made.id) == [(1, "provisioning.requested")]
    assert await world.value("select count(*) from kit.audit where target_id = $1", made.id) == 1
    assert [line.state for line in made.timeline] == [State.REQUESTED]
    assert made.deadline_at is not None


async def test_refused_create_leaves_nothing_behind(world: World) -> None:
    await world.add_node(1)
    with pytest.raises(OutOfCapacity):
        await world.create(gpus=2)
    for table in ("compute.allocations", "compute.claims", "kit.outbox", "kit.audit"):
        assert await world.value(f"select count(*) from {table}") == 0


async def test_best_fit_takes_the_node_with_the_least_room(world: World) -> None:
    await world.add_node(8)
    small = await world.add_node(2)
    assert (await world.create(gpus=2)).node_id == small


async def test_gpus_of_one_allocation_are_near_one_another(world: World) -> None:
    await world.add_node(8)
    for _ in range(2):
        made = await world.create(gpus=4)
        groups = await world.value(
            "select count(distinct s.numa_node) from compute.claims c join fleet.slots s on s.id = c.slot_id"
            " where c.allocation_id = $1",
            made.id,
        )
        assert groups == 1


async def test_two_nodes_with_two_free_do_not_make_four(world: World) -> None:
    await world.add_node(2)
    await world.add_node(2)
    with pytest.raises(NoSingleNode, match=r"no single node fits 4 GPUs.*4 are free in all, at most 2 on one node"):
        await world.create(gpus=4)


@pytest.mark.parametrize("health", ["quarantined", "cleanup_blocked"])
async def test_gpus_out_of_service_are_named_as_the_reason(world: World, health: str) -> None:
    await world.add_node(2, health=health)
    with pytest.raises(Unhealthy, match="out of service"):
        await world.create(gpus=2)


@pytest.mark.parametrize("state", ["cordoned", "draining", "unreachable"])
async def test_nodes_out_of_service_are_named_as_the_reason(world: World, state: str) -> None:
    await world.add_node(2, state=state)
    with pytest.raises(Unhealthy):
        await world.create(gpus=1)


@pytest.mark.parametrize("state", ["lost", "retired", "pending"])
async def test_nodes_that_are_gone_count_for_nothing(world: World, state: str) -> None:
    await world.add_node(2, state=state)
    with pytest.raises(OutOfCapacity, match="0 free"):
        await world.create(gpus=1)


async def test_policy_quota_funds_and_shape_each_have_their_own_refusal(world: World) -> None:
    await world.add_node(8)
    with pytest.raises(Policy, match=r"allocations\.create"):
        await world.create(someone(actions=ACTIONS - {"allocations.create"}))
    with pytest.raises(UnknownSku):
        await world.create(sku="none")
    with pytest.raises(BadGpuCount, match="1, 2, 4, 8"):
        await world.create(gpus=9223372036854775808)
    async with world.db.transaction() as tx:
        await catalogue.put_quota(tx, "prj_default", 3)
    await world.create(gpus=2)
    with pytest.raises(QuotaExceeded, match="holds 2 of at most 3 GPUs and asked for 2"):
        await world.create(gpus=2)

    class Broke:
        async def check(self, tx: Tx, **_: object) -> None:
            raise InsufficientFunds("the balance does not cover it")

    async with world.db.transaction() as tx:
        with pytest.raises(InsufficientFunds):
            await Create(Broke(), NoSecrets(), world.handoffs, world.limits)(
                tx, someone(), AllocationCreate(sku="g1.1")
            )


async def test_concurrent_creates_never_pass_the_quota(world: World) -> None:
    await world.add_node(16)
    async with world.db.transaction() as tx:
        await catalogue.put_quota(tx, "prj_default", 5)
    results = await asyncio.gather(*(world.create() for _ in range(16)), return_exceptions=True)
    assert Counter(type(result) for result in results) == {Allocation: 5, QuotaExceeded: 11}


@pytest.mark.parametrize(("gpus", "winners"), [(1, 8), (2, 4), (4, 2)])
async def test_64_racers_for_8_slots_never_hold_one_twice(
    world: World, database_url: str, gpus: int, winners: int
) -> None:
    await world.add_node(8)
    async with kit_db.connect(database_url, lambda *_: None, connections_max=32) as crowd:
        racers = World(crowd)
        callers = [someone(f"prj_{n}") for n in range(8)]
        results = await asyncio.gather(
            *(racers.create(callers[n % 8], gpus=gpus) for n in range(64)), return_exceptions=True
        )
    made = [result for result in results if isinstance(result, Allocation)]
    assert all(isinstance(result, Allocation | OutOfCapacity) for result in results), results
    held = await world.held()
    assert len(made) == winners
    assert len(held) == len({slot for slot, _ in held}) == winners * gpus
    assert set(Counter(allocation for _, allocation in held).values()) == {gpus}


async def test_second_claim_on_a_held_slot_is_impossible(world: World, database: Database) -> None:
    await world.add_node(1)
    made = await world.create()
    slot = (await world.held())[0][0]
    with pytest.raises(Exception, match="claims_held"):
        async with database.transaction() as tx:
            await tx.execute(
                "insert into compute.claims (slot_id, allocation_id, node_id, gpu_uuid, gpu_index, simulated,"
                " project_id, kind, whole_uuid, rack_id) values ($1, $2, 'n', 'g', 0, true, 'p', 'gpu', 'g', 1)",
                slot,
                made.id,
            )


async def test_a_request_may_wait_and_says_why(world: World) -> None:
    await world.add_node(1)
    first = await world.create()
    waits = await world.create(wait_s=60)
    assert (waits.state, waits.node_id) == (State.REQUESTED, None)
    assert waits.reason == "waiting: out of capacity: 1 GPU of SKU g1.1 asked for, 0 free"
    waiting = Waiting(world.db, world.limits)
    assert await waiting.place_all() == 0
    await _free(world, first)
    assert await waiting.place_all() == 1
    placed = await world.row(waits.id)
    assert placed.node_id is not None
    assert placed.reason == ""


async def test_nobody_overtakes_those_who_wait_for_the_same_shape(world: World) -> None:
    await world.add_node(1)
    first = await world.create()
    waits = await world.create(wait_s=60)
    await _free(world, first)
    with pytest.raises(OutOfCapacity, match="1 earlier requests"):
        await world.create()
    later = await world.create(wait_s=60)
    assert await Waiting(world.db, world.limits).place_all() == 1
    assert (await world.row(waits.id)).node_id is not None
    assert (await world.row(later.id)).node_id is None


async def test_capacity_goes_round_over_projects(world: World) -> None:
    await world.add_node(1)
    hog, quiet = someone("prj_hog"), someone("prj_quiet")
    holder = await world.create(hog)
    queue = [await world.create(hog, wait_s=60) for _ in range(3)]
    alone = await world.create(quiet, wait_s=60)
    waiting = Waiting(world.db, world.limits)
    order: list[str] = []
    for _ in range(4):
        await _free(world, holder)
        assert await waiting.place_all() == 1
        holder = await world.row((await world.held())[0][1])
        order.append(holder.id)
    assert order == [alone.id, queue[0].id, queue[1].id, queue[2].id]


async def test_waiting_ends_at_its_deadline_with_the_reason(world: World) -> None:
    waits = await world.create(wait_s=1)
    waiting = Waiting(world.db, world.limits)
    assert await waiting.expire() == 0
    await asyncio.sleep(1.1)
    assert await waiting.expire() == 1
    row = await world.row(waits.id)
    assert row.state is State.FAILED
    assert row.reason.startswith("no capacity within 1 s (out of capacity")
    assert row.ended_at is not None
    assert await world.facts(waits.id) == [(1, "provisioning.requested"), (2, "provisioning.failed")]


async def test_a_placed_request_that_never_starts_gives_its_slots_back(world: World) -> None:
    await world.add_node(1)
    made = await world.create()
    async with world.db.transaction() as tx:
        await tx.execute("update compute.allocations set deadline_at = now() - interval '1 s'")
    assert await Waiting(world.db, world.limits).expire() == 1
    assert (await world.row(made.id)).reason == "provisioning did not start in time"
    assert await world.held() == []


async def _free(world: World, holder: Allocation) -> None:
    """End an allocation without ceremony."""
    async with world.db.transaction() as tx:
        await tx.execute("update compute.claims set released_at = now() where allocation_id = $1", holder.id)
        await tx.execute(
            "update compute.allocations set state = 'released', deadline_at = null, ended_at = now() where id = $1",
            holder.id,
        )


def test_refusals_have_distinct_codes() -> None:
    kinds = [Policy, QuotaExceeded, InsufficientFunds, OutOfCapacity, NoSingleNode, Unhealthy, UnknownSku, BadGpuCount]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(issubclass(kind, PenstockError) for kind in kinds)
