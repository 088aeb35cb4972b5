"""Every row of the list of bad inputs for frameworks that the sidecar decides, over a real queue and real sockets."""

import asyncio
import base64
import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from bad_inputs import Checks, rows
from integration.sidecar.frameworks import Request, Script, ScriptedFramework, frames, replies, response, says
from integration.sidecar.stage import BOUNDS, SOCKET, Stage, Unit
from penstock.wire.serverless import FailureClass, InvocationResultMessage, MetricType, OutputKind, State
from penstock.wire.sidecar import ExitClass

#: 34 and 39 are the sandbox's, 38 is refused where invocations come in, 40 is in test_process.py.
ELSEWHERE = {f"uds_framework-{number}" for number in (34, 38, 39, 40)}
ROWS = [row_id for row_id in rows("uds_framework") if row_id not in ELSEWHERE]
CHECKS = Checks()
row = CHECKS.row


@pytest.mark.parametrize("row_id", ROWS)
async def test_bad_framework_is_handled_as_listed(row_id: str, stage: Stage) -> None:
    await CHECKS[row_id](stage)


def test_every_row_has_a_check() -> None:
    assert set(CHECKS) == set(ROWS)


async def unhealthy(unit: Unit, *words: str, **serve: Any) -> None:
    """The worker is reported as of no use, with these words, and nothing was taken from the queue."""
    await unit.dispatch(f"inv-{unit.number}")
    unit.serve(**serve)
    report = await unit.metric(MetricType.UNHEALTHY)
    assert all(word in report.error for word in words), report.error
    assert await unit.left() == 1
    assert not unit.framework.invokes()


async def answer(stage: Stage, script: Script, **more: Any) -> InvocationResultMessage:
    """How one attempt ends with a framework that answers like this."""
    unit = await stage.ready(invoke=script)
    result = await unit.invoke(f"inv-{unit.number}", **more)
    assert len(unit.framework.invokes()) == 1
    return result


def failed(result: InvocationResultMessage, failure: FailureClass, *words: str, status: int = 502) -> None:
    assert (result.state, result.failureClass, result.statusCode) == (State.FAILED, failure, status), result.error
    assert all(word in result.error for word in words), result.error


@row("uds_framework-01")
async def _absent(stage: Stage) -> None:
    unit = await stage.unit(start=False)
    await unit.dispatch("inv-absent")
    await asyncio.sleep(0.1)
    assert await unit.left() == 1
    assert not [each for each in stage.heard.metrics if each.workerName == unit.worker]
    await unit.framework.start()
    assert (await unit.result("inv-absent")).state is State.SUCCEEDED


@row("uds_framework-03")
async def _symlink(stage: Stage) -> None:
    unit = await stage.unit(start=False, serve=False)
    outside = ScriptedFramework(stage.folder, name="outside.sock")
    await outside.start()
    (unit.framework.folder / "framework.sock").symlink_to(stage.folder / "outside.sock")
    await unhealthy(unit, "path_escape")
    assert outside.connections == 0
    await outside.stop()


@row("uds_framework-04")
async def _long_path(stage: Stage) -> None:
    unit = await stage.unit(serve=False)
    folder = str(Path(SOCKET).parent)
    await unhealthy(unit, "config", "107", socket=f"{folder}/{'s' * (199 - len(folder))}")


@row("uds_framework-05")
async def _mode(stage: Stage) -> None:
    unit = await stage.unit(serve=False, mode=0o777)
    await unhealthy(unit, "socket_mode", "0777", "0660", ready_s=0.1)
    assert unit.framework.connections == 0


@row("uds_framework-06")
async def _uid(stage: Stage) -> None:
    unit = await stage.unit(serve=False)
    await unhealthy(unit, "peer_uid", uid=os.geteuid() + 1)
    assert not unit.framework.requests


