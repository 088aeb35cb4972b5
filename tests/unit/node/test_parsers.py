"""Parsers of a node and its sidecar: whatever comes is read or refused by the parser's own error, at a linear cost."""

import asyncio
import hashlib
import hmac
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parsers import Parser
from penstock.kit.clock import utc_now
from penstock.node import link
from penstock.node.control import Control
from penstock.node.errors import Unlinked
from penstock.node.journal import UnitRecord
from penstock.node.sidecar import framework
from penstock.node.sidecar.errors import BrokenAnswer, LostConnection
from penstock.node.sidecar.http1 import Connection, Head
from penstock.node.sidecar.letters import Letters, Malformed, Unbelievable, Unsupported
from penstock.node.sidecar.roster import Roster
from penstock.node.sidecarlink import SidecarLink
from penstock.node.unit import Unit
from penstock.wire.link import HeartbeatAck, UnitState
from penstock.wire.serverless import CallAnswer, State
from penstock.wire.sidecar import Ended, ExitClass, Has, Keep, Kill, Reaches
from penstock.wire.tasks import Serving
from penstock.wire.unreadable import UNREADABLE

#: What ends a connection between agent and sidecar, and nothing more (`node.packets`).
_PACKETS = (Unlinked, *UNREADABLE)
_ANSWERS = (BrokenAnswer, LostConnection)
_KEY = bytes(32)
_SERVING = Serving(
    worker="w",
    project_id="prj_1",
    function="f",
    request="prj_1_f",
    slots=1,
    socket="s",
    invoke_path="/",
    health_path="/",
    ready_s=1,
    framework=True,
)
_LETTERS = Letters(_SERVING, _KEY)


def _encoded(*frames: msgspec.Struct) -> bytes:
    return b"".join(map(msgspec.msgpack.encode, frames))


def _of_sidecar(data: bytes) -> None:
    known = SidecarLink(cast(Any, None), uid=None, on_kill=lambda *_: None)
    known._receive(data, None)


def _of_agent(data: bytes) -> None:
    roster = Roster(cast(Any, None), frozenset(), cast(Any, None))
    roster._receive(data, None)


def _of_init(data: bytes) -> None:
    """A unit's init is a tenant's word: nothing that it says is raised in the agent."""
    unit = Unit(UnitRecord(unit_id="alc_1", state=UnitState.RUNNING, boot_id=""))

    async def run() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control = Control(
            ours,
            on_exit=unit.classify,  # pyright: ignore[reportArgumentType]
            on_log=unit.output,  # pyright: ignore[reportArgumentType]
            on_dial=os.close,
            on_lost=lambda: None,
        )
        waiting = asyncio.get_running_loop().create_future()
        control._answers["1"] = waiting
        control._dispatch(data, [])
        if waiting.done():
            waiting.exception()
        control.close()
        if waiting.done():
            waiting.exception()
        theirs.close()

    asyncio.run(run())


def _letter(read: Callable[[bytes, str], object], subject: str) -> Callable[[bytes], object]:
    """With the MAC under the worker's key: what a stranger wrote is not read at all."""

    def parse(data: bytes) -> object:
        with pytest.raises(Unbelievable):
            read(data, "sha256=")
        return read(data, "sha256=" + hmac.digest(_KEY, subject.encode() + b"\0" + data, hashlib.sha256).hex())

    return parse


class _Sent:
    """The way to a framework that has sent everything already."""

    def writelines(self, data: object) -> None:
        pass

    async def drain(self) -> None:
        pass


def _exchange(data: bytes) -> None:
    async def run() -> None:
        reader = asyncio.StreamReader(limit=1 << 18)
        reader.feed_data(data)
        reader.feed_eof()
        connection = Connection(reader, cast(Any, _Sent()))
        head = await connection.send("POST", "/x")
        async for _ in connection.body(head):
            pass

    asyncio.run(run())


