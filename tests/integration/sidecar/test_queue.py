"""What comes from the queue is believed for its MAC alone, made once, and told until the stream has it."""

import asyncio
import hashlib
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg
from prometheus_client import REGISTRY

from integration.sidecar.frameworks import Request, frames, replies, response, says
from integration.sidecar.stage import PROJECT, WAIT_S, Stage, Unit, nats_and_stage
from penstock.embedded.server import running
from penstock.kit.pull import Pull
from penstock.wire import subjects
from penstock.wire.serverless import (
    VERSION,
    CallAnswer,
    CallMessage,
    ControlMessage,
    FailureClass,
    MetricType,
    OutputKind,
    Reference,
    State,
)
from penstock.wire.sidecar import ExitClass


class Gate:
    """A handler that waits until it is let through, and knows how many wait with it."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.waiting = self.most = 0

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.open.wait()
        self.waiting -= 1
        writer.write(response(b'{"body": 1}'))


def security_events(kind: str) -> float:
    return REGISTRY.get_sample_value("penstock_sidecar_security_events_total", {"kind": kind}) or 0.0


async def ordered(unit: Unit, *, key: bytes | None = None, **order: Any) -> None:
    message = ControlMessage(version=VERSION, workerName=unit.worker, **order)
    await unit.order(subjects.control(unit.request, unit.worker), message, key=key)


async def test_an_attempt_is_called_once_and_its_reply_is_told(stage: Stage) -> None:
    unit = await stage.ready(invoke=replies({"statusCode": 201, "body": {"n": 2}, "headers": {"X-A": "b"}}))
    result = await unit.invoke("inv-plain")
    assert (result.state, result.statusCode, bytes(result.body)) == (State.SUCCEEDED, 201, b'{"n":2}')
    assert (result.headers, result.token, result.attempt) == ({"X-A": "b"}, "ab" * 16, 1)
    request = unit.framework.invokes()[0].json
    assert (request["payload"], request["attempt"], request["workerName"]) == ({"n": 1}, 1, unit.worker)
    assert "token" not in request
    assert (await unit.metric(MetricType.INVOCATION_FINISHED, "inv-plain")).statusCode == 201
    await unit.until_acknowledged()


async def test_a_dispatch_of_somebody_else_is_dropped_and_counted(stage: Stage) -> None:
    unit = await stage.ready()
    before = security_events("dispatch")
    await unit.send(unit.message("inv-forged"), key=b"not the worker's key")
    await stage.heard.until(lambda: security_events("dispatch") == before + 1)
    await unit.until_acknowledged()
    assert not unit.framework.invokes()
    assert not [each for each in stage.heard.results if each.invocationID == "inv-forged"]
    assert (await unit.invoke("inv-honest")).state is State.SUCCEEDED


async def test_what_cannot_be_read_is_buried_within_one_delivery(stage: Stage) -> None:
    unit = await stage.ready()
    await unit.send(unit.message("inv-v999").replace(b'"version":"v1"', b'"version":"v999"'))
    await unit.send(b'{"version": "v1", "invocationID": 5}')
    await unit.send(b"not JSON at all")
    result = await unit.invoke("inv-behind")
    assert result.state is State.SUCCEEDED
    await unit.until_acknowledged()
    subject = subjects.dead_letter("dispatch", unit.request)
    found = await stage.heard.until(lambda: (ours := [x for s, x in stage.heard.letters if s == subject])[2:] and ours)
    assert sorted(letter.failureClass for letter in found) == ["malformed_message"] * 2 + ["unsupported_version"]
    assert {(letter.workerName, letter.deliveryCount, letter.stream) for letter in found} == {(unit.worker, 1, "WORK")}
    assert len(unit.framework.invokes()) == 1


async def test_an_attempt_that_comes_twice_is_made_once(stage: Stage) -> None:
    gate = Gate()
    unit = await stage.ready(slots=4, invoke=gate)
    for _ in range(2):
        await unit.dispatch("inv-twice")
    await stage.heard.until(lambda: gate.waiting == 1)
    gate.open.set()
    await unit.result("inv-twice")
    await unit.dispatch("inv-twice")
    await unit.until_acknowledged()
    assert len(unit.framework.invokes()) == 1
    await unit.dispatch("inv-twice", attempt=2)
    await stage.heard.until(lambda: len(unit.framework.invokes()) == 2)


async def test_what_comes_again_is_made_only_if_it_still_counts(stage: Stage) -> None:
    unit = await stage.unit(serve=False, slots=2)
    stage.gateway.over.add("inv-over")
    for invocation_id in ("inv-over", "inv-open"):
        await unit.dispatch(invocation_id)
    async with Pull(stage.bus, stream="WORK", consumer=unit.worker, batch=2) as before:
        taken: list[Msg] = []
        while len(taken) < 2:
            taken += await before.take(2)
        for message in taken:
            await message.nak()
    unit.serve()
    assert (await unit.result("inv-open")).state is State.SUCCEEDED
    await unit.until_acknowledged()
    assert [each.json["invocationID"] for each in unit.framework.invokes()] == ["inv-open"]


async def test_no_more_handlers_than_slots_are_called(stage: Stage) -> None:
    gate = Gate()
    unit = await stage.ready(slots=3, invoke=gate)
    for number in range(8):
        await unit.dispatch(f"inv-slots-{number}")
    await stage.heard.until(lambda: gate.waiting == 3)
    beat = await stage.heard.until(
        lambda: next((x for x in stage.heard.metrics if x.workerName == unit.worker and len(x.attempts) == 3), None)
    )
    assert beat.inflight == 3
    gate.open.set()
    for number in range(8):
        await unit.result(f"inv-slots-{number}")
    assert gate.most == 3


async def test_a_payload_by_reference_is_fetched_with_the_attempts_token_and_checked(stage: Stage) -> None:
    unit = await stage.ready()
    payload = b'{"large": "' + b"x" * 300_000 + b'"}'
    kept = Reference(key="k", bytes=len(payload), sha256=hashlib.sha256(payload).hexdigest())
    stage.gateway.payloads = {"inv-ref": payload, "inv-altered": payload.replace(b"large", b"other")}
    assert (await unit.invoke("inv-ref", payloadRef=kept)).state is State.SUCCEEDED
    assert unit.framework.invokes()[0].json["payload"] == msgspec.json.decode(payload)
    altered = await unit.invoke("inv-altered", payloadRef=kept)
    assert altered.failureClass is FailureClass.INTEGRITY
    assert len(unit.framework.invokes()) == 1
    assert stage.gateway.bearers[-2:] == [f"Bearer {'ab' * 16}"] * 2


async def test_a_cancelled_attempt_is_stopped_and_then_its_unit(stage: Stage) -> None:
    gate = Gate()
    unit = await stage.ready(slots=2, invoke=gate)
    await unit.dispatch("inv-cancel")
    await stage.heard.until(lambda: gate.waiting == 1)
    before = security_events("control")
    await ordered(unit, key=b"a stranger's", cancel=[("inv-cancel", 1)])
    await stage.heard.until(lambda: security_events("control") == before + 1)
    assert not [request for request in unit.framework.requests if request.path == "/cancel"]
    await ordered(unit, cancel=[("inv-unknown", 1)])
    await unit.dispatch("inv-unknown")
    async with asyncio.timeout(WAIT_S):
        while await unit.left() > 1:
            await asyncio.sleep(0.02)
    await ordered(unit, cancel=[("inv-cancel", 1)])
    result = await unit.result("inv-cancel")
    assert (result.state, result.failureClass) == (State.FAILED, FailureClass.CANCELLED)
    cancel = await stage.heard.until(
        lambda: next((request for request in unit.framework.requests if request.path == "/cancel"), None)
    )
    assert cancel.json == {"invocationID": "inv-cancel", "attempt": 1}
    await stage.heard.until(lambda: any(unit_id == unit.id for unit_id, _ in stage.kills))
    why = await unit.metric(MetricType.UNHEALTHY)
    assert "inv-cancel" in why.error, "its function is told why"
    assert "it was cancelled" in why.error
    gate.open.set()
    await unit.until_acknowledged()
    await unit.dispatch("inv-later")
    await asyncio.sleep(0.3)
    assert await unit.left() == 1, "it gets nothing more"
    assert [request.json["invocationID"] for request in unit.framework.invokes()] == ["inv-cancel"]


async def test_a_draining_worker_ends_what_it_has_and_takes_nothing_new(stage: Stage) -> None:
    gate = Gate()
    unit = await stage.ready(slots=2, invoke=gate)
    await unit.dispatch("inv-drain-1")
    await stage.heard.until(lambda: gate.waiting == 1)
    await ordered(unit, drain=True)
    taking = stage.roster._workers[unit.id][0]._desk._taking
    assert taking is not None
    await asyncio.wait({taking}, timeout=WAIT_S)
    await unit.dispatch("inv-drain-2")
    gate.open.set()
    assert (await unit.result("inv-drain-1")).state is State.SUCCEEDED
    async with asyncio.timeout(WAIT_S):
        while await unit.left() != 1:
            await asyncio.sleep(0.02)
    assert len(unit.framework.invokes()) == 1


async def test_output_comes_in_order_and_before_the_result(stage: Stage) -> None:
    said = [{"stdout": "one"}, {"stderr": "two"}, {"progress": {"done": 1}}, {"chunk": [4]}, {"chunk": "x" * 60_000}]
    more = [{"chunk": "y" * 10_000}, {"stdout": "last"}]
    unit = await stage.ready(invoke=frames(*said, *more, {"reply": {"statusCode": 202}}))
    result = await unit.invoke("inv-frames")
    assert (result.state, result.statusCode) == (State.SUCCEEDED, 202), result.error
    heard = [each for each in stage.heard.outputs if each.invocationID == "inv-frames"]
    items = [item for each in heard for item in each.items]
    assert [item.seq for item in items] == list(range(7))
    assert [item.kind for item in items][:5] == ["stdout", "stderr", "progress", "chunk", "chunk"]
    assert (items[2].text, items[3].text) == ('{"done":1}', "[4]")
    assert (items[6].kind, items[6].text) == (OutputKind.STDOUT, "last")
    assert {each.token for each in heard} == {"ab" * 16}


class Calling:
    """A handler that makes one call and answers with what it gets."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.unit: Unit | None = None

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        call = b'{"call":{"call":"c1","function":"other","payload":[1]}}\n'
        writer.write(head.encode() + f"{len(call):x}\r\n".encode() + call + b"\r\n")
        answered = await self.stage.heard.until(self._answer)
        reply = msgspec.json.encode({"reply": {"body": answered.json}}) + b"\n"
        writer.write(f"{len(reply):x}\r\n".encode() + reply + b"\r\n0\r\n\r\n")

    def _answer(self) -> Request | None:
        assert self.unit is not None
        return next((each for each in self.unit.framework.requests if each.path == "/answer"), None)

    def sent(self) -> list[CallMessage]:
        assert self.unit is not None
        mine = [each for each in self.stage.heard.calls if self.unit.worker in each.subject]
        return [msgspec.json.decode(each.data, type=CallMessage) for each in mine]


