"""Messages that nobody honest sends, or that came at a bad time: the rows `nats` of bad_inputs.csv that concern what
activators read. Those about connections are in test_callout.py, those about publishing in tests/integration/kit."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY
from tests.bad_inputs import Checks, rows
from tests.conftest import Servers
from tests.integration.serverless.stage import Stage, result_of, shared, until

from penstock.kit import inbox
from penstock.kit.errors import Invalid
from penstock.kit.inbox import Verdict
from penstock.wire import subjects
from penstock.wire.rest import InvocationRequest
from penstock.wire.serverless import MetricType, State, WorkerDispatchMessage

CHECKS = Checks()
ELSEWHERE = {"nats-05", "nats-06", "nats-07", "nats-38", "nats-39"}


@pytest.fixture(scope="module")
async def stage(servers: Servers) -> AsyncIterator[Stage]:
    """One activator for all rows; its worker's handler does as each row says."""
    async with shared(servers) as made:
        await made.define(concurrency=8, workers_max=1)
        await made.call(payload=0)
        yield made


@pytest.mark.parametrize("row_id", [row_id for row_id in rows("nats") if row_id not in ELSEWHERE])
async def test_row(row_id: str, stage: Stage) -> None:
    await CHECKS[row_id](stage)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{name}_total", labels) or 0.0


class Counts:
    """A counter, and whether it was counted up since."""

    def __init__(self, name: str, **labels: str) -> None:
        self._name, self._labels = name, labels
        self._before = counted(name, **labels)

    async def rose(self) -> None:
        async def check() -> bool:
            return counted(self._name, **self._labels) > self._before

        await until(check)


async def played(stage: Stage, act: Callable[[WorkerDispatchMessage], Awaitable[None]]) -> Any:
    """An invocation whose worker answers only as `act` does; its row when it has ended, and the dispatch."""
    seen: list[WorkerDispatchMessage] = []
    worker = next(iter(stage.workers.values()))
    over = asyncio.Event()

    async def handler(dispatch: WorkerDispatchMessage) -> Any:
        seen.append(dispatch)
        await act(dispatch)
        await over.wait()

    worker.handler = handler
    invocation_id = await stage.spawn(payload={"secret": 1})
    row = await stage.ended(invocation_id)
    over.set()
    return row


async def send(stage: Stage, dispatch: WorkerDispatchMessage, **changes: Any) -> None:
    """A result as a dictionary, so that anything can be wrong with it."""
    message = msgspec.json.decode(msgspec.json.encode(result_of(dispatch, body={"ok": True}))) | changes
    headers = {"Nats-Msg-Id": secrets.token_hex(8)}
    await stage.bus.js.publish(subjects.result("f"), msgspec.json.encode(message), headers=headers)


def failing(state: State, failure: str, **changes: Any) -> Callable[[Stage], Awaitable[None]]:
    """The result with these changes ends its attempt so."""

    async def check(stage: Stage) -> None:
        row = await played(stage, lambda dispatch: send(stage, dispatch, **changes))
        assert (row.state, row.failure_class, row.attempt) == (state, failure, 1)

    return check


@CHECKS.row("nats-03")
async def _(stage: Stage) -> None:
    letters = await stage.bus.client.subscribe(subjects.DEAD_LETTERS)
    await stage.bus.js.publish(subjects.invoke("f"), b'{"version":"v999"}', headers={"Nats-Msg-Id": "x1"})
    letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    assert (letter["source"], letter["failureClass"]) == ("invocation", "unsupported_version")
    await stage.bus.js.publish(subjects.result("f"), b'{"version":"v999"}', headers={"Nats-Msg-Id": "x2"})
    letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    assert (letter["source"], letter["failureClass"]) == ("result", "unsupported_version")
    await letters.unsubscribe()


@CHECKS.row("nats-09")
async def _(stage: Stage) -> None:
    await stage.define(project_id="prj_other")
    ends = [await stage.spawn(invocationID="same", project_id=project) for project in ("prj_default", "prj_other")]
    assert ends == ["same", "same"]
    assert await stage.value("select count(*) from serverless.invocations where id = 'same'") == 2


