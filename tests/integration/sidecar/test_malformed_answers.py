"""Answers that no framework should give: the handler was called once, the attempt has one typed end, nothing is made
again, and what is told can be read."""

import asyncio
import errno
import os

import msgspec
import pytest

from integration.sidecar.frameworks import Request, Script, replies, response, says
from integration.sidecar.stage import Stage
from penstock.node.sidecar import spool
from penstock.wire.serverless import LOST, FailureClass, State
from penstock.wire.sidecar import ExitClass

_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_FRAMES = "application/x-ndjson"


def _deep(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def _lines(*lines: bytes) -> Script:
    return says(response(b"".join(line + b"\n" for line in lines), content_type=_FRAMES))


ANSWERS: dict[str, Script] = {
    "deep body": replies(b'{"body": ' + _deep(100_000) + b"}"),
    "deep body that this reader could read": replies(b'{"body": ' + _deep(900) + b"}"),
    "deep objects": replies(b'{"body": ' + b'{"a":' * 700 + b"1" + b"}" * 700 + b"}"),
    "deep beside the body": replies(b'{"other": ' + _deep(100_000) + b"}"),
    "deep without an end": replies(b'{"body": ' + b"[" * 100_000),
    "deep in words": says(response(_deep(20_000), status="500 Deep")),
    "body no UTF-8": replies(b'{"body": "\xff\xfe"}'),
    "body no UTF-8 across pieces": replies(b'{"body": "' + b"x" * ((1 << 20) - 2) + b'\xc3"}'),
    "surrogates in UTF-8": replies(b'{"body": "\xed\xa0\x80"}'),
    "error no UTF-8": replies(b'{"error": "\xff"}'),
    "frame no UTF-8": _lines(b'{"stdout": "\xff"}', b'{"reply": {}}'),
    "progress no UTF-8": _lines(b'{"progress": "\xff"}', b'{"reply": {}}'),
    "chunk no UTF-8": _lines(b'{"chunk": "\xff"}', b'{"reply": {}}'),
    "chunk deep": _lines(b'{"chunk": ' + _deep(900) + b"}", b'{"reply": {}}'),
    "call no UTF-8": _lines(b'{"call": {"call": "a", "function": "f", "payload": "\xff"}}', b'{"reply": {}}'),
    "reply in frames no UTF-8": _lines(b'{"reply": {"body": "\xff"}}'),
    "frame no JSON": _lines(b"hello"),
    "frame deep": _lines(b'{"other": ' + _deep(100_000) + b"}"),
    "frames without a reply": says(response(b'{"stdout": "a"}\n', content_type=_FRAMES), close=True),
    "chunk size no number": says(_CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n"),
    "chunk size negative": says(_CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n"),
    "chunk size endless": says(_CHUNKED + b"f" * 300_000),
    "chunk lines without a carriage return": says(_CHUNKED + b"2\n{}\n0\n\n"),
    "chunk cut off": says(_CHUNKED + b'40\r\n{"body": ', close=True),
    "chunks without an end": says(_CHUNKED + b"2\r\n{}\r\n", close=True),
    "trailer endless": says(_CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 20_000),
    "status garbage": says(b"NONSENSE\r\n\r\n"),
    "status cut off": says(b"HTTP/1.1 2", close=True),
    "status too high": says(response(b"{}", status="999 No")),
    "no status": says(b"\r\n\r\n"),
    "head without carriage returns": says(b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}"),
    "head too large": says(b"HTTP/1.1 200 OK\r\n" + b"A: " + b"b" * 200_000 + b"\r\n\r\n{}"),
    "too many headers": says(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000 + b"\r\n{}"),
    "head without an end": says(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5, close=True),
    "header without a colon": says(b"HTTP/1.1 200 OK\r\nhello\r\n\r\n{}"),
    "length too long": says(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"body": 1}', close=True),
    "length too short": says(b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{"body": 1}'),
    "length twice": says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "length no number": says(b"HTTP/1.1 200 OK\r\nContent-Length: +2\r\n\r\n{}"),
    "length of an error too long": says(b"HTTP/1.1 500 No\r\nContent-Length: 100\r\n\r\nwhy", close=True),
    "another protocol": says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"),
    "compressed": says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n{}", close=True),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_a_malformed_answer_ends_its_one_attempt(name: str, stage: Stage) -> None:
    unit = await stage.ready(invoke=ANSWERS[name])
    result = await unit.invoke(f"inv-{unit.number}")
    assert (result.state, result.failureClass) == (State.FAILED, FailureClass.FRAMEWORK_ERROR), result.error
    assert result.statusCode == 502
    assert len(unit.framework.invokes()) == 1
    unit.framework.invoke = replies({"body": "well"})
    assert bytes((await unit.invoke(f"inv-{unit.number}-after")).body) == b'"well"'


async def test_an_answer_that_breaks_off_with_its_process_is_not_made_again(stage: Stage) -> None:
    """The head of a reply says that the handler has ended: whatever becomes of the rest, it has run."""

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"body')
        await writer.drain()
        unit.end(ExitClass.EXITED)
        writer.close()

    unit = await stage.ready(invoke=script)
    result = await unit.invoke("inv-exits")
    assert result.failureClass is FailureClass.FRAMEWORK_ERROR
    assert "truncated" in result.error


async def test_frames_that_break_off_with_their_unit_are_made_again(stage: Stage) -> None:
    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nContent-Length: 100\r\n\r\n{}\n")
        await writer.drain()
        unit.end(ExitClass.KILLED, "signal 9")
        writer.close()

    unit = await stage.ready(invoke=script)
    assert (await unit.invoke("inv-killed")).failureClass in LOST


@pytest.mark.parametrize(
    "body",
    [b'"\\ud83d\\ude00 \xf0\x9f\x98\x80"', _deep(500), b'"' + b"[{" * 2000 + b'"', b"[" + b"{}," * 5000 + b"{}]"],
)
async def test_what_only_looks_malformed_is_a_result(body: bytes, stage: Stage) -> None:
    unit = await stage.ready(invoke=replies(b'{"body": ' + body + b"}"))
    result = await unit.invoke(f"inv-{unit.number}")
    assert (result.state, bytes(result.body)) == (State.SUCCEEDED, body)


async def test_deep_payloads_end_in_a_dead_letter(stage: Stage) -> None:
    unit = await stage.ready()
    await unit.dispatch(f"inv-{unit.number}", payload=msgspec.Raw(_deep(100_000)))
    letter = await stage.heard.until(
        lambda: next((each for subject, each in stage.heard.letters if unit.request in subject), None)
    )
    assert letter.failureClass is FailureClass.MALFORMED_MESSAGE
    assert not unit.framework.invokes()


async def test_without_room_for_an_answer_the_handler_is_not_called_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spool.tempfile, "TemporaryFile", full)
    unit = await stage.ready(invoke=replies({"body": "x" * (2 << 20)}))
    result = await unit.invoke("inv-full")
    assert (result.state, result.failureClass) == (State.FAILED, FailureClass.RESULT_STORE_ERROR)
    assert "No space left" in result.error
    assert len(unit.framework.invokes()) == 1