async def calling(stage: Stage, invocation_id: str) -> tuple[Unit, Calling]:
    """A unit whose handler waits for the answer to its call."""
    handler = Calling(stage)
    unit = handler.unit = await stage.ready(invoke=handler)
    await unit.dispatch(invocation_id)
    await stage.heard.until(lambda: bool(handler.sent()))
    return unit, handler


async def test_a_handlers_call_goes_out_and_its_answer_comes_back(stage: Stage) -> None:
    unit, handler = await calling(stage, "inv-caller")
    call = handler.sent()[0]
    assert (call.function, bytes(call.payload), call.token, call.projectID) == ("other", b"[1]", "ab" * 16, PROJECT)
    answer = CallAnswer(call="c1", invocationID="inv-called", state=State.SUCCEEDED, body=msgspec.Raw(b'"forged"'))
    subject = subjects.call_answer(unit.request, unit.worker)
    await unit.order(subject, answer, key=b"a stranger's")
    await unit.order(subject, msgspec.structs.replace(answer, body=msgspec.Raw(b'"honest"')))
    assert msgspec.json.decode((await unit.result("inv-caller")).body)["body"] == "honest"


async def test_a_call_is_sent_again_under_the_same_id_until_it_is_answered(stage: Stage) -> None:
    unit, handler = await calling(stage, "inv-again")
    await stage.heard.until(lambda: len(handler.sent()) > 2)
    first, *others = handler.sent()
    assert all(each == first for each in others)
    answer = CallAnswer(call="c1", invocationID="inv-called", state=State.SUCCEEDED)
    await unit.order(subjects.call_answer(unit.request, unit.worker), answer)
    await unit.result("inv-again")
    count = len(handler.sent())
    await asyncio.sleep(0.5)
    assert len(handler.sent()) == count, "it is not sent after its answer"