@CHECKS.row("nats-11")
async def _(stage: Stage) -> None:
    from nats.aio.msg import Msg

    counts = Counts("penstock_security_events", reason="foreign_subject")
    letters = await stage.bus.client.subscribe(subjects.DEAD_LETTERS)
    reply = "$JS.ACK.OUT.results.1.1.1.1700000000000000000.0"
    forged = Msg(_client=stage.bus.client, subject=subjects.invoke("f"), data=b"{}", reply=reply)
    await stage.parts.results.take([forged])
    await counts.rose()
    letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    assert letter["failureClass"] == "foreign_message"
    await letters.unsubscribe()


@CHECKS.row("nats-12")
async def _(stage: Stage) -> None:
    counts = Counts("penstock_messages_discarded", source="result", reason="malformed_message")
    headers = {"Nats-Msg-Id": "x12", "Status": "404"}
    await stage.bus.js.publish(subjects.result("f"), b"", headers=headers)
    await counts.rose()


@CHECKS.row("nats-13")
async def _(stage: Stage) -> None:
    counts = Counts("penstock_messages_discarded", source="result", reason="malformed_message")
    await stage.bus.js.publish(subjects.result("f"), b'{"stream":"OUT","seq":1}', headers={"Nats-Msg-Id": "x13"})
    await counts.rose()


async def stale(stage: Stage, **changes: Any) -> None:
    counts = Counts("penstock_messages_discarded", source="result", reason="stale_attempt")

    async def act(dispatch: WorkerDispatchMessage) -> None:
        await send(stage, dispatch, state="failed", statusCode=500, **changes)
        await counts.rose()
        await send(stage, dispatch)

    row = await played(stage, act)
    assert (row.state, row.result) == (State.SUCCEEDED, b'{"ok":true}')


@CHECKS.row("nats-14")
async def _(stage: Stage) -> None:
    await stale(stage, token=secrets.token_hex(16))


@CHECKS.row("nats-15")
async def _(stage: Stage) -> None:
    await stale(stage, attempt=0, token=secrets.token_hex(16))


@CHECKS.row("nats-16")
async def _(stage: Stage) -> None:
    kept: list[WorkerDispatchMessage] = []

    async def act(dispatch: WorkerDispatchMessage) -> None:
        kept.append(dispatch)
        await send(stage, dispatch)

    row = await played(stage, act)
    counts = Counts("penstock_messages_discarded", source="result", reason="terminal")
    await send(stage, kept[0], state="failed", statusCode=500)
    await counts.rose()
    assert (await stage.find(row.id)).state is State.SUCCEEDED


@CHECKS.row("nats-17")
async def _(stage: Stage) -> None:
    letters = await stage.bus.client.subscribe(subjects.DEAD_LETTERS)

    async def act(dispatch: WorkerDispatchMessage) -> None:
        # Together, so that they may be committed by one statement: none takes the other's place.
        forged = send(stage, dispatch, workerName="unit-f-worker-00000000")
        await asyncio.gather(send(stage, dispatch, invocationID="inv-nobody"), forged, send(stage, dispatch))

    assert (await played(stage, act)).state is State.SUCCEEDED
    letter = msgspec.json.decode((await letters.next_msg(timeout=30)).data)
    assert (letter["failureClass"], letter["invocationID"]) == ("orphan_result", "inv-nobody")
    await letters.unsubscribe()


@CHECKS.row("nats-18")
async def _(stage: Stage) -> None:
    counts = Counts("penstock_security_events", reason="foreign_worker")

    async def act(dispatch: WorkerDispatchMessage) -> None:
        await send(stage, dispatch, state="failed", statusCode=500, workerName="unit-f-worker-00000000")
        await counts.rose()
        await send(stage, dispatch)

    assert (await played(stage, act)).state is State.SUCCEEDED


@CHECKS.row("nats-19")
async def _(stage: Stage) -> None:
    counts = Counts("penstock_result_clock_skew")
    row = await played(stage, lambda dispatch: send(stage, dispatch, completedAt="2001-01-01T00:00:00Z"))
    assert row.state is State.SUCCEEDED
    assert row.created_at <= row.finished_at
    await counts.rose()


@CHECKS.row("nats-21")
async def _(stage: Stage) -> None:
    for status in (99, 1000, "200"):
        await failing(State.FAILED, "framework_error", statusCode=status)(stage)


@CHECKS.row("nats-22")
async def _(stage: Stage) -> None:
    headers = {f"x-{n}": "1" for n in range(10_000)}
    row = await played(stage, lambda dispatch: send(stage, dispatch, headers=headers))
    assert (row.state, len(row.result_headers)) == (State.FAILED, 64)


