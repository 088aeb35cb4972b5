"""Cancelling in every phase: what waits never runs, what runs is stopped, what comes late counts for nothing."""

import asyncio
import hmac
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from integration.serverless.stage import Stage, caller, staged, until
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.errors import NoInvocation
from penstock.serverless.service.cancel import Cancel
from penstock.wire.serverless import MAC_HEADER, ControlMessage, State, WorkerDispatchMessage


@pytest.fixture
async def stage(database: Database, nats_bus: Bus) -> AsyncIterator[Stage]:
    async with staged(database, nats_bus) as made:
        yield made


def who(project_id: str = "prj_default") -> Any:
    return replace(caller(project_id), actions=frozenset({"functions.invoke", "functions.read"}))


async def test_what_runs_is_stopped_and_its_late_result_ignored(stage: Stage, nats_bus: Bus) -> None:
    release, orders = asyncio.Event(), list[Msg]()

    async def slow(dispatch: WorkerDispatchMessage) -> Any:
        await release.wait()
        return "late"

    async def ordered(message: Msg) -> None:
        orders.append(message)

    stage.handler = slow
    await stage.define()
    await nats_bus.client.subscribe("runtime.serverless.control.>", cb=ordered)
    waiting = asyncio.create_task(stage.call(payload=1, invocationID="stop"))
    await until(lambda: _ran(stage))
    worker = next(iter(stage.workers.values()))
    cancelled = await Cancel(stage.db, stage.teller)(who(), "stop")
    assert (cancelled.state, cancelled.failure_class, cancelled.worker_id) == (
        State.CANCELLED,
        "cancelled",
        worker.name,
    )
    assert (await asyncio.wait_for(waiting, 30)).state is State.CANCELLED
    assert await stage.value("select inflight from serverless.workers") == 0
    await until(lambda: _some(orders))
    order = msgspec.json.decode(orders[0].data, type=ControlMessage)
    assert (order.workerName, order.cancel) == (worker.name, [("stop", 1)])
    signed = hmac.digest(worker.key, orders[0].subject.encode() + b"\0" + orders[0].data, "sha256").hex()
    assert (orders[0].headers or {})[MAC_HEADER] == f"sha256={signed}"
    release.set()
    stage.handler = worker.handler = _echo
    # The worker takes the next one, so what it said of the cancelled one has come before.
    assert (await stage.call(payload=2)).state is State.SUCCEEDED
    row = await stage.find("stop")
    assert (row.state, row.result) == (State.CANCELLED, None)
    assert await stage.value("select sum(invocations)::int from serverless.spent") == 2


async def test_another_projects_invocation_is_not_there(stage: Stage) -> None:
    stage.plays = False
    await stage.define()
    await stage.spawn(invocationID="mine")
    with pytest.raises(NoInvocation):
        await Cancel(stage.db, stage.teller)(who("prj_other"), "mine")
    assert (await stage.find("mine")).state is State.QUEUED


async def test_a_cancel_and_a_result_at_once_have_one_winner(stage: Stage) -> None:
    await stage.define(concurrency=8, workers_max=1)
    ids = [f"race-{n}" for n in range(24)]
    await asyncio.gather(*(stage.spawn(invocationID=each, payload=each) for each in ids))
    cancel = Cancel(stage.db, stage.teller)
    await asyncio.gather(*(cancel(who(), each) for each in reversed(ids)))
    rows = [await stage.ended(each) for each in ids]
    assert {row.state for row in rows} <= {State.SUCCEEDED, State.CANCELLED}
    assert all((row.result is not None) == (row.state is State.SUCCEEDED) for row in rows)
    await until(lambda: _idle(stage))


async def test_what_waits_for_a_deleted_function_is_ended_by_whoever_looks(stage: Stage) -> None:
    stage.plays = False
    await stage.define("gone")
    for n in range(3):
        await stage.spawn("gone", invocationID=f"gone-{n}")
    await stage.value("update serverless.functions set deleted = true, updated_at = now()")
    await Cancel(stage.db, stage.teller).sweep()
    rows = [await stage.find(f"gone-{n}") for n in range(3)]
    assert {(row.state, row.failure_class) for row in rows} == {(State.FAILED, "no_worker_template")}


async def _echo(dispatch: WorkerDispatchMessage) -> Any:
    return msgspec.json.decode(dispatch.payload)


async def _ran(stage: Stage) -> bool:
    return any(worker.has for worker in stage.workers.values())


async def _some(orders: list[Msg]) -> bool:
    return bool(orders)


async def _idle(stage: Stage) -> bool:
    return not await stage.value("select coalesce(sum(inflight), 0) from serverless.workers where state <> 'gone'")
