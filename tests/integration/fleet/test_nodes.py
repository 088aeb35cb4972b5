"""Nodes go through their life by heartbeats and orders; slots are placeable only when everything is well."""

import asyncio
from datetime import datetime

import pytest

from integration.fleet.agent import inventory
from integration.fleet.conftest import Connect, Enrol, Holders
from penstock.fleet import nodes as queries
from penstock.fleet import slots
from penstock.fleet.errors import AbsenceNotVerified, IllegalMove, NodeInUse, SlotHeld, SlotNotBlocked
from penstock.fleet.model import NodeEvent, NodeState
from penstock.fleet.nodes import Nodes
from penstock.fleet.store import links
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.sweeper import Sweeper
from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import NotFound, StaleRow
from penstock.kit.ids import new_id
from penstock.wire import subjects
from penstock.wire.link import GpuReport, HeartbeatAck, UnitReport, UnitState, Welcome


async def placeable(database: Database) -> list[str]:
    async with database.read() as conn:
        return [
            row["gpu_uuid"] for row in await conn.fetch("select gpu_uuid from fleet.placeable_slots order by gpu_index")
        ]


async def state_of(database: Database, node_id: str) -> str:
    async with database.read() as conn:
        return await conn.fetchval("select state from fleet.nodes where id = $1", node_id)


async def facts(database: Database, node_id: str) -> list[tuple[str, int]]:
    async with database.read() as conn:
        rows = await conn.fetch(
            "select type, version from kit.outbox where aggregate_id = $1 order by version", node_id
        )
    return [(row["type"].removeprefix("fleet.node_"), row["version"]) for row in rows]


async def test_a_node_that_has_just_connected_has_not_said_what_it_has(
    database: Database, enrol: Enrol, connect: Connect
) -> None:
    node_id = (await enrol()).node_id
    first = await connect()
    await first.send(first.hello())
    await first.expect(Welcome)
    assert await _listed(database) == {}
    await first.beat(units=[UnitReport(unit_id="alc_1", state=UnitState.RUNNING)])
    await first.expect(HeartbeatAck)
    listed = await _listed(database)
    assert list(listed) == [node_id]
    again = await connect()
    await again.send(again.hello())
    await again.expect(Welcome)
    assert await _listed(database) == listed, "it was heard of, but its units were not"
    await again.beat()
    await again.expect(HeartbeatAck)
    assert (await _listed(database))[node_id] > listed[node_id]


async def _listed(database: Database) -> dict[str, datetime]:
    async with database.read() as conn:
        rows = await conn.fetch("select node_id, reported_at from fleet.reporting_nodes")
    return {row["node_id"]: row["reported_at"] for row in rows}


async def test_a_node_serves_functions_as_long_as_its_heartbeats_say_so(
    database: Database, enrol: Enrol, connect: Connect, nats_bus: Bus
) -> None:
    looked = asyncio.Event()

    async def look(_: str, __: bytes) -> None:
        looked.set()

    await nats_bus.on_hint(subjects.CAPACITY, look)
    await enrol()
    agent = await connect()
    await agent.send(agent.hello())
    await agent.expect(Welcome)
    for serves in (False, True, True, False):
        await agent.beat(serves_functions=serves)
        await agent.expect(HeartbeatAck)
        assert await _serve(database) == [serves, serves]
    looked.clear()
    await agent.beat(serves_functions=True)
    await agent.expect(HeartbeatAck)
    async with asyncio.timeout(30):
        await looked.wait()
    await agent.beat(serves_functions=False)
    await agent.expect(HeartbeatAck)
    agent = await connect()
    await agent.send(agent.hello(serves_functions=True))
    await agent.expect(Welcome)
    assert await _serve(database) == [True, True]


async def _serve(database: Database) -> list[bool]:
    async with database.read() as conn:
        return [row[0] for row in await conn.fetch("select serves_functions from fleet.placeable_slots")]