@CHECKS.row("nats-23")
async def _(stage: Stage) -> None:
    headers = {"x-good": "1", "x-bad": "1\r\nSet-Cookie: a=b"}
    row = await played(stage, lambda dispatch: send(stage, dispatch, headers=headers))
    assert (row.state, row.failure_class, row.result_headers) == (State.FAILED, "framework_error", {"x-good": "1"})


CHECKS.row("nats-24")(failing(State.FAILED, "integrity", bodySHA256=hashlib.sha256(b"other").hexdigest()))


async def bad_metric(stage: Stage, inflight: int) -> None:
    counts = Counts("penstock_messages_discarded", source="metric", reason="invalid_metric")
    worker = next(iter(stage.workers.values()))
    await worker.report(MetricType.HEARTBEAT, inflight=inflight)
    await counts.rose()


@CHECKS.row("nats-25")
async def _(stage: Stage) -> None:
    await bad_metric(stage, -5)


@CHECKS.row("nats-26")
async def _(stage: Stage) -> None:
    await bad_metric(stage, 2**63)


async def not_resurrected(stage: Stage, kind: MetricType) -> None:
    """A worker of another function that is gone, and reports."""
    name = f"gone-{kind}"
    await stage.define(name, idle_s=0)
    await stage.call(name)
    worker = next(each for each in stage.workers.values() if each.function == name)
    await until(lambda: stage.value("select state = 'gone' from serverless.workers where id = $1", worker.name))
    worker.beating = False
    counts = Counts("penstock_security_events", reason="metric_proof")
    await worker.report(kind)
    await counts.rose()
    assert await stage.value("select state from serverless.workers where id = $1", worker.name) == "gone"


@CHECKS.row("nats-28")
async def _(stage: Stage) -> None:
    await not_resurrected(stage, MetricType.HEARTBEAT)


@CHECKS.row("nats-29")
async def _(stage: Stage) -> None:
    await not_resurrected(stage, MetricType.REGISTERED)


async def verdict(stage: Stage, aggregate: str, version: int) -> Verdict:
    async with stage.db.transaction() as tx:
        return await inbox.accept(
            tx, consumer="test", aggregate_id=aggregate, version=version, event_id=f"evt{version}"
        )


@CHECKS.row("nats-30")
async def _(stage: Stage) -> None:
    # Nothing of an event's time is asked: the version of its aggregate alone says what is next.
    assert [await verdict(stage, "a30", version) for version in (1, 2)] == [Verdict.APPLY, Verdict.APPLY]


@CHECKS.row("nats-31")
async def _(stage: Stage) -> None:
    assert [await verdict(stage, "a31", version) for version in (1, 3, 2, 3)] == [
        Verdict.APPLY,
        Verdict.GAP,
        Verdict.APPLY,
        Verdict.APPLY,
    ]


@CHECKS.row("nats-32")
async def _(stage: Stage) -> None:
    assert [await verdict(stage, "a32", version) for version in (1, 2, 1)] == [
        Verdict.APPLY,
        Verdict.APPLY,
        Verdict.STALE,
    ]


@CHECKS.row("nats-33")
async def _(stage: Stage) -> None:
    counts = Counts("penstock_messages_discarded", source="metric", reason="invalid_metric")
    body = b'{"version":"v1","eventType":"nobody_knows","workerName":"w"}'
    await stage.bus.js.publish(subjects.metrics("f"), body, headers={"Nats-Msg-Id": "x33"})
    await counts.rose()


@CHECKS.row("nats-35")
async def _(stage: Stage) -> None:
    async def act(dispatch: WorkerDispatchMessage) -> None:
        await send(stage, dispatch)
        await send(stage, dispatch)

    row = await played(stage, act)
    assert await stage.value("select served from serverless.workers where id = $1", row.worker_id)
    assert await stage.value("select min(inflight) >= 0 from serverless.workers")


@CHECKS.row("nats-40")
async def _(stage: Stage) -> None:
    body = b'{"serverlessRequestID":"f","replySubject":"_INBOX.somebody"}'
    with pytest.raises(msgspec.ValidationError, match="replySubject"):
        msgspec.json.decode(body, type=InvocationRequest)
    with pytest.raises(Invalid):
        await stage.invoke("f", headers={"Nats-Reply\r\n": "x"})