@row("uds_framework-07")
async def _unhealthy(stage: Stage) -> None:
    unit = await stage.unit(serve=False, health=says(response(b"", status="500 No")))
    await unhealthy(unit, "not healthy within", "500", ready_s=0.2)
    assert len(unit.framework.requests) > 3


@row("uds_framework-11")
async def _no_content(stage: Stage) -> None:
    nothing = says(b"HTTP/1.1 204 No Content\r\n\r\n")
    failed(await answer(stage, nothing), FailureClass.FRAMEWORK_ERROR, "empty")
    failed(await answer(stage, says(response(b""))), FailureClass.FRAMEWORK_ERROR, "empty")


@row("uds_framework-12")
async def _empty_object(stage: Stage) -> None:
    result = await answer(stage, replies(b"{}"))
    assert (result.state, result.statusCode, bytes(result.body)) == (State.SUCCEEDED, 200, b"null")
    assert result.bodyRef is None


@row("uds_framework-13")
async def _status_zero(stage: Stage) -> None:
    result = await answer(stage, replies({"statusCode": 0, "body": [1]}))
    assert (result.state, result.statusCode, bytes(result.body)) == (State.SUCCEEDED, 200, b"[1]")


@row("uds_framework-14")
async def _handler_error(stage: Stage) -> None:
    reply = {"statusCode": 500, "error": "no", "errorType": "ValueError", "traceback": "line 1", "body": {"why": 1}}
    result = await answer(stage, replies(reply))
    failed(result, FailureClass.HANDLER_ERROR, "no", status=500)
    assert (result.errorType, result.traceback, bytes(result.body)) == ("ValueError", "line 1", b'{"why":1}')
    quiet = await answer(stage, replies({"error": "raised", "body": 1}))
    failed(quiet, FailureClass.HANDLER_ERROR, "raised", status=500)


@row("uds_framework-16")
async def _bad_status(stage: Stage) -> None:
    for status in (700, 99, -1):
        failed(await answer(stage, replies({"statusCode": status})), FailureClass.FRAMEWORK_ERROR, "statusCode")
    failed(await answer(stage, replies({"statusCode": "200"})), FailureClass.FRAMEWORK_ERROR, "statusCode")
    broken = says(response(b"it broke", status="503 Broken"))
    failed(await answer(stage, broken), FailureClass.FRAMEWORK_ERROR, "503", "it broke")
    failed(await answer(stage, replies(b"<html>")), FailureClass.FRAMEWORK_ERROR, "contract")


@row("uds_framework-18")
async def _stripped(stage: Stage) -> None:
    given = {"Set-Cookie": "a=b", "Transfer-Encoding": "chunked", "Connection": "close", "X-Kept": "yes"}
    result = await answer(stage, replies({"headers": given}))
    assert (result.state, result.headers) == (State.SUCCEEDED, {"X-Kept": "yes"})


@row("uds_framework-19")
async def _header_break(stage: Stage) -> None:
    for headers in ({"X-A": "b\r\nSet-Cookie: c"}, {"X-A\r\nY": "b"}, {f"X-{n}": "a" for n in range(65)}):
        failed(await answer(stage, replies({"headers": headers})), FailureClass.FRAMEWORK_ERROR, "header")


@row("uds_framework-20")
async def _out_of_line(stage: Stage) -> None:
    most = BOUNDS.inline_bytes_max
    unit = await stage.ready(invoke=replies({"body": "x" * (most - 2)}))
    fits = await unit.invoke("inv-fits")
    assert (fits.bodyRef, len(bytes(fits.body))) == (None, most)
    unit.framework.invoke = replies({"body": "x" * (most - 1)})
    stage.gateway.refuse = [503, 500]
    kept = await unit.invoke("inv-kept")
    assert kept.state is State.SUCCEEDED
    assert kept.bodyRef is not None
    assert kept.bodyRef.bytes == most + 1
    assert stage.gateway.results["inv-kept"] == b'"' + b"x" * (most - 1) + b'"'
    assert stage.gateway.bearers[-1] == f"Bearer {'ab' * 16}"
    assert len(unit.framework.invokes()) == 2


