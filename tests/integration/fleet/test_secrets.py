"""Secrets over the link: for the node and the link that a task is leased to, while it can still be done."""

import pytest

from integration.fleet.agent import Agent
from integration.fleet.conftest import Connect, Enrol, Vault
from penstock.fleet.tasks import Tasks
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.wire.link import SecretsAsk, SecretValues
from penstock.wire.tasks import (
    HEALTH_PROBE,
    UNIT_HANDOFF,
    UNIT_START,
    HealthProbe,
    Limits,
    Outcome,
    SecretRef,
    UnitHandoff,
    UnitStart,
)

ALLOCATION = new_id("alc")
REFS = [SecretRef(name="token", version=4, env="TOKEN"), SecretRef(name="key", version=1)]
START = UnitStart(
    unit_id=ALLOCATION,
    image="python:3",
    gpu_uuids=[],
    limits=Limits(memory_bytes=1, processes_max=1, cpus=1, scratch_bytes=1),
    allocation_id=ALLOCATION,
    secrets=REFS,
)


async def dispatch(
    database: Database,
    tasks: Tasks,
    node_id: str,
    type: str = UNIT_START,  # noqa: A002
    params: object = START,
    *,
    fence: int = 1,
) -> str:
    async with database.transaction() as tx:
        return await tasks.dispatch(
            tx,
            node_id=node_id,
            type=type,
            allocation_id=ALLOCATION,
            fence=fence,
            params=params,  # pyright: ignore[reportArgumentType]
            dedupe_key=new_id("dup"),
            expires_s=60,
        )


async def ask(agent: Agent, task_id: str) -> SecretValues:
    await agent.send(SecretsAsk(task_id=task_id))
    return await agent.expect(SecretValues)


@pytest.fixture
async def agent(connect: Connect, enrol: Enrol, secrets: Vault) -> Agent:
    await enrol("n1")
    secrets.kept = {"token": b"t\0ken", "key": b"k" * 70_000}
    opened = await connect("n1")
    await opened.join()
    return opened


@pytest.mark.parametrize(
    ("type_", "params"),
    [
        (UNIT_START, START),
        (UNIT_HANDOFF, UnitHandoff(unit_id="alc_stock", allocation_id=ALLOCATION, secrets=REFS)),
    ],
)
async def test_the_values_that_a_task_names_reach_its_node(
    agent: Agent, database: Database, tasks: Tasks, secrets: Vault, type_: str, params: object
) -> None:
    task_id = await dispatch(database, tasks, agent.node_id, type_, params)
    assert await agent.next_task_id() == task_id
    given = await ask(agent, task_id)
    assert given == SecretValues(task_id=task_id, values=secrets.kept)
    assert secrets.asked == [(agent.node_id, ALLOCATION, ["token/4", "key/1"])]


async def test_a_task_without_secrets_has_none(agent: Agent, database: Database, tasks: Tasks, secrets: Vault) -> None:
    handoff = UnitHandoff(unit_id="alc_stock", allocation_id=ALLOCATION)
    task_id = await dispatch(database, tasks, agent.node_id, UNIT_HANDOFF, handoff)
    await agent.next_task_id()
    assert await ask(agent, task_id) == SecretValues(task_id=task_id)
    assert secrets.asked == []


async def test_another_nodes_task_has_no_secrets_for_this_one(
    agent: Agent, connect: Connect, enrol: Enrol, database: Database, tasks: Tasks, secrets: Vault
) -> None:
    await enrol("n2")
    other = await connect("n2")
    await other.join()
    task_id = await dispatch(database, tasks, agent.node_id)
    await agent.next_task_id()
    for wrong in (task_id, new_id("tsk")):
        assert await ask(other, wrong) == SecretValues(task_id=wrong, error="fleet.secrets_refused")
    assert secrets.asked == []
    assert (await ask(agent, task_id)).values


async def test_a_task_that_ended_gives_nothing_more(
    agent: Agent, database: Database, tasks: Tasks, secrets: Vault
) -> None:
    task_id = await dispatch(database, tasks, agent.node_id)
    await agent.next_task_id()
    await agent.answer(task_id, 1, outcome=Outcome.FAILED)
    assert (await ask(agent, task_id)).error == "fleet.secrets_refused"
    assert secrets.asked == []


async def test_a_task_under_an_old_fence_gives_nothing(
    agent: Agent, database: Database, tasks: Tasks, secrets: Vault
) -> None:
    task_id = await dispatch(database, tasks, agent.node_id)
    await agent.next_task_id()
    await dispatch(database, tasks, agent.node_id, fence=2)
    assert (await ask(agent, task_id)).error == "fleet.secrets_refused"
    assert secrets.asked == []


async def test_a_task_past_its_time_gives_nothing(
    agent: Agent, database: Database, tasks: Tasks, secrets: Vault
) -> None:
    task_id = await dispatch(database, tasks, agent.node_id)
    await agent.next_task_id()
    async with database.read() as conn:
        await conn.execute("update fleet.tasks set expires_at = now() - interval '1 second'")
    assert (await ask(agent, task_id)).error == "fleet.secrets_refused"
    assert secrets.asked == []


async def test_a_task_that_names_no_unit_gives_nothing(
    agent: Agent, database: Database, tasks: Tasks, secrets: Vault
) -> None:
    task_id = await dispatch(database, tasks, agent.node_id, HEALTH_PROBE, HealthProbe())
    await agent.next_task_id()
    assert (await ask(agent, task_id)).error == "fleet.secrets_refused"


async def test_before_the_lease_has_followed_the_node_asking_again_helps(
    agent: Agent, connect: Connect, database: Database, tasks: Tasks, secrets: Vault
) -> None:
    task_id = await dispatch(database, tasks, agent.node_id)
    await agent.next_task_id()
    newer = await connect("n1")
    await newer.join(ask=0)
    assert (await ask(newer, task_id)).error == "fleet.not_leased"
    assert secrets.asked == []
    second = await connect("n1")
    await second.join()
    assert await second.next_task_id() == task_id
    assert (await ask(second, task_id)).values == secrets.kept


@pytest.mark.parametrize("task_id", ["", "tsk_1", "alc_" + "0" * 26, "tsk_" + "'" * 26])
async def test_what_is_no_task_closes_the_link(agent: Agent, task_id: str) -> None:
    await agent.send(SecretsAsk(task_id=task_id))
    assert (await agent.closed()).code == 4400