async def test_a_nodes_trouble_is_kept_until_it_says_otherwise(
    enrol: Enrol, connect: Connect, database: Database
) -> None:
    await enrol()
    agent = await connect()
    await agent.send(agent.hello())
    await agent.expect(Welcome)
    for said, kept in (("the disk\0 is full", "the disk is full"), ("x" * 5000, "x" * 300), ("", "")):
        await agent.beat(trouble=said)
        await agent.expect(HeartbeatAck)
        async with database.read() as conn:
            assert await conn.fetchval("select trouble from fleet.heartbeats") == kept
            fresh = await conn.fetch("select distinct fresh from fleet.placeable_racks")
        assert [row["fresh"] for row in fresh] == [not kept]


async def test_a_life_from_registration_to_the_end(
    database: Database, enrol: Enrol, connect: Connect, nodes: Nodes, operator: Caller
) -> None:
    node_id = (await enrol()).node_id
    assert await placeable(database) == []
    agent = await connect()
    await agent.send(agent.hello())
    await agent.expect(Welcome)
    assert await placeable(database) == ["GPU-0", "GPU-1"]
    for order, state in (
        (nodes.cordon, "cordoned"),
        (nodes.cordon, "cordoned"),
        (nodes.drain, "draining"),
        (nodes.uncordon, "ready"),
        (nodes.drain, "draining"),
    ):
        async with database.transaction() as tx:
            assert (await order(tx, operator, node_id, "because")).state == state
        assert await placeable(database) == (["GPU-0", "GPU-1"] if state == "ready" else [])
    async with database.read() as conn:
        assert [(found, due) for found, _, due in await queries.draining(conn)] == [(node_id, True)]
        assert await queries.answering(conn) == [node_id]
        assert await queries.gateway_of(conn, node_id) == "gtw_1:1"
    async with database.transaction() as tx:
        await nodes.retire(tx, operator, node_id, "sold")
    assert (await agent.closed()).code == 4401
    async with database.read() as conn:
        assert await queries.page(conn, operator, after="", state=None, limit=10) == []
        retired = await queries.page(conn, operator, after="", state=NodeState.RETIRED, limit=10)
    assert [node.id for node in retired] == [node_id]
    assert await facts(database, node_id) == [
        ("registered", 1),
        ("enrolled", 2),
        ("ready", 3),
        ("cordoned", 4),
        ("draining", 5),
        ("uncordoned", 6),
        ("draining", 7),
        ("retired", 8),
    ]
    async with database.read() as conn:
        actions = await conn.fetch("select action from kit.audit where target_id = $1 order by id", node_id)
    assert [row["action"].removeprefix("nodes.") for row in actions] == [
        "create_enrolment_token",
        "enrol",
        "cordon",
        "drain",
        "uncordon",
        "drain",
        "retire",
    ]


async def test_silence_makes_a_node_unreachable_then_lost_and_it_returns_as_it_was_wished(
    database: Database, enrol: Enrol, connect: Connect, nodes: Nodes, operator: Caller, sweeper: Sweeper
) -> None:
    node_id = (await enrol()).node_id
    agent = await connect()
    await agent.join()
    async with database.transaction() as tx:
        await nodes.cordon(tx, operator, node_id, "")
    await asyncio.sleep(1.6)
    await sweeper.sweep_nodes()
    assert await state_of(database, node_id) == "unreachable"
    async with database.read() as conn:
        assert await queries.answering(conn) == []
        assert await queries.lost(conn) == []
    async with database.transaction() as tx:
        assert (await nodes.drain(tx, operator, node_id, "")).state == "unreachable"
    await asyncio.sleep(1.6)
    await asyncio.gather(*(sweeper.sweep_nodes() for _ in range(3)))
    assert await state_of(database, node_id) == "lost"
    async with database.read() as conn:
        assert await queries.lost(conn) == [node_id]
    await agent.beat()
    await agent.expect(HeartbeatAck)
    await sweeper.sweep_nodes()
    assert await state_of(database, node_id) == "draining"
    assert [fact for fact, _ in await facts(database, node_id)][-5:] == [
        "cordoned",
        "unreachable",
        "draining",
        "lost",
        "draining",
    ]


