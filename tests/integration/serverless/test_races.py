"""What two at once do to the same rows: each counts what the one before it left, and nobody waits in a ring."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
from tests.integration.serverless.stage import Stage, caller, staged, until

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.serverless.model import State
from penstock.serverless.service.cancel import Cancel
from penstock.serverless.store import claims, commits, functions, losses, workers
from penstock.wire.rest import FunctionPut
from penstock.wire.serverless import MetricType, WorkerDispatchMessage, WorkerMetricMessage


@pytest.fixture
async def still(database: Database, nats_bus: Bus) -> Stage:
    """A stage on which nothing moves by itself."""
    return Stage(database, nats_bus)


@pytest.fixture
async def stage(database: Database, nats_bus: Bus) -> AsyncIterator[Stage]:
    async with staged(database, nats_bus) as made:
        yield made


async def worker(stage: Stage, function_id: str, name: str = "w1", *, slots: int = 2, inflight: int = 0) -> None:
    await stage.value(
        "insert into serverless.workers (id, function_id, project_id, request, version, allocation_id, state, slots,"
        " inflight, token_hash, mac_key, lease_until, ready_at) values ($1, $2, 'prj_default', 'f', 1, 'alc_' || $1,"
        " 'ready', $3, $4, '', '', now() + interval '1 hour', now())",
        name,
        function_id,
        slots,
        inflight,
    )


async def add(stage: Stage, function_id: str, *ids: str) -> None:
    for each in ids:
        await stage.value(
            "insert into serverless.invocations (project_id, id, function_id, function_name, mode, content_type,"
            " headers, attributes, payload, payload_hash, created_by, correlation_id) values ('prj_default', $1, $2,"
            " 'f', 'async', 'application/json', '{}', '{}', 'null', '', 'usr_default', 'cor')",
            each,
            function_id,
        )


async def blocked(stage: Stage) -> bool:
    """Whether somebody waits for somebody else's lock."""
    return await stage.value(
        "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    )


async def test_a_look_counts_the_worker_that_the_look_before_it_made(still: Stage) -> None:
    function_id = await still.define(workers_max=1)
    await add(still, function_id, "one")
    async with AsyncExitStack() as stack:
        tx = await stack.enter_async_context(still.db.transaction())
        first = await workers.demand(tx, function_id)
        assert first is not None
        assert (first.due, first.starting) == (1, 0)

        async def second() -> Any:
            async with still.db.transaction() as other:
                return await workers.demand(other, function_id)

        looking = asyncio.create_task(second())
        await until(lambda: blocked(still))
        await workers.add(tx, worker_id="w1", demand=first, request="f", allocation_id="a", start_s=9, unknown=b"")
    assert (await looking).starting == 1


async def test_a_call_is_accepted_while_a_worker_is_being_made(still: Stage) -> None:
    function_id = await still.define()
    async with still.db.transaction() as tx:
        await workers.demand(tx, function_id)
        async with asyncio.timeout(30):
            await add(still, function_id, "meanwhile")


async def test_whoever_waited_for_a_deployment_finds_the_version_that_it_made(still: Stage) -> None:
    function_id = await still.define("moving")
    async with AsyncExitStack() as stack:
        tx = await stack.enter_async_context(still.db.transaction())
        await functions.lock(tx, "prj_default", "moving")

        async def second() -> Any:
            async with still.db.transaction() as other:
                return await functions.lock(other, "prj_default", "moving")

        waiting = asyncio.create_task(second())
        await until(lambda: blocked(still))
        await still.add_version(tx, function_id, 2, FunctionPut(sku="sim"))
        await functions.switch(tx, function_id, 2, created_by="usr_default", created_kind="user", key_id=None)
    assert (await waiting)[:2] == (function_id, 2)


async def claimed(stage: Stage, function_id: str) -> dict[str, Any]:
    async with stage.db.read() as conn:
        return {each.id: each for each in await claims.claim(conn, [function_id], each_max=64)}


async def test_a_worker_that_ends_while_its_results_are_committed_waits_in_no_ring(still: Stage) -> None:
    """A commit locks its invocations and then their worker; the end of the worker must not do it the other way."""
    function_id = await still.define(concurrency=2)
    await worker(still, function_id)
    await add(still, function_id, "a", "b")
    given = await claimed(still, function_id)
    async with AsyncExitStack() as stack:
        tx = await stack.enter_async_context(still.db.transaction())
        # What a commit holds before it comes to the worker.
        await tx.execute("select 1 from serverless.invocations where id = 'a' for update")
        ending = asyncio.create_task(still.parts.warden.end("w1", "lost"))
        await until(lambda: blocked(still))
        done = await commits.commit(tx, [ending_of(given["a"])])
        assert [row.state for row in done.values()] == [State.SUCCEEDED]
    await asyncio.wait_for(ending, 30)
    rows = [await still.find(each) for each in "ab"]
    assert [(row.state, row.waiting) for row in rows] == [(State.SUCCEEDED, False), (State.DISPATCHING, True)]
    assert await still.value("select (state, inflight) = ('gone', 0) from serverless.workers")


def ending_of(attempt: Any, **changes: Any) -> Any:
    from penstock.serverless.model import Ending

    ending = Ending(
        project_id=attempt.project_id,
        id=attempt.id,
        token=attempt.token,
        worker_id=attempt.worker_id,
        state=State.SUCCEEDED,
        status_code=200,
        content_type="application/json",
        headers={},
        body=b"1",
        body_ref=None,
        encoding="",
        failure_class="",
        error="",
        error_type="",
        traceback="",
        duration_ms=7,
    )
    return replace(ending, **changes)


async def test_a_worker_that_drains_gets_nothing_more(still: Stage) -> None:
    function_id = await still.define()
    await worker(still, function_id)
    await add(still, function_id, "a")
    async with AsyncExitStack() as stack:
        tx = await stack.enter_async_context(still.db.transaction())
        await tx.execute("update serverless.functions set deleted = true where id = $1", function_id)
        assert [each.id for each in await workers.retire(tx, function_id)] == ["w1"]
        await tx.execute("update serverless.functions set deleted = false where id = $1", function_id)
        claiming = asyncio.create_task(claimed(still, function_id))
        await until(lambda: blocked(still))
    assert await claiming == {}
    assert (await still.find("a")).state is State.QUEUED


async def test_an_idle_worker_stays_while_something_waits_for_it(still: Stage) -> None:
    function_id = await still.define(idle_s=0)
    await worker(still, function_id)
    await add(still, function_id, "a")
    async with still.db.transaction() as tx:
        assert await workers.retire(tx, function_id) == []
    await claimed(still, function_id)
    await still.value("update serverless.workers set inflight = 0")
    async with still.db.transaction() as tx:
        assert [each.reason for each in await workers.retire(tx, function_id)] == ["idle"]


async def test_slots_are_right_after_every_way_in_which_attempts_end(still: Stage) -> None:
    function_id = await still.define(concurrency=8, retries=1, retry_delay_s=0)
    await worker(still, function_id, slots=8)
    ids = ["commit", "retry", "cancel", "lost", "missing"]
    await add(still, function_id, *ids)
    given = await claimed(still, function_id)
    assert sorted(given) == sorted(ids)

    async def inflight() -> int:
        return await still.value("select inflight from serverless.workers")

    async with still.db.read() as conn:
        failed = {"state": State.FAILED, "failure_class": "handler_error"}
        lost = {"state": State.FAILED, "failure_class": "worker_lost"}
        endings = [
            ending_of(given["commit"]),
            ending_of(given["retry"], **failed),
            ending_of(given["lost"], **lost),
            ending_of(given["missing"], token=b"0" * 16),
        ]
        done = await commits.commit(conn, endings)
        assert {row.id: row.waiting for row in done.values()} == {"commit": False, "retry": True, "lost": True}
        assert await inflight() == 2
        assert await commits.commit(conn, endings) == {}
    who = replace(caller(), actions=frozenset({"functions.invoke", "functions.read"}))
    for _ in range(2):
        await Cancel(still.db, still.teller)(who, "cancel")
        assert await inflight() == 1
    async with still.db.transaction() as tx:
        assert await losses.missing(tx, "w1", [], older_than_s=60) == []
        assert await losses.missing(tx, "w1", [("missing", 1)], older_than_s=0) == []
        assert await losses.missing(tx, "w1", [("missing", 2)], older_than_s=0) == [("missing", 1)]
        assert [row.waiting for row in await losses.take_back(tx, "w1", [("missing", 1), ("commit", 1)])] == [True]
        assert await losses.take_back(tx, "w1", [("missing", 1)]) == []
    assert await inflight() == 0
    assert sorted(await claimed(still, function_id)) == ["lost", "missing", "retry"]
    assert await inflight() == 3


async def test_only_the_time_of_the_attempt_that_runs_is_counted_when_it_is_cancelled(still: Stage) -> None:
    function_id = await still.define(retries=1, retry_delay_s=0)
    await worker(still, function_id)
    await add(still, function_id, "a")
    first = (await claimed(still, function_id))["a"]
    async with still.db.read() as conn:
        await commits.started(conn, [("prj_default", "a", "w1", 1)])
        await commits.commit(conn, [ending_of(first, state=State.FAILED, failure_class="handler_error")])
    await still.value("update serverless.invocations set started_at = now() - interval '1 hour'")
    await claimed(still, function_id)
    async with still.db.read() as conn:
        await commits.started(conn, [("prj_default", "a", "w1", 2)])
    row = await Cancel(still.db, still.teller)(replace(caller(), actions=frozenset({"functions.invoke"})), "a")
    assert row.state is State.CANCELLED
    assert row.duration_ms < 60_000


async def test_code_that_no_node_can_use_ends_what_waits_at_once(still: Stage) -> None:
    function_id = await still.define()
    await worker(still, function_id)
    await still.value("update serverless.workers set state = 'starting', ready_at = null")
    await add(still, function_id, "a")
    await still.parts.warden.end("w1", "its allocation ended: the unit did not start: bad_code: it has a link")
    found = await still.find("a")
    assert (found.state, found.failure_class) == (State.FAILED, "framework_unhealthy")
    assert "bad_code: it has a link" in found.error


async def test_workers_that_end_together_are_one_failure_to_start(still: Stage) -> None:
    function_id = await still.define(workers_max=8)
    for n in range(4):
        await worker(still, function_id, f"w{n}")
    await still.value("update serverless.workers set state = 'starting', ready_at = null")
    await add(still, function_id, "a")
    for n in range(4):
        await still.parts.warden.end(f"w{n}", "its allocation ended")
    assert await still.value("select failures from serverless.functions") == 1
    assert (await still.find("a")).state is State.QUEUED


async def test_an_attempt_that_ended_is_not_missed_before_its_result_is_committed(still: Stage) -> None:
    function_id = await still.define()
    await worker(still, function_id)
    await add(still, function_id, "a")
    await claimed(still, function_id)
    await still.value("update serverless.invocations set dispatched_at = now() - interval '1 minute'")
    heartbeat: Any = WorkerMetricMessage(
        version="v1",
        serverlessRequestID="f",
        workerName="w1",
        workerNamespace="prj_default",
        eventType=MetricType.HEARTBEAT,
        reportedAt=(await still.find("a")).created_at,
    )
    await still.parts.warden.compare(heartbeat, age_s=0)
    assert (await still.find("a")).worker_id == "w1"
    # Missed again a while later, it never came.
    still.parts.warden._missing["w1"]["a", 1] -= 60  # pyright: ignore[reportPrivateUsage]
    await still.parts.warden.compare(heartbeat, age_s=600)
    assert (await still.find("a")).worker_id == "w1"
    await still.parts.warden.compare(heartbeat, age_s=0)
    assert (await still.find("a")).waiting


async def test_a_caller_is_told_what_the_attempt_said_that_counted(stage: Stage) -> None:
    """Somebody who has not the token speaks of the same invocation in the same batch."""
    from tests.integration.serverless.stage import result_of

    async def twice(dispatch: WorkerDispatchMessage) -> Any:
        worker = stage.workers[dispatch.workerName]
        await worker.result(dispatch, body="true")
        forged = result_of(dispatch, body="forged", token="00" * 16, attempt=99)
        read = [_read(result_of(dispatch, body="true")), _read(forged)]
        await stage.parts.results._commit(read)  # pyright: ignore[reportPrivateUsage]
        await asyncio.Event().wait()

    stage.handler = twice
    await stage.define()
    assert bytes((await stage.call()).body) == b'"true"'


def _read(message: Any) -> Any:
    from penstock.serverless.service import reading
    from penstock.serverless.service.results import Read

    ending = reading.ending(message)
    assert ending is not None
    return Read(message, ending)
