"""A node is cut off and comes back, or is cut off for good in the middle of a task."""

import asyncio
import time
from pathlib import Path

import aiohttp
import pytest

from integration.fleet.agent import Agent, Closed, new_key, request_for
from integration.fleet.conftest import Connect, Enrol, Gateway
from integration.fleet.test_tasks import REPORT, dispatch
from penstock.fleet.enrolment import Enrolment
from penstock.fleet.nodes import Nodes
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.wire.link import ResultVerdict


async def placeable(database: Database) -> list[str]:
    async with database.read() as conn:
        return [row["slot_id"] for row in await conn.fetch("select slot_id from fleet.placeable_slots order by 1")]


async def state_of(database: Database, node_id: str) -> str:
    async with database.read() as conn:
        return await conn.fetchval("select state from fleet.nodes where id = $1", node_id)


async def test_a_node_that_was_cut_off_comes_back_with_its_slots_and_all_its_tasks(
    database: Database, tasks: Tasks, enrol: Enrol, connect: Connect, sweeper: Sweeper
) -> None:
    node_id = (await enrol()).node_id
    agent = await connect()
    await agent.join()
    slots = await placeable(database)
    begun = await dispatch(database, tasks, node_id, "begun", allocation_id="alc_1")
    assert (await agent.task()).task_id == begun
    # Without a word: the socket is gone, and so is what the agent would have said.
    assert agent.socket._response.connection is not None
    assert agent.socket._response.connection.transport is not None
    agent.socket._response.connection.transport.abort()
    async with asyncio.timeout(20):
        while await state_of(database, node_id) != "unreachable":
            await sweeper.sweep_nodes()
            await asyncio.sleep(0.1)
    assert await placeable(database) == []
    waiting = await dispatch(database, tasks, node_id, "waiting", allocation_id="alc_2")
    agent = await connect()
    await agent.join()
    assert await state_of(database, node_id) == "ready"
    assert await placeable(database) == slots
    assert {await agent.next_task_id(), await agent.next_task_id()} == {begun, waiting}
    for task_id in (begun, waiting):
        assert (await agent.answer(task_id, 1, REPORT)).verdict is ResultVerdict.APPLIED


async def test_a_node_revoked_in_the_middle_of_a_task_is_out_and_its_late_result_is_refused(
    gateway: Gateway,
    session: aiohttp.ClientSession,
    database: Database,
    tasks: Tasks,
    enrolment: Enrolment,
    operator: Caller,
    nodes: Nodes,
    enrol: Enrol,
    connect: Connect,
    tmp_path: Path,
) -> None:
    node_id = (await enrol()).node_id
    agent = await connect()
    await agent.join()
    task_id = await dispatch(database, tasks, node_id)
    assert (await agent.task()).task_id == task_id
    async with database.transaction() as tx:
        await nodes.revoke(tx, operator, node_id, "stolen")
    revoked = time.monotonic()
    assert (await agent.closed()).code == 4401
    assert time.monotonic() - revoked < 5
    with pytest.raises((ConnectionError, Closed, TypeError)):
        await agent.answer(task_id, 1, REPORT)
    socket = await session.ws_connect(f"{gateway.url}/link", ssl=Agent.tls(tmp_path, "n1"))
    assert (await socket.receive(timeout=5)).data == 4401
    # What ran there was released meanwhile, which raised its fence. The host is given the node's identity anew and
    # still has the result of before.
    await dispatch(database, tasks, node_id, "stop", fence=2)
    async with database.transaction() as tx:
        token = await enrolment.create_recovery_token(tx, operator, node_id)
    key = new_key()
    async with database.transaction() as tx:
        again = await enrolment.enrol(tx, token=token.token, node_name="n1", csr_pem=request_for(key, "n1"))
    Agent.save(tmp_path, "recovered", again, key)
    agent = await connect("recovered")
    await agent.join()
    assert (await agent.answer(task_id, 1, REPORT)).verdict is ResultVerdict.STALE_GENERATION
    async with database.read() as conn:
        assert await conn.fetchval("select state from fleet.tasks where id = $1", task_id) != "succeeded"
