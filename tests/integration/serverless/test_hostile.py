"""A worker whose identity somebody else has: whatever it publishes, and however much, others are served as before."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from tests.conftest import Servers
from tests.integration.serverless.sidecars import Worker, sidecar
from tests.integration.serverless.stage import Played, Stage, result_of, shared, until

from penstock.kit.clock import utc_now
from penstock.serverless import streams
from penstock.serverless.callout import Callout
from penstock.serverless.service.proofs import proof
from penstock.wire import subjects
from penstock.wire.serverless import (
    INLINE_BYTES_MAX,
    WORKER_MESSAGE_BYTES_MAX,
    InvocationResultMessage,
    MetricType,
    Mode,
    State,
    WorkerDispatchMessage,
    WorkerMetricMessage,
)

FLOOD = 25_000
FLOOD_BYTES = 256 << 20
#: What nobody else may notice. The flood is made in this very process, and a machine may be busy.
NOTICED_S = 5.0
RUBBISH = b'{"version":"v1","invocationID":"\xff\xfe"}'
#: As large as the server takes it.
LARGE = RUBBISH.ljust(WORKER_MESSAGE_BYTES_MAX - 1024)


@pytest.fixture(scope="module")
async def stage(servers: Servers) -> AsyncIterator[Stage]:
    """Two tenants, each with a worker that is ready."""
    async with shared(servers) as made:
        await Callout(made.db, made.bus, (servers.folder / "nats.issuer").read_text()).serve()
        await made.define("hostile", workers_max=1)
        await made.define("quiet", project_id="prj_other", workers_max=1)
        await made.call("hostile", payload=0)
        await made.call("quiet", project_id="prj_other", payload=0)
        yield made


async def worker_of(stage: Stage, function: str, project_id: str = "prj_default") -> Played:
    """One that serves now: a flood harms its own function, whose worker may have been replaced."""
    answer = await stage.call(function, project_id=project_id, payload=0)
    return stage.workers[answer.workerName]


def a_result(worker: Played) -> bytes:
    """Well-formed, and of an attempt that nobody made."""
    dispatch = WorkerDispatchMessage(
        version="v1",
        invocationID="inv-none",
        serverlessRequestID=worker.function,
        mode=Mode.ASYNC,
        state=State.DISPATCHING,
        contentType="application/json",
        resultSubject="",
        metricsSubject="",
        workerName=worker.name,
        workerNamespace=worker.project_id,
        dispatchedAt=utc_now(),
        timeoutSeconds=1,
        projectID=worker.project_id,
        attempt=1,
        token="00" * 16,
    )
    return msgspec.json.encode(result_of(dispatch))


def a_large_result(worker: Played) -> bytes:
    """With a body in line, which is read to its end."""
    body = msgspec.Raw(msgspec.json.encode("x" * (INLINE_BYTES_MAX - 2)))
    told = msgspec.json.decode(a_result(worker), type=InvocationResultMessage)
    return msgspec.json.encode(msgspec.structs.replace(told, body=body))


def a_heartbeat(worker: Played) -> bytes:
    """As its own sidecar makes it."""
    message = WorkerMetricMessage(
        version="v1",
        serverlessRequestID=worker.function,
        workerName=worker.name,
        workerNamespace=worker.project_id,
        eventType=MetricType.HEARTBEAT,
        reportedAt=utc_now(),
        projectID=worker.project_id,
    )
    return msgspec.json.encode(msgspec.structs.replace(message, proof=proof(worker.key, message)))


def an_output(worker: Played) -> bytes:
    item = {"seq": 1, "kind": "stdout", "text": "x" * 100, "at": utc_now()}
    return msgspec.json.encode(
        {
            "version": "v1",
            "projectID": worker.project_id,
            "invocationID": "inv-none",
            "workerName": worker.name,
            "attempt": 1,
            "token": "00" * 16,
            "items": [item] * 10,
        }
    )


def a_call(worker: Played) -> bytes:
    return msgspec.json.encode(
        {
            "version": "v1",
            "projectID": worker.project_id,
            "invocationID": "inv-none",
            "workerName": worker.name,
            "token": "00" * 16,
            "call": "c1",
            "function": "quiet",
            "mode": "sync",
        }
    )


FLOODS: dict[str, tuple[Callable[[Played], str], Callable[[Played], bytes]]] = {
    "rubbish results": (lambda it: subjects.result(it.request), lambda _: RUBBISH),
    "rubbish metrics": (lambda it: subjects.metrics(it.request), lambda _: RUBBISH),
    "rubbish output": (lambda it: subjects.output(it.request), lambda _: RUBBISH),
    "rubbish calls": (lambda it: subjects.call(it.request, it.name), lambda _: RUBBISH),
    "results": (lambda it: subjects.result(it.request), a_result),
    "metrics": (lambda it: subjects.metrics(it.request), a_heartbeat),
    "output": (lambda it: subjects.output(it.request), an_output),
    "calls": (lambda it: subjects.call(it.request, it.name), a_call),
    "large results": (lambda it: subjects.result(it.request), a_large_result),
    "large rubbish results": (lambda it: subjects.result(it.request), lambda _: LARGE),
    "large rubbish metrics": (lambda it: subjects.metrics(it.request), lambda _: LARGE),
    "large rubbish output": (lambda it: subjects.output(it.request), lambda _: LARGE),
    "large rubbish calls": (lambda it: subjects.call(it.request, it.name), lambda _: LARGE),
}


async def flood(servers: Servers, worker: Played, kind: str) -> None:
    subject, body = FLOODS[kind]
    async with sidecar(servers.nats_url, Worker(worker.name, worker.request, worker.token)) as own:
        for number in range(min(FLOOD, FLOOD_BYTES // len(_last(body, worker)))):
            await own.client.publish(subject(worker), body(worker) if number % 1000 == 0 else _last(body, worker))
            if number % 500 == 0 or len(_last(body, worker)) > 1 << 20:
                await asyncio.sleep(0)
        await own.client.flush(timeout=30)


_made: dict[str, bytes] = {}


def _last(body: Callable[[Played], bytes], worker: Played) -> bytes:
    """One for all: making it anew would be slower than what is tested."""
    key = f"{id(body)} {worker.name}"
    if key not in _made:
        _made[key] = body(worker)
    return _made[key]


@pytest.mark.parametrize("kind", FLOODS)
async def test_one_workers_flood_delays_nobody_else(servers: Servers, stage: Stage, kind: str) -> None:
    quiet = await worker_of(stage, "quiet", "prj_other")
    await flood(servers, await worker_of(stage, "hostile"), kind)
    lease = "select lease_until from serverless.workers where id = $1"
    before = await stage.value(lease, quiet.name)
    began = time.monotonic()
    answer = await stage.call("quiet", project_id="prj_other", payload=1)
    assert answer.state is State.SUCCEEDED
    assert time.monotonic() - began < NOTICED_S
    assert answer.workerName == quiet.name

    async def heard() -> bool:
        return await stage.value(lease, quiet.name) > before

    await until(heard, timeout_s=NOTICED_S)


async def test_rubbish_is_not_kept_for_long(servers: Servers, stage: Stage) -> None:
    await flood(servers, await worker_of(stage, "hostile"), "rubbish results")

    async def drained() -> bool:
        info = await stage.bus.js.consumer_info(streams.OUT, streams.RESULTS)
        return info.num_pending == 0 and info.num_ack_pending == 0

    await until(drained)