class _Pieces:
    """A connection that brings these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def body(self, head: Head) -> AsyncIterator[bytes]:
        for start in range(0, len(self._data), 4096):
            yield self._data[start : start + 4096]


_HEAD = Head(200, "application/json", None, chunked=True, stays=True)


def _reply(data: bytes) -> None:
    asyncio.run(framework._read_reply(cast(Any, _Pieces(data)), _HEAD, 1 << 20))


def _frames(data: bytes) -> None:
    async def hear(_: object) -> None:
        pass

    asyncio.run(framework._read_frames(cast(Any, _Pieces(data)), _HEAD, hear, 1 << 20))


_ANSWER = CallAnswer(call="c", invocationID="i", state=State.SUCCEEDED, body=msgspec.Raw(b"1"))
_BINARY = "\x81\x91\xa1a\xdc\xff\xc1"
_JSON = '[{"\\:\xff1,'
_LETTER_ERRORS = (Malformed, Unsupported)
PARSERS = {
    "frames of gateways": Parser(
        link.decode, (Unlinked,), _encoded(HeartbeatAck(server_time=utc_now(), spread_s=1.0)), _BINARY
    ),
    "packets of sidecars": Parser(
        _of_sidecar,
        _PACKETS,
        _encoded(Kill(unit_id="alc_1", reason="slow"), Has(unit_ids=[]), Reaches(queue=True)),
        _BINARY,
    ),
    "packets of agents": Parser(
        _of_agent,
        _PACKETS,
        _encoded(Ended(unit_id="alc_1", exit_class=ExitClass.OOM), Keep(unit_ids=["alc_1"])),
        _BINARY,
    ),
    "logs of init": Parser(_of_init, (), b"log\0stdout\x000\0text\n", "log\0stdout\n9-\xff", 1024),
    "words of init": Parser(_of_init, (), b"hello\0?\0exited\x001\x000\0alc\x001", "hello\0exit9-\xff", 512),
    "answers of init": Parser(_of_init, (), b"err\x001\x002\0no such file", "erok\x001\x009-\xff", 512),
    "dispatches": Parser(_letter(_LETTERS.dispatch, _LETTERS.dispatches), _LETTER_ERRORS, b'{"version": "v1"}', _JSON),
    "controls": Parser(_letter(_LETTERS.control, _LETTERS.controls), _LETTER_ERRORS, b'{"kind": "drain"}', _JSON),
    "answers to calls": Parser(
        _letter(_LETTERS.answer, _LETTERS.answers), _LETTER_ERRORS, msgspec.json.encode(_ANSWER), _JSON
    ),
    "answers of frameworks": Parser(
        _exchange, _ANSWERS, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\n{}", "HTP/1. 20\r\na:\x80", 1024
    ),
    "chunks of frameworks": Parser(
        _exchange,
        _ANSWERS,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "01\r\n;a ",
        1024,
    ),
    "replies": Parser(_reply, _ANSWERS, b'{"statusCode": 200, "body": {"a": 1}}', _JSON, 512),
    "frames of replies": Parser(
        _frames,
        _ANSWERS,
        b'{"output": "x"}\n{"call": {"call": "c"}}\n{"reply": {"statusCode": 200}}\n',
        _JSON + "\n",
        512,
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_long_input_costs_what_its_size_says(name: str) -> None:
    PARSERS[name].assert_linear()


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_input_is_read_or_refused(name: str, data: st.DataObject) -> None:
    PARSERS[name].assert_typed(data)


DEEP = {
    "frames of gateways": b"\x81\xa4type" + b"\x91" * 100_000,
    "packets of sidecars": b"\x81\xa4type" + b"\x91" * 100_000,
    "packets of agents": b"\x81\xa4type" + b"\x91" * 100_000,
    "dispatches": b'{"version": "v1", "x":' + b"[" * 100_000,
    "controls": b'{"x":' + b"[" * 100_000,
    "answers to calls": b'{"body":' + b"[" * 100_000,
    "replies": b'{"body":' + b"[" * 100_000,
    "frames of replies": b'{"reply": {"body":' + b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_input_is_refused(name: str) -> None:
    with pytest.raises(PARSERS[name].refusals):
        PARSERS[name].parse(DEEP[name])


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x81\xa4type\xa1x", _encoded(Keep(unit_ids=[]))])
def test_a_descriptor_with_a_packet_that_is_no_units_is_closed(data: bytes) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    roster = Roster(cast(Any, None), frozenset(), cast(Any, None))
    with suppress(*_PACKETS):
        roster._receive(data, reading)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