@row("uds_framework-21")
async def _too_large(stage: Stage) -> None:
    result = await answer(stage, replies({"body": "x" * (BOUNDS.result_bytes_max + 1)}))
    failed(result, FailureClass.RESULT_TOO_LARGE, str(BOUNDS.result_bytes_max))
    larger = await answer(stage, replies({"body": "x" * (BOUNDS.reply_bytes_max + 1)}))
    failed(larger, FailureClass.RESULT_TOO_LARGE)


@row("uds_framework-22")
async def _nul(stage: Stage) -> None:
    raw = bytes(range(256)) * 3
    reply = {"contentType": "application/octet-stream", "encoding": "base64", "body": base64.b64encode(raw).decode()}
    result = await answer(stage, replies(reply))
    assert base64.b64decode(msgspec.json.decode(result.body)) == raw
    text = await answer(stage, replies(rb'{"body": "a\u0000b"}'))
    assert bytes(text.body) == rb'"a\u0000b"'
    assert text.bodySHA256 == hashlib.sha256(bytes(text.body)).hexdigest()
    unit = await stage.ready(invoke=replies({**reply, "body": base64.b64encode(raw * 2000).decode()}))
    assert (await unit.invoke("inv-nul")).bodyRef is not None
    assert stage.gateway.results["inv-nul"] == raw * 2000


@row("uds_framework-23")
async def _truncated(stage: Stage) -> None:
    raw = b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"body": 1}'
    failed(await answer(stage, says(raw, close=True)), FailureClass.FRAMEWORK_ERROR, "truncated")


@row("uds_framework-24")
async def _bad_chunk(stage: Stage) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for chunks in (b"zz\r\n{}\r\n0\r\n\r\n", b"-2\r\n{}\r\n", b"1\r\n{}\r\n0\r\n\r\n", b"\r\n\r\n"):
        failed(await answer(stage, says(head + chunks)), FailureClass.FRAMEWORK_ERROR, "chunk")
    both = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    failed(await answer(stage, says(both)), FailureClass.FRAMEWORK_ERROR, "exclude")
    good = await answer(stage, says(head + b'5;x=y\r\n{"bod\r\n5\r\ny":7}\r\n0\r\nA: b\r\n\r\n'))
    assert (good.state, bytes(good.body)) == (State.SUCCEEDED, b"7")


@row("uds_framework-26")
async def _late(stage: Stage) -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        while not any(each.path == "/cancel" for each in unit.framework.requests):
            await asyncio.sleep(0.01)
        writer.write(response(b'{"body": "late"}'))

    before = REGISTRY.get_sample_value("penstock_sidecar_late_answers_total") or 0.0
    unit = await stage.ready(invoke=script)
    result = await unit.invoke("inv-late", timeout_s=0.1)
    assert (result.state, result.statusCode) == (State.EXPIRED, 504)
    assert result.failureClass is FailureClass.FRAMEWORK_TIMEOUT
    await stage.heard.until(lambda: (REGISTRY.get_sample_value("penstock_sidecar_late_answers_total") or 0.0) > before)
    assert any(request.path == "/cancel" for request in unit.framework.requests)
    assert (await unit.invoke("inv-after", timeout_s=5)).state is State.SUCCEEDED
    assert [each.invocationID for each in stage.heard.results].count("inv-late") == 1
    assert not [kill for kill in stage.kills if kill[0] == unit.id]


@row("uds_framework-28")
async def _close_delimited(stage: Stage) -> None:
    raw = b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"body": [28]}'
    result = await answer(stage, says(raw, close=True))
    assert (result.state, bytes(result.body)) == (State.SUCCEEDED, b"[28]")


