"""Tasks reach their node soon and once, survive broken links, and end by one result or their deadline."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from integration.fleet.agent import inventory
from integration.fleet.conftest import Connect, Enrol
from penstock.fleet import pki
from penstock.fleet.errors import StaleFence, TaskTooBig
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.errors import Invalid
from penstock.wire import subjects
from penstock.wire.link import Ask, ResultVerdict
from penstock.wire.link import Tasks as TasksFrame
from penstock.wire.tasks import (
    HEALTH_PROBE,
    TOPOLOGY_DISCOVER,
    UNIT_START,
    HealthProbe,
    HealthReport,
    Limits,
    Outcome,
    TaskBody,
    TopologyDiscover,
    UnitStart,
)

REPORT = HealthReport(sandbox="bubblewrap", units=[], disk_free_bytes=1, memory_free_bytes=1)
LIMITS = Limits(memory_bytes=1, processes_max=1, cpus=1, scratch_bytes=1)


async def dispatch(
    database: Database,
    tasks: Tasks,
    node_id: str,
    key: str = "key",
    *,
    fence: int = 1,
    expires_s: float = 60,
    allocation_id: str | None = "alc_1",
) -> str:
    async with database.transaction() as tx:
        return await tasks.dispatch(
            tx,
            node_id=node_id,
            type=HEALTH_PROBE,
            allocation_id=allocation_id,
            fence=fence,
            params=HealthProbe(),
            dedupe_key=key,
            expires_s=expires_s,
        )


async def test_a_task_reaches_its_node_at_once_and_its_result_is_told(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect, nats_bus: Bus, folder: Path
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    told: asyncio.Queue[str] = asyncio.Queue()

    async def note(subject: str, _: bytes) -> None:
        told.put_nowait(subject)

    await nats_bus.on_hint(subjects.ALL_TASKS_DONE, note)
    await asyncio.sleep(0.3)  # the look around that every new link causes is over
    began = time.monotonic()
    task_id = await dispatch(database, tasks, enrolled.node_id)
    frame = await agent.expect(TasksFrame)
    assert time.monotonic() - began < 1
    assert pki.verify(enrolled.task_keys, frame.tasks[0])
    body = msgspec.msgpack.decode(frame.tasks[0].body, type=TaskBody)
    assert (body.task_id, body.node_id, body.fence) == (task_id, enrolled.node_id, 1)
    await agent.answer(task_id, 1, REPORT)
    async with asyncio.timeout(30):
        assert await told.get() == subjects.task_done(task_id)
    async with database.read() as conn:
        outcome = await tasks.outcome(conn, task_id)
    assert outcome is not None
    assert outcome.succeeded


async def test_a_task_whose_hint_was_lost_is_found(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect, database_url: str
) -> None:
    from penstock.kit import db

    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    async with db.connect(database_url, lambda _, __: None) as mute:
        task_id = await dispatch(mute, tasks, enrolled.node_id)
    assert (await agent.task(timeout=30)).task_id == task_id


async def test_one_task_per_dedupe_key_among_racers(database: Database, tasks: Tasks, enrol: Enrol) -> None:
    enrolled = await enrol()
    ids = await asyncio.gather(*(dispatch(database, tasks, enrolled.node_id) for _ in range(10)))
    assert len(set(ids)) == 1


async def test_an_agent_gets_no_more_than_it_asked_for(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join(ask=2)
    ids = [await dispatch(database, tasks, enrolled.node_id, f"key{number}") for number in range(5)]
    assert [await agent.next_task_id() for _ in range(2)] == ids[:2]
    with pytest.raises(TimeoutError):
        await agent.receive(timeout=2.5)
    agent = await connect()
    await agent.join(ask=0)
    await agent.send(Ask(count=3))
    assert [await agent.next_task_id() for _ in range(3)] == ids[:3]
    await agent.answer(ids[0], 1, REPORT)
    assert await agent.next_task_id() == ids[3]


async def test_a_task_in_flight_is_sent_again_over_the_next_link(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    task_id = await dispatch(database, tasks, enrolled.node_id)
    assert (await agent.task()).task_id == task_id
    await agent.socket.close()
    agent = await connect()
    await agent.join()
    assert (await agent.task()).task_id == task_id
    assert (await agent.answer(task_id, 1, REPORT)).verdict is ResultVerdict.APPLIED


async def test_a_living_link_keeps_its_lease(database: Database, tasks: Tasks, enrol: Enrol, connect: Connect) -> None:
    """The lease is two seconds here; the task takes four and is not sent twice."""
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    task_id = await dispatch(database, tasks, enrolled.node_id)
    await agent.task()
    with pytest.raises(TimeoutError):
        await agent.receive(timeout=4)
    async with database.read() as conn:
        row = await conn.fetchrow("select attempts, state from fleet.tasks where id = $1", task_id)
    assert row is not None
    assert (row["attempts"], row["state"]) == (1, "leased")


async def test_a_task_past_its_time_expires_unsent_and_its_late_result_is_refused(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect, sweeper: Sweeper
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join(ask=1)
    sent = await dispatch(database, tasks, enrolled.node_id, "sent", expires_s=0.5)
    await agent.task()
    unsent = await dispatch(database, tasks, enrolled.node_id, "unsent", expires_s=0.2)
    await asyncio.sleep(0.6)
    await sweeper.sweep_tasks()
    async with database.read() as conn:
        outcomes = [await tasks.outcome(conn, task_id) for task_id in (sent, unsent)]
    assert [outcome and outcome.state for outcome in outcomes] == ["expired", "expired"]
    assert (await agent.answer(sent, 1, REPORT)).verdict is ResultVerdict.STALE_GENERATION
    later = await dispatch(database, tasks, enrolled.node_id, "later")
    assert (await agent.task()).task_id == later


async def test_a_higher_fence_ends_what_is_open_below_and_a_lower_one_is_refused(
    database: Database, tasks: Tasks, enrol: Enrol
) -> None:
    enrolled = await enrol()
    low = await dispatch(database, tasks, enrolled.node_id, "low", fence=1)
    other = await dispatch(database, tasks, enrolled.node_id, "other", allocation_id="alc_2")
    await dispatch(database, tasks, enrolled.node_id, "high", fence=2)
    async with database.read() as conn:
        ended = await tasks.outcome(conn, low)
        assert await tasks.outcome(conn, other) is None
    assert ended is not None
    assert (ended.state, ended.error_code) == ("refused", "stale_fence")
    with pytest.raises(StaleFence):
        await dispatch(database, tasks, enrolled.node_id, "late", fence=1)
    assert await dispatch(database, tasks, enrolled.node_id, "low", fence=1) == low


async def test_a_success_with_the_wrong_answer_is_a_failure(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    task_id = await dispatch(database, tasks, enrolled.node_id)
    await agent.task()
    assert (await agent.answer(task_id, 1, TopologyDiscover())).verdict is ResultVerdict.APPLIED
    async with database.read() as conn:
        outcome = await tasks.outcome(conn, task_id)
    assert outcome is not None
    assert (outcome.state, outcome.error_code) == ("failed", "malformed_answer")


async def test_a_refusal_is_audited(database: Database, tasks: Tasks, enrol: Enrol, connect: Connect) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join()
    task_id = await dispatch(database, tasks, enrolled.node_id)
    await agent.task()
    await agent.answer(task_id, 1, outcome=Outcome.REFUSED)
    async with database.read() as conn:
        row = await conn.fetchrow("select actor_id from kit.audit where target_id = $1", task_id)
        outcome = await tasks.outcome(conn, task_id)
    assert row is not None
    assert row["actor_id"] == enrolled.node_id
    assert outcome is not None
    assert outcome.state == "refused"


async def test_discovery_brings_the_slots_up_to_date(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect
) -> None:
    enrolled = await enrol()
    agent = await connect()
    await agent.join(gpus=1)
    async with database.transaction() as tx:
        task_id = await tasks.dispatch(
            tx,
            node_id=enrolled.node_id,
            type=TOPOLOGY_DISCOVER,
            allocation_id=None,
            fence=0,
            params=TopologyDiscover(),
            dedupe_key="discover",
            expires_s=60,
        )
    await agent.task()
    await agent.answer(task_id, 0, inventory(3))
    async with database.read() as conn:
        assert await conn.fetchval("select count(*) from fleet.placeable_slots") == 3


async def test_wrong_or_huge_parameters_are_not_dispatched(database: Database, tasks: Tasks, enrol: Enrol) -> None:
    enrolled = await enrol()

    async def start(params: msgspec.Struct) -> None:
        async with database.transaction() as tx:
            await tasks.dispatch(
                tx,
                node_id=enrolled.node_id,
                type=UNIT_START,
                allocation_id="alc_1",
                fence=1,
                params=params,
                dedupe_key="key",
                expires_s=60,
            )

    with pytest.raises(Invalid):
        await start(HealthProbe())
    with pytest.raises(TaskTooBig):
        await start(UnitStart(unit_id="u", image="i", gpu_uuids=[], limits=LIMITS, env={"A": "x" * (1 << 20)}))
    async with database.read() as conn:
        assert await conn.fetchval("select count(*) from fleet.tasks") == 0
        assert await conn.fetchval("select count(*) from fleet.fences") == 0