async def test_calls_of_an_attempt_that_is_over_are_not_sent_again(stage: Stage) -> None:
    unit, handler = await calling(stage, "inv-dropped")
    await unit.framework.stop()
    unit.end(ExitClass.KILLED)
    await unit.result("inv-dropped")
    count = len(handler.sent())
    await asyncio.sleep(0.5)
    assert len(handler.sent()) == count


@pytest.mark.parametrize(
    ("content_type", "kept", "told"),
    [
        ("application/json", b'{"n": [1]}', {"body": {"n": [1]}}),
        ("application/octet-stream", b"\0\xff", {"body": "AP8=", "encoding": "base64"}),
        ("text/plain", b"words", {"body": "words"}),
        ("application/json", b"{", {"failureClass": "framework_error"}),
    ],
)
async def test_a_large_result_of_a_call_is_fetched_with_the_token_of_the_attempt(
    stage: Stage, content_type: str, kept: bytes, told: dict[str, Any]
) -> None:
    unit, _ = await calling(stage, f"inv-{hashlib.sha256(kept).hexdigest()[:8]}")
    stage.gateway.results["call-1"] = kept
    reference = Reference(key="kept", bytes=len(kept), sha256=hashlib.sha256(kept).hexdigest())
    answer = CallAnswer(
        call="c1", invocationID="call-1", state=State.SUCCEEDED, contentType=content_type, bodyRef=reference
    )
    await unit.order(subjects.call_answer(unit.request, unit.worker), answer)
    body = msgspec.json.decode((await unit.result(f"inv-{reference.sha256[:8]}")).body)
    assert {name: body.get(name) for name in told} == told
    assert "bodyRef" not in body
    assert stage.gateway.bearers[-1] == f"Bearer {'ab' * 16}"


