"""What the activator does with invocations and workers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.conftest import Servers
from tests.integration.serverless.sidecars import listen
from tests.integration.serverless.stage import Stage, shared, until

from penstock.kit.clock import utc_now
from penstock.wire import subjects
from penstock.wire.rest import FunctionPut, InvocationAck
from penstock.wire.serverless import (
    FailureClass,
    MetricType,
    Output,
    OutputKind,
    OutputMessage,
    State,
    WorkerDispatchMessage,
)


@pytest.fixture(scope="module")
async def shared_stage(servers: Servers) -> AsyncIterator[Stage]:
    async with shared(servers) as made:
        yield made


@pytest.fixture
async def stage(shared_stage: Stage) -> Stage:
    await shared_stage.reset()
    return shared_stage


async def test_a_call_starts_exactly_one_worker_and_gets_its_answer(stage: Stage) -> None:
    await stage.define()
    assert not stage.pool.orders
    end = await stage.call(payload={"x": 1})
    assert (end.state, end.statusCode, bytes(end.body)) == (State.SUCCEEDED, 200, b'{"x":1}')
    assert end.workerName in stage.workers
    assert len(stage.pool.orders) == 1


async def test_async_is_acknowledged_and_ends(stage: Stage) -> None:
    await stage.define()
    ack = await stage.invoke(payload=[1])
    assert isinstance(ack, InvocationAck)
    assert (ack.stream, ack.duplicate, ack.sequence > 0) == ("WORK", False, True)
    row = await stage.ended(ack.invocationID)
    assert (row.state, row.result, row.attempt) == (State.SUCCEEDED, b"[1]", 1)


async def test_without_a_definition_it_ends_at_once(stage: Stage) -> None:
    end = await stage.call("nobody", payload=1)
    assert (end.state, end.failureClass, end.statusCode) == (State.FAILED, "no_worker_template", 503)


async def test_the_same_id_runs_once_and_another_payload_is_refused(stage: Stage) -> None:
    from penstock.serverless.errors import IdReused

    await stage.define(concurrency=4)
    first, second = await asyncio.gather(
        stage.call(invocationID="one", payload=1), stage.call(invocationID="one", payload=1)
    )
    assert first.body == second.body
    assert sum(len(worker.ran) for worker in stage.workers.values()) == 1
    with pytest.raises(IdReused):
        await stage.call(invocationID="one", payload=2)


async def test_the_same_id_in_two_projects_is_two_invocations(stage: Stage) -> None:
    await stage.define()
    await stage.define(project_id="prj_other")
    ends = await asyncio.gather(
        stage.call(invocationID="one", payload=1), stage.call(invocationID="one", payload=2, project_id="prj_other")
    )
    assert [bytes(end.body) for end in ends] == [b"1", b"2"]


async def test_workers_are_as_many_as_the_backlog_needs_and_never_more_than_they_may(stage: Stage) -> None:
    go = asyncio.Event()

    async def wait(dispatch: WorkerDispatchMessage) -> Any:
        await go.wait()

    stage.handler = wait
    await stage.define(concurrency=2, workers_max=3)
    ids = [await stage.spawn(payload=n) for n in range(10)]

    async def busy() -> bool:
        return sum(len(worker.has) for worker in stage.workers.values()) == 6

    await until(busy)
    assert len(stage.pool.orders) == 3
    go.set()
    assert {(await stage.ended(each)).state for each in ids} == {State.SUCCEEDED}
    assert len(stage.pool.orders) == 3
    assert await stage.value("select sum(inflight) from serverless.workers") == 0


async def test_a_failure_is_retried_as_often_as_the_function_says(stage: Stage) -> None:
    async def fail(dispatch: WorkerDispatchMessage) -> Any:
        if dispatch.attempt < 3:
            raise ValueError("not yet")
        return "done"

    stage.handler = fail
    await stage.define(retries=2, retry_delay_s=0.05)
    end = await stage.call()
    assert (end.state, end.attempt, bytes(end.body)) == (State.SUCCEEDED, 3, b'"done"')


async def test_a_failure_that_is_not_retried_is_failed(stage: Stage) -> None:
    async def fail(dispatch: WorkerDispatchMessage) -> Any:
        raise KeyError("x")

    stage.handler = fail
    await stage.define(retries=3, retry_for=["ValueError"])
    end = await stage.call()
    assert (end.state, end.attempt, end.failureClass, end.errorType) == (State.FAILED, 1, "handler_error", "KeyError")


async def test_what_a_silent_worker_had_is_done_elsewhere(stage: Stage) -> None:
    first = asyncio.Event()

    async def hang_once(dispatch: WorkerDispatchMessage) -> Any:
        if dispatch.attempt == 1:
            first.set()
            await asyncio.Event().wait()
        return dispatch.attempt

    stage.handler = hang_once
    await stage.define()
    call = asyncio.create_task(stage.call(timeoutSeconds=20))
    await first.wait()
    silent = next(iter(stage.workers.values()))
    silent.beating = False
    await stage.value("update serverless.workers set lease_until = now() where id = $1", silent.name)
    end = await call
    assert (end.state, end.attempt) == (State.SUCCEEDED, 2)
    assert end.workerName != silent.name
    assert stage.pool.released[silent.allocation_id] == "not heard of for too long"


async def test_an_ended_allocation_gives_its_attempts_back_at_once(stage: Stage) -> None:
    first = asyncio.Event()

    async def hang_once(dispatch: WorkerDispatchMessage) -> Any:
        if dispatch.attempt == 1:
            first.set()
            await asyncio.Event().wait()

    stage.handler = hang_once
    await stage.define()
    call = asyncio.create_task(stage.call())
    await first.wait()
    lost = next(iter(stage.workers.values()))
    stage.pool.released[lost.allocation_id] = "the unit died"
    await stage.parts.warden.look_at([lost.allocation_id])
    assert (await call).attempt == 2


async def test_poison_ends_as_a_dead_letter_with_a_result(stage: Stage) -> None:
    async def die(dispatch: WorkerDispatchMessage) -> Any:
        worker = stage.workers[dispatch.workerName]
        stage.pool.released[worker.allocation_id] = "the unit died"
        await stage.parts.warden.look_at([worker.allocation_id])

    stage.handler = die
    await stage.define()
    end = await stage.call()
    assert (end.state, end.failureClass, end.attempt) == (State.DEAD_LETTERED, "retry_exhausted", 5)
    assert (
        await stage.value("select count(*) from serverless.dead_letters where invocation_id = $1", end.invocationID)
        == 1
    )


async def test_who_watches_results_hears_of_a_dead_letter_too(stage: Stage) -> None:
    """The last worker that was lost told a failed attempt; that it was the last is told as well."""

    async def lose(dispatch: WorkerDispatchMessage) -> Any:
        worker = stage.workers[dispatch.workerName]
        failure = FailureClass.WORKER_LOST
        await worker.result(dispatch, state=State.FAILED, statusCode=502, failureClass=failure, error="gone")
        await asyncio.Event().wait()

    stage.handler = lose
    await stage.define()
    heard = await listen(stage.bus, subjects.result("f"))
    end = await stage.call()
    assert (end.state, end.failureClass) == (State.DEAD_LETTERED, "retry_exhausted")

    async def told() -> bool:
        return any(msgspec.json.decode(each.data)["state"] == "dead_lettered" for each in heard.messages)

    await until(told)


async def test_an_idle_worker_goes_and_nothing_is_left(stage: Stage) -> None:
    await stage.define(idle_s=0.2)
    await stage.call()

    async def gone() -> bool:
        return len(stage.pool.released) == 1

    await until(gone)
    assert await stage.value("select count(*) from serverless.workers where state <> 'gone'") == 0


async def test_the_floor_is_kept_without_any_call(stage: Stage) -> None:
    await stage.define(workers_min=2, idle_s=0)

    async def ready() -> bool:
        return await stage.value("select count(*) from serverless.workers where state = 'ready'") == 2

    await until(ready)
    assert not stage.pool.released


async def test_why_no_worker_can_be_made_is_said_and_it_is_tried_again(stage: Stage) -> None:
    from penstock.kit.errors import Unavailable

    stage.pool.refusal = Unavailable("out of capacity: no H100 is free")
    await stage.define()
    call = asyncio.create_task(stage.call())

    async def said() -> bool:
        return await stage.value("select wait_reason from serverless.functions") == "out of capacity: no H100 is free"

    await until(said)
    stage.pool.refusal = None
    assert (await call).state is State.SUCCEEDED
    assert await stage.value("select wait_reason from serverless.functions") == ""


async def test_where_there_is_no_room_an_idle_worker_of_the_project_makes_some(stage: Stage) -> None:
    await stage.define("idle", idle_s=300)
    await stage.define("kept", idle_s=300, workers_min=1)
    await stage.define("other")
    assert (await stage.call("idle")).state is State.SUCCEEDED
    assert (await stage.call("kept")).state is State.SUCCEEDED
    stage.pool.room = 2
    assert (await stage.call("other")).state is State.SUCCEEDED
    [(left, why)] = stage.pool.released.items()
    assert (stage.pool.orders[left].function, why) == ("idle", "another function of the project needs its place")
    assert not await stage.value(
        "select 1 from serverless.workers w join serverless.functions f on f.id = w.function_id"
        " where f.name = 'kept' and w.state <> 'ready'"
    )


async def test_what_another_project_has_is_its_own(stage: Stage) -> None:
    await stage.define("idle", idle_s=300, project_id="prj_rich")
    spawned = await stage.spawn("idle", project_id="prj_rich")
    await stage.ended(spawned, project_id="prj_rich")
    await stage.define("other")
    stage.pool.room = 1
    await stage.spawn("other")

    async def said() -> bool:
        reason = "select wait_reason from serverless.functions where name = 'other'"
        return await stage.value(reason) == "out of capacity: all GPUs are taken"

    await until(said)
    await asyncio.sleep(1.2)
    assert not stage.pool.released


async def test_a_function_whose_workers_do_not_start_fails_what_waits(stage: Stage) -> None:
    stage.plays = False
    await stage.define()
    call = asyncio.create_task(stage.call(timeoutSeconds=20))

    async def break_down() -> bool:
        for allocation_id, order in list(stage.pool.orders.items()):
            if allocation_id not in stage.pool.released:
                await stage.parts.warden.unhealthy(order.worker, "ModuleNotFoundError: numpy")
        return call.done()

    await until(break_down)
    end = await call
    assert (end.state, end.failureClass) == (State.FAILED, "framework_unhealthy")
    assert "ModuleNotFoundError" in end.error


async def test_what_waits_too_long_expires(stage: Stage) -> None:
    stage.plays = False
    await stage.define()
    row = await stage.ended(await stage.spawn(ttlSeconds=0.1))
    assert (row.state, row.failure_class) == (State.EXPIRED, "activation_timeout")


async def test_a_delayed_invocation_waits(stage: Stage) -> None:
    await stage.define()
    row = await stage.ended(await stage.spawn(delaySeconds=0.5))
    assert row.dispatched_at is not None
    assert (row.dispatched_at - row.created_at).total_seconds() >= 0.5


async def test_traffic_moves_to_a_new_version_without_losing_work(stage: Stage) -> None:
    go = asyncio.Event()

    async def wait(dispatch: WorkerDispatchMessage) -> Any:
        await go.wait()
        return dispatch.workerName

    stage.handler = wait
    function_id = await stage.define()
    old = asyncio.create_task(stage.call())

    async def busy() -> bool:
        return any(worker.has for worker in stage.workers.values())

    await until(busy)
    async with stage.db.transaction() as tx:
        await stage.add_version(tx, function_id, 2, FunctionPut(sku="sim"))
        await tx.execute("update serverless.functions set current_version = 2 where id = $1", function_id)
        tx.hint(subjects.FUNCTIONS, function_id.encode())

    async def serves() -> bool:
        return await stage.value("select serving_version from serverless.functions") == 2

    await until(serves)
    new = asyncio.create_task(stage.call())
    await until(lambda: stage.value("select count(*) = 2 from serverless.invocations where state <> 'queued'"))
    go.set()
    first, second = await asyncio.gather(old, new)
    assert first.state is second.state is State.SUCCEEDED
    assert first.workerName != second.workerName
    await until(lambda: stage.value("select state = 'gone' from serverless.workers where version = 1"))


async def test_two_activators_and_many_jobs_give_each_one_end(stage: Stage) -> None:
    from tests.integration.serverless.stage import LIMITS

    from penstock.processes.activator import compose

    other = compose(stage.db, stage.db, stage.bus, stage.keys, stage.teller, stage.pool, LIMITS)  # pyright: ignore[reportArgumentType]
    assert stage._tasks is not None  # pyright: ignore[reportPrivateUsage]
    await stage.run(stage._tasks, other)  # pyright: ignore[reportPrivateUsage]
    await stage.define(concurrency=8, workers_max=3)
    ids = [f"job-{n}" for n in range(300)]
    await asyncio.gather(*(stage.spawn(invocationID=each, payload=each) for each in ids))
    await until(lambda: stage.value("select count(*) = 300 from serverless.invocations where state = 'succeeded'"))
    ran = [attempt for worker in stage.workers.values() for attempt in worker.ran]
    assert sorted(invocation_id for invocation_id, _ in ran) == sorted(ids)
    assert len(stage.pool.orders) <= 3
    assert await stage.value("select sum(inflight) from serverless.workers") == 0


async def test_messages_that_cannot_be_kept_harm_no_other(stage: Stage) -> None:
    """What Postgres refuses is in one batch with what is well: a zero byte in a name, in JSON, in a content type."""
    await stage.define(concurrency=2, workers_max=1)
    await stage.call()
    worker = next(iter(stage.workers.values()))

    async def talk(dispatch: WorkerDispatchMessage) -> Any:
        def said(text: str, **changed: Any) -> Any:
            items = [Output(seq=0, kind=OutputKind.PROGRESS, text=text, at=utc_now())]
            given: dict[str, Any] = {
                "version": "v1",
                "projectID": dispatch.projectID,
                "invocationID": dispatch.invocationID,
            }
            given |= {"workerName": worker.name, "attempt": dispatch.attempt, "token": dispatch.token}
            return OutputMessage(items=items, **(given | changed))

        await worker.result(dispatch, workerName="x\0")
        await stage.publish(subjects.output("f"), said("0", invocationID="x\0"))
        await stage.publish(subjects.output("f"), said("0", attempt=1 << 40))
        await stage.publish(subjects.output("f"), said('{"a": "\\u0000", "b": [1, 2]}'))
        await worker.report(MetricType.HEARTBEAT, attempts=[("x\0", 1), (dispatch.invocationID, 1 << 40)])
        return "fine"

    worker.handler = talk
    ids = [await stage.spawn(payload=n) for n in range(4)]
    rows = [await stage.ended(each) for each in ids]
    assert {row.state for row in rows} == {State.SUCCEEDED}
    await until(
        lambda: stage.value("select count(*) = 4 from serverless.outputs where kind = 'progress'"), timeout_s=30
    )
    assert {row.worker_id for row in rows} == {worker.name}


async def test_a_content_type_with_a_zero_byte_is_kept_without_it(stage: Stage) -> None:
    async def odd(dispatch: WorkerDispatchMessage) -> Any:
        await stage.workers[dispatch.workerName].result(dispatch, body=1, contentType="a\0b", encoding="\0")
        await asyncio.Event().wait()

    stage.handler = odd
    await stage.define()
    row = await stage.ended(await stage.spawn())
    assert (row.state, row.result_type) == (State.SUCCEEDED, "a�b")