async def test_a_new_link_brings_a_lost_node_back_at_once(
    database: Database, enrol: Enrol, connect: Connect, sweeper: Sweeper
) -> None:
    node_id = (await enrol()).node_id
    agent = await connect()
    await agent.join()
    await agent.socket.close()
    await asyncio.sleep(1.6)
    await sweeper.sweep_nodes()
    assert await state_of(database, node_id) == "unreachable"
    await (await connect()).join()
    assert await state_of(database, node_id) == "ready"


async def test_the_second_writer_of_a_node_loses(database: Database, enrol: Enrol) -> None:
    node_id = (await enrol()).node_id
    async with database.read() as conn:
        node = await node_rows.find(conn, node_id)
    assert node is not None
    async with database.transaction() as tx:
        await node_rows.move(tx, node, NodeEvent.RETURN_READY, "")
    with pytest.raises(StaleRow):
        async with database.transaction() as tx:
            await node_rows.move(tx, node, NodeEvent.REVOKE, "")


async def test_orders_that_make_no_sense_are_refused(
    database: Database, enrol: Enrol, connect: Connect, nodes: Nodes, operator: Caller, claims: Holders
) -> None:
    node_id = (await enrol()).node_id
    with pytest.raises(IllegalMove):
        async with database.transaction() as tx:
            await nodes.cordon(tx, operator, node_id, "")
    with pytest.raises(NotFound):
        async with database.transaction() as tx:
            await nodes.cordon(tx, operator, new_id("nod"), "")
    agent = await connect()
    await agent.join()
    claims.held = {"slt_1": "alc_1"}
    with pytest.raises(NodeInUse):
        async with database.transaction() as tx:
            await nodes.retire(tx, operator, node_id, "")
    assert await state_of(database, node_id) == "ready"


async def test_a_vanished_gpu_is_missing_and_a_sick_one_degraded_until_it_is_well(
    database: Database, enrol: Enrol, connect: Connect
) -> None:
    await enrol()
    agent = await connect()
    await agent.join(gpus=3)
    await agent.beat(gpus=[GpuReport(uuid="GPU-1", healthy=False, detail="too hot")])
    await agent.expect(HeartbeatAck)
    assert await placeable(database) == ["GPU-0", "GPU-2"]
    agent = await connect()
    await agent.send(agent.hello(inventory=inventory(2)))
    await agent.expect(Welcome)
    assert await placeable(database) == ["GPU-0"]
    await agent.beat(gpus=[GpuReport(uuid="GPU-1", healthy=True)])
    await agent.expect(HeartbeatAck)
    assert await placeable(database) == ["GPU-0", "GPU-1"]
    agent = await connect()
    await agent.join(gpus=3)
    assert await placeable(database) == ["GPU-0", "GPU-1", "GPU-2"]
    async with database.read() as conn:
        rows = await conn.fetch("select type, payload from kit.outbox where type like 'fleet.slot_%' order by seq")
    assert [(row["type"].removeprefix("fleet.slot_"), row["payload"]["gpu_uuid"]) for row in rows] == [
        ("degraded", "GPU-1"),
        ("missing", "GPU-2"),
        ("healthy", "GPU-1"),
        ("healthy", "GPU-2"),
    ]


async def test_a_replaced_gpu_takes_the_place_within_the_approved_number(
    database: Database, enrol: Enrol, connect: Connect
) -> None:
    await enrol(gpus_approved=2)
    agent = await connect()
    await agent.join(gpus=2)
    agent = await connect()
    await agent.send(agent.hello(inventory=inventory(2, first=1)))
    await agent.expect(Welcome)
    assert await placeable(database) == ["GPU-1", "GPU-2"]