@row("uds_framework-29")
async def _continue_for_ever(stage: Stage) -> None:
    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.005)

    unit = await stage.ready(invoke=script)
    result = await unit.invoke("inv-continue", timeout_s=0.1)
    assert (result.state, result.failureClass) == (State.EXPIRED, FailureClass.FRAMEWORK_TIMEOUT)
    _, reason = await stage.heard.until(lambda: next((kill for kill in stage.kills if kill[0] == unit.id), None))
    assert "inv-continue" in reason
    unit.end(ExitClass.KILLED)


@row("uds_framework-31")
async def _pipelined(stage: Stage) -> None:
    async def twice(request: Request, writer: asyncio.StreamWriter) -> None:
        name = request.json["invocationID"]
        writer.write(response(msgspec.json.encode({"body": name})) + response(b'{"body": "forged"}'))

    unit = await stage.ready(invoke=twice)
    for name in ("inv-p1", "inv-p2", "inv-p3"):
        assert bytes((await unit.invoke(name)).body) == f'"{name}"'.encode()
    assert unit.framework.connections >= 3
    late: list[asyncio.Task[None]] = []

    async def later(writer: asyncio.StreamWriter) -> None:
        await stage.heard.until(lambda: any(each.invocationID == "inv-p4" for each in stage.heard.results))
        writer.write(response(b'{"body": "forged"}'))

    async def once_more(request: Request, writer: asyncio.StreamWriter) -> None:
        name = request.json["invocationID"]
        writer.write(response(msgspec.json.encode({"body": name})))
        if name == "inv-p4":
            late.append(asyncio.create_task(later(writer)))

    unit.framework.invoke = once_more
    for name in ("inv-p4", "inv-p5"):
        assert bytes((await unit.invoke(name)).body) == f'"{name}"'.encode()
        await asyncio.gather(*late)


@row("uds_framework-32")
async def _killed(stage: Stage) -> None:
    called = asyncio.Event()

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        called.set()
        await asyncio.sleep(60)

    unit = await stage.ready(invoke=script)
    await unit.dispatch("inv-killed")
    await called.wait()
    await unit.framework.stop()
    unit.end(ExitClass.KILLED, "signal 9")
    failed(await unit.result("inv-killed"), FailureClass.WORKER_LOST, "signal 9")


@row("uds_framework-35")
async def _oom(stage: Stage) -> None:
    called = asyncio.Event()

    async def script(request: Request, writer: asyncio.StreamWriter) -> None:
        called.set()
        await asyncio.sleep(60)

    unit = await stage.ready(invoke=script)
    await unit.dispatch("inv-oom")
    await called.wait()
    # The connection stays open: somebody else in the unit holds it, say.
    unit.end(ExitClass.OOM)
    failed(await unit.result("inv-oom"), FailureClass.OOM, str(64 << 20))


@row("uds_framework-36")
async def _loud(stage: Stage) -> None:
    lines = [{"stdout": "x" * 1000} for _ in range(1000)]
    unit = await stage.ready(invoke=frames(*lines, {"reply": {"body": "loud"}}))
    result = await unit.invoke("inv-loud")
    assert bytes(result.body) == b'"loud"'
    said = [item for each in stage.heard.outputs if each.invocationID == "inv-loud" for item in each.items]
    fair = BOUNDS.pace.burst_bytes + BOUNDS.pace.bytes_per_s * (result.durationMs / 1000 + 0.1)
    assert 0 < sum(len(item.text) for item in said) <= fair
    assert [item.text for item in said if item.kind is OutputKind.STDERR] == ["[output was cut: it is too much]"]
    assert [item.seq for item in said] == list(range(len(said)))


@row("uds_framework-37")
async def _long_timeout(stage: Stage) -> None:
    unit = await stage.ready()
    result = await unit.invoke("inv-hour", timeout_s=3600)
    assert result.state is State.SUCCEEDED
    assert unit.framework.invokes()[0].json["timeoutSeconds"] == 3600