async def test_the_platforms_own_framework_says_at_once_why_it_cannot_serve(stage: Stage) -> None:
    broken = msgspec.json.encode({"error": "ImportError: no numpy", "traceback": "Traceback: line 3"})
    unit = await stage.unit(serve=False, health=says(response(broken, status="500 Internal Server Error")))
    unit.serve(framework=True, ready_s=600)
    report = await unit.metric(MetricType.UNHEALTHY)
    assert report.error == "/healthz answered 500: ImportError: no numpy\nTraceback: line 3"


async def test_a_busy_framework_of_ours_gets_a_moment(stage: Stage) -> None:
    busy = [response(b'{"error":"all slots are taken"}', status="503 Service Unavailable")] * 2

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(busy.pop() if busy else response(b'{"body": "done"}'))

    unit = await stage.unit(serve=False, invoke=script)
    unit.serve(framework=True)
    assert bytes((await unit.invoke("inv-busy")).body) == b'"done"'


@pytest.mark.parametrize("large", [{"error": "x" * (5 << 20)}, {"body": "y", "headers": {"x": "x" * (5 << 20)}}])
async def test_only_the_body_of_a_reply_may_be_large(stage: Stage, large: dict[str, Any]) -> None:
    for number, script in enumerate((replies(large), frames({"reply": large}))):
        unit = await stage.ready(invoke=script)
        result = await unit.invoke(f"inv-around-{unit.number}-{number}")
        assert result.failureClass is FailureClass.FRAMEWORK_ERROR
        assert "apart from a body" in result.error


async def test_a_frame_that_is_no_reply_may_not_be_large(stage: Stage) -> None:
    unit = await stage.ready(invoke=frames({"stdout": "x" * (5 << 20)}, {"reply": {"body": 1}}))
    result = await unit.invoke("inv-large-frame")
    assert (result.failureClass, "apart from a body" in result.error) == (FailureClass.FRAMEWORK_ERROR, True)


async def test_results_survive_a_restart_of_the_queue() -> None:
    async with nats_and_stage() as (stage, server):
        gate = Gate()
        unit = await stage.ready(slots=2, invoke=gate)
        for name in ("inv-r1", "inv-r2"):
            await unit.dispatch(name)
        await stage.heard.until(lambda: gate.waiting == 2)
        await stage.child.stop(server.stop_signal)
        gate.open.set()
        await asyncio.sleep(0.2)
        async with running(server):
            await stage.catch_up()
            for name in ("inv-r1", "inv-r2"):
                assert (await unit.result(name)).state is State.SUCCEEDED
            assert (await unit.invoke("inv-r3")).state is State.SUCCEEDED
            assert len(unit.framework.invokes()) == 3
            await unit.until_acknowledged()
