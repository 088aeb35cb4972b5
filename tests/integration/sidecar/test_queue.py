"""What comes from the queue is believed for its MAC alone, made once, and told until the stream has it."""

import asyncio
import hashlib
from typing import Any

import msgspec
from prometheus_client import REGISTRY

from integration.sidecar.frameworks import Request, frames, replies, response
from integration.sidecar.stage import PROJECT, WAIT_S, Stage, Unit, nats_and_stage
from penstock.embedded.server import running
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
    unit = await stage.ready(invoke=gate)
    await unit.dispatch("inv-cancel")
    await stage.heard.until(lambda: gate.waiting == 1)
    before = security_events("control")
    await ordered(unit, key=b"a stranger's", cancel=[("inv-cancel", 1)])
    await stage.heard.until(lambda: security_events("control") == before + 1)
    assert not [request for request in unit.framework.requests if request.path == "/cancel"]
    await ordered(unit, cancel=[("inv-cancel", 1), ("inv-unknown", 1)])
    result = await unit.result("inv-cancel")
    assert (result.state, result.failureClass) == (State.FAILED, FailureClass.CANCELLED)
    cancel = await stage.heard.until(
        lambda: next((request for request in unit.framework.requests if request.path == "/cancel"), None)
    )
    assert cancel.json == {"invocationID": "inv-cancel", "attempt": 1}
    await stage.heard.until(lambda: any(unit_id == unit.id for unit_id, _ in stage.kills))
    await unit.dispatch("inv-unknown")
    gate.open.set()
    await unit.until_acknowledged()
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


async def test_a_handlers_call_goes_out_and_its_answer_comes_back(stage: Stage) -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        call = b'{"call":{"call":"c1","function":"other","payload":[1]}}\n'
        writer.write(head.encode() + f"{len(call):x}\r\n".encode() + call + b"\r\n")
        answered = await stage.heard.until(
            lambda: next((each for each in unit.framework.requests if each.path == "/answer"), None)
        )
        reply = msgspec.json.encode({"reply": {"body": answered.json["body"]}}) + b"\n"
        writer.write(f"{len(reply):x}\r\n".encode() + reply + b"\r\n0\r\n\r\n")

    unit = await stage.ready(invoke=script)
    await unit.dispatch("inv-caller")
    sent = await stage.heard.until(lambda: next((c for c in stage.heard.calls if unit.worker in c.subject), None))
    call = msgspec.json.decode(sent.data, type=CallMessage)
    assert (call.function, bytes(call.payload), call.token, call.projectID) == ("other", b"[1]", "ab" * 16, PROJECT)
    answer = CallAnswer(call="c1", invocationID="inv-called", state=State.SUCCEEDED, body=msgspec.Raw(b'"forged"'))
    subject = subjects.call_answer(unit.request, unit.worker)
    await unit.order(subject, answer, key=b"a stranger's")
    await unit.order(subject, msgspec.structs.replace(answer, body=msgspec.Raw(b'"honest"')))
    assert bytes((await unit.result("inv-caller")).body) == b'"honest"'


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
            for name in ("inv-r1", "inv-r2"):
                assert (await unit.result(name)).state is State.SUCCEEDED
            assert (await unit.invoke("inv-r3")).state is State.SUCCEEDED
            assert len(unit.framework.invokes()) == 3
            await unit.until_acknowledged()
