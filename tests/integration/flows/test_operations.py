"""What operators look at: counts that add up, and every kind of trouble with the command that repairs it."""

from integration.compute.stage import World, whole
from integration.compute.test_placement import sku
from penstock.compute.model import State
from penstock.compute.store import catalogue
from penstock.flows import problems
from penstock.flows.operations import overview
from penstock.node.layout import mps_shares
from penstock.wire.rest import Problem
from penstock.wire.tasks import GpuKind


async def kinds(world: World) -> dict[str, Problem]:
    async with world.db.read() as conn:
        return {problem.kind: problem for problem in await problems.find(conn)}


async def execute(world: World, statement: str, *args: object) -> None:
    async with world.db.transaction() as tx:
        await tx.execute(statement, *args)


async def test_the_overview_counts_every_gpu_once(world: World) -> None:
    await world.add_node(gpus=4)
    await world.add_node(gpus=2, state="cordoned")
    await world.add_node(gpus=2, health="quarantined")
    await world.create(gpus=2)
    async with world.db.read() as conn:
        found = await overview(conn, nodes_max=2)
    [gpus] = found.gpus
    assert (gpus.total, gpus.used, gpus.free, gpus.unusable) == (8, 2, 2, 4)
    assert found.nodes == {"cordoned": 1, "ready": 2}
    assert found.allocations == {"requested": 1}
    assert [node.state for node in found.node_list] == ["cordoned", "ready"]


async def test_a_healthy_fleet_has_no_problems(world: World) -> None:
    await world.add_node(gpus=4)
    await world.create()
    assert await kinds(world) == {}


async def test_what_is_stuck_is_listed_with_its_repair(world: World) -> None:
    node = await world.add_node(gpus=4)
    late, failed, waiting = [(await world.create()).id for _ in range(3)]
    old = "changed_at = clock_timestamp() - interval '1 hour', created_at = clock_timestamp() - interval '1 hour'"
    await execute(
        world,
        f"update compute.allocations set {old}, state = $2, deadline_at = clock_timestamp() - interval '5 minutes'"
        " where id = $1",
        late,
        State.PROVISIONING,
    )
    await execute(
        world,
        f"update compute.allocations set {old}, state = $2, reason = 'no proof', deadline_at = null where id = $1",
        failed,
        State.RELEASE_FAILED,
    )
    await execute(
        world, f"update compute.allocations set {old}, node_id = null, reason = 'waiting: full' where id = $1", waiting
    )
    found = await kinds(world)
    assert found["late_provisioning"].id == late
    assert (found["release_failed"].reason, found["release_failed"].repair) == (
        "no proof",
        f"penstock alloc release {failed}",
    )
    assert found["waiting"].reason == "waiting: full"
    await execute(world, "update fleet.nodes set state = 'lost', state_reason = 'silent' where id = $1", node)
    assert "recover" in (await kinds(world))["node_lost"].repair


async def test_orphans_are_found_both_ways(world: World) -> None:
    node = await world.add_node(gpus=4)
    active = (await world.create()).id
    await execute(
        world,
        "update compute.allocations set state = 'active', deadline_at = null,"
        " active_at = clock_timestamp() - interval '10 minutes' where id = $1",
        active,
    )
    await execute(
        world,
        "insert into fleet.heartbeats (node_id, at) values ($1, clock_timestamp())"
        " on conflict (node_id) do update set at = excluded.at",
        node,
    )
    await execute(
        world,
        "insert into fleet.unit_reports (node_id, unit_id, state, exit_class, since)"
        " values ($1, 'alc_nobody', 'running', '', clock_timestamp() - interval '10 minutes')",
        node,
    )
    found = await kinds(world)
    assert found["orphan_allocation"].id == active
    assert found["orphan_unit"].id == "alc_nobody"


async def test_a_node_that_begins_nothing_new_is_listed_with_its_own_words(world: World) -> None:
    node = await world.add_node(gpus=1)
    await execute(
        world,
        "insert into fleet.heartbeats (node_id, at, trouble) values ($1, clock_timestamp(), 'the disk is full')"
        " on conflict (node_id) do update set at = excluded.at, trouble = excluded.trouble",
        node,
    )
    found = (await kinds(world))["node_troubled"]
    assert (found.id, found.reason.endswith("begins nothing new: the disk is full")) == (node, True)


async def test_a_held_event_of_a_payment_provider_is_listed(world: World) -> None:
    await execute(
        world,
        "insert into billing.provider_events (provider, event_id, type, state, reason, body, received_at)"
        " values ('stripe', 'evt_1', 'charge.refunded', 'held', 'the currency has a NUL', '{}', clock_timestamp())",
    )
    found = (await kinds(world))["provider_event_held"]
    assert (found.id, found.reason) == ("evt_1", "charge.refunded of stripe: the currency has a NUL")
    assert "provider-events show evt_1" in found.repair


async def test_blocked_and_quarantined_slots_are_listed(world: World) -> None:
    await world.add_node(gpus=1, health="cleanup_blocked")
    await world.add_node(gpus=1, health="quarantined")
    found = await kinds(world)
    assert "force-cleanup" in found["slot_cleanup_blocked"].repair
    assert "gpu return" in found["slot_quarantined"].repair


async def test_a_quarantine_is_listed_with_its_own_reason_and_time(world: World) -> None:
    node = await world.add_node(gpus=1, health="quarantined")
    await execute(
        world,
        "insert into fleet.gpu_quarantines (id, node_id, gpu_uuid, cause, detail, release_reason)"
        " select 'gqr_1', node_id, whole_uuid, 'operator', 'loud fan', '' from fleet.slots where node_id = $1",
        node,
    )
    found = (await kinds(world))["slot_quarantined"]
    assert found.reason == "loud fan"
    assert found.since is not None


async def test_shares_are_slots_and_their_gpus_are_counted_once(world: World) -> None:
    listing = [*mps_shares(whole("GPU-a", 0), 2), *mps_shares(whole("GPU-b", 1), 6), whole("GPU-c", 2)]
    await world.add_node(listing=listing)
    async with world.db.transaction() as tx:
        await tx.execute("update fleet.slots set blocked = true where whole_uuid = 'GPU-a'")
        await catalogue.put_sku(tx, sku("mps", GpuKind.MPS))
    await world.create(sku="mps", gpus=2)
    async with world.db.read() as conn:
        found = await overview(conn, nodes_max=2)
    [gpus], [shown] = found.gpus, found.node_list
    assert (gpus.total, gpus.used, gpus.free, gpus.unusable) == (3, 1, 1, 1)
    assert (gpus.slots_total, gpus.slots_free) == (9, 5)
    assert (shown.gpus_total, shown.gpus_used, shown.gpus_unusable) == (3, 1, 1)
    assert (shown.slots_total, shown.slots_used) == (9, 2)