async def test_a_blocked_slot_comes_back_only_when_somebody_has_looked(
    database: Database, enrol: Enrol, connect: Connect, operator: Caller, claims: Holders
) -> None:
    node_id = (await enrol()).node_id
    await (await connect()).join()
    async with database.read() as conn:
        slot_id = await conn.fetchval("select slot_id from fleet.placeable_slots where gpu_index = 0")

    async def force(*, verified: bool = True, slot: str = slot_id) -> None:
        async with database.transaction() as tx:
            await slots.force_cleanup(
                tx,
                operator,
                claims,
                node_id=node_id,
                slot_id=slot,
                runtime_verified_absent=verified,
                reason="looked",
            )

    with pytest.raises(SlotNotBlocked):
        await force()
    async with database.transaction() as tx:
        await slots.block(tx, [slot_id], "no proof")
    assert await placeable(database) == ["GPU-1"]
    await (await connect()).join()
    assert await placeable(database) == ["GPU-1"]
    with pytest.raises(AbsenceNotVerified):
        await force(verified=False)
    with pytest.raises(NotFound):
        await force(slot=new_id("slt"))
    claims.held = {slot_id: "alc_1"}
    with pytest.raises(SlotHeld):
        await force()
    claims.held = {}
    assert await placeable(database) == ["GPU-1"]
    await force()
    assert await placeable(database) == ["GPU-0", "GPU-1"]
    async with database.read() as conn:
        detail = await conn.fetchval("select detail from kit.audit where action = 'slots.force_cleanup'")
    assert (detail["blocked"], detail["reason"]) == ("no proof", "looked")


async def test_the_reported_units_replace_those_before(database: Database, enrol: Enrol, connect: Connect) -> None:
    one, two = await enrol("n1"), await enrol("n2")
    agents = [await connect("n1"), await connect("n2")]
    for agent in agents:
        await agent.join()

    async def report(number: int, *units: UnitReport) -> None:
        await agents[number].beat(units=list(units))
        await agents[number].expect(HeartbeatAck)

    running = UnitReport(unit_id="alc_a", state=UnitState.RUNNING)
    await report(0, running, UnitReport(unit_id="alc_b", state=UnitState.STARTING))
    await report(1, running)
    await report(0, UnitReport(unit_id="alc_a", state=UnitState.EXITED, exit_code=137, exit_class="oom"))
    async with database.read() as conn:
        rows = await conn.fetch("select node_id, unit_id, state, exit_code, exit_class from fleet.units")
    assert {tuple(row) for row in rows} == {
        (one.node_id, "alc_a", "exited", 137, "oom"),
        (two.node_id, "alc_a", "running", None, ""),
    }


#: The node was last heard of an hour ago.
_AN_HOUR_AGO = (
    "update fleet.heartbeats set at = at - interval '1 h', listed_at = listed_at - interval '1 h' where node_id = $1"
)


async def test_a_unit_that_is_over_ran_until_the_heartbeat_before_a_silence(
    database: Database, enrol: Enrol, connect: Connect
) -> None:
    node = await enrol("n1")
    agent = await connect("n1")
    await agent.join()

    async def report(*units: UnitReport) -> None:
        await agent.beat(units=list(units))
        await agent.expect(HeartbeatAck)

    async def ran_until() -> dict[str, tuple[str, bool]]:
        async with database.read() as conn:
            rows = await conn.fetch(
                "select unit_id, state, ran_until < now() - interval '1 minute' as long_ago from fleet.unit_ends"
            )
        return {row["unit_id"]: (row["state"], row["long_ago"]) for row in rows}

    running = [UnitReport(unit_id=unit, state=UnitState.RUNNING) for unit in ("alc_a", "alc_b", "alc_c")]
    await report(*running)
    await report(*running[:2])
    assert await ran_until() == {"alc_c": ("gone", False)}
    async with database.transaction() as tx:
        await tx.execute(_AN_HOUR_AGO, node.node_id)
    await report(UnitReport(unit_id="alc_a", state=UnitState.EXITED, exit_code=1, exit_class="exited"))
    assert await ran_until() == {
        "alc_a": ("exited", True),
        "alc_b": ("gone", True),
        "alc_c": ("gone", False),
    }


@pytest.mark.parametrize("left", ["gone", "exited"])
async def test_a_unit_that_ended_while_everything_was_off_ran_until_its_node_was_last_heard_of(
    database: Database, enrol: Enrol, connect: Connect, left: str
) -> None:
    """A node that comes back gives a sign of life first, and tells of its units a moment later."""
    node = await enrol("n1")
    before = await connect("n1")
    await before.join()
    await before.beat(units=[UnitReport(unit_id="alc_a", state=UnitState.RUNNING)])
    await before.expect(HeartbeatAck)
    await before.socket.close()
    async with database.transaction() as tx:
        await tx.execute(_AN_HOUR_AGO, node.node_id)
        heard_at = await tx.fetchval("select listed_at from fleet.heartbeats")
    after = await connect("n1")
    await after.join()
    exited = UnitReport(unit_id="alc_a", state=UnitState.EXITED, exit_class="killed")
    await after.beat(units=[exited] if left == "exited" else [])
    await after.expect(HeartbeatAck)
    async with database.read() as conn:
        rows = await conn.fetch("select state, ran_until, unheard from fleet.unit_ends")
    assert [tuple(row) for row in rows] == [(left, heard_at, True)]


async def test_a_node_that_connected_and_named_no_units_was_last_heard_of_before(
    database: Database, enrol: Enrol, connect: Connect, sweeper: Sweeper
) -> None:
    node_id = (await enrol()).node_id
    agent = await connect()
    await agent.join()
    await agent.beat(units=[UnitReport(unit_id="alc_a", state=UnitState.RUNNING)])
    await agent.expect(HeartbeatAck)
    async with database.transaction() as tx:
        await tx.execute(_AN_HOUR_AGO, node_id)
    await (await connect()).join()
    async with database.transaction() as tx:
        await tx.execute("update fleet.nodes set state = 'lost'")
        lost = await queries.hold_lost(tx, node_id)
        long_ago = await tx.fetchval("select $1 < now() - interval '59 min'", lost and lost.heard_at)
    assert long_ago


async def test_silence_counts_only_while_a_gateway_could_hear(
    database: Database, enrol: Enrol, connect: Connect, sweeper: Sweeper
) -> None:
    """After an outage of the whole control plane no node is given up before it had the time to come back."""
    node_id = (await enrol()).node_id
    await (await connect()).join()
    async with database.transaction() as tx:
        await tx.execute(_AN_HOUR_AGO, node_id)
        await tx.execute("update fleet.listening set since = since - interval '2 h', at = at - interval '1 h'")
        await links.listen(tx)
    await sweeper.sweep_nodes()
    await sweeper.sweep_nodes()
    assert await state_of(database, node_id) == "unreachable", "it had no chance to be heard"
    async with database.transaction() as tx:
        await tx.execute("update fleet.listening set since = since - interval '10 s'")
    await sweeper.sweep_nodes()
    assert await state_of(database, node_id) == "lost"


async def test_many_heartbeats_are_one_statement(database: Database, enrol: Enrol, connect: Connect) -> None:
    names = [f"n{number}" for number in range(5)]
    for name in names:
        await enrol(name)
    agents = [await connect(name) for name in names]
    for agent in agents:
        await agent.join()
    await asyncio.sleep(1.1)
    for agent in agents:
        for _ in range(20):
            await agent.beat()
    for agent in agents:
        await agent.expect(HeartbeatAck)
    async with database.read() as conn:
        spread = await conn.fetchval("select count(distinct date_trunc('second', at)) from fleet.heartbeats")
        written = await conn.fetchval("select count(distinct xmin::text) from fleet.heartbeats")
    assert written <= 2
    assert spread <= 2
