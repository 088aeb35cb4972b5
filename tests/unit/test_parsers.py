"""Parsers of what comes from outside: any input is read or refused by the parser's own error, at a cost that is linear.

Parsers of streams get their input in pieces too. Those of JSON bodies, locks, messages of workers and code archives on
nodes have more tests beside their own modules; those of the node itself are in `node/test_parsers.py`.
"""

import ast
import asyncio
import gzip
import ipaddress
import tarfile
from collections.abc import Callable
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import h11
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costs import assert_linear
from parsers import Parser
from penstock.access import credentials, execution, headers
from penstock.access.errors import BrowserRefused
from penstock.billing.errors import BadSignature
from penstock.billing.providers import signature as provider_signature
from penstock.fleet import frames
from penstock.kit import clients, edge, paging, queries
from penstock.kit.errors import Invalid
from penstock.kit.tunnel import Mux
from penstock.kit.websocket import TunnelSocket, Violation
from penstock.sdk import commands
from penstock.sdk.errors import BadAnswer, SdkError
from penstock.sdk.http1 import Http1
from penstock.sdk.outputs import Outputs
from penstock.sdk.protocol import Answer, Request, decode
from penstock.sdk.sse import Follower
from penstock.sdk.target import Target
from penstock.serverless.errors import BadSchedule
from penstock.serverless.service import validate
from penstock.wire import archives, egress, requirements, signature
from penstock.wire.link import Heartbeat
from penstock.wire.rest import ErrorBody, ScheduleUse
from penstock.wire.tunnel import Abort, Data, Open, UnitPort

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PIECE = 64
LOOPBACK = [ipaddress.ip_network("127.0.0.0/8")]
SECRETS = provider_signature.Secrets(current="whsec_x")


def _schedule(cron: str, timezone: str) -> object:
    return validate.next_time(msgspec.convert({"cron": cron, "timezone": timezone}, ScheduleUse), NOW)


def _provider_header(text: str) -> None:
    provider_signature.verify(b"{}", text, SECRETS, clock=lambda: 0.0)


def _port_credential(text: str) -> None:
    for more in ({}, {"Sec-Fetch-Site": "same-origin", "Referer": text}):
        credentials.for_port({"Authorization": text, **more}, "/u/a/1", upgrade=False)


def _api_head(data: bytes) -> object:
    names = (b"host", b"authorization", b"content-length", b"x-forwarded-for", b"x-correlation-id")
    head = edge.read_head([(name, data) for name in names])
    return edge.rejection(head), edge.bad_target(data.decode("latin-1"), data)


def _websocket(data: bytes) -> None:
    """All at once and in pieces; whatever comes, nothing is raised where asyncio would see it."""

    async def run() -> None:
        for size in (len(data), PIECE):
            socket = TunnelSocket(dialled=False, message_bytes_max=1 << 20)
            socket.adopt(_Transport())
            socket.receive(_Silent())
            rest = data
            while rest:
                buffer = socket.get_buffer(-1)
                taken = min(len(buffer), len(rest), size)
                buffer[:taken] = rest[:taken]
                socket.buffer_updated(taken)
                rest = rest[taken:]
            socket.connection_lost(None)

    asyncio.run(run())


class _Transport(asyncio.Transport):
    """Takes what is written, and keeps nothing."""

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def set_protocol(self, protocol: Any) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    abort = close


class _Silent:
    """A receiver, and a socket, that does nothing with what it gets."""

    full = False

    def message(self, data: memoryview) -> None:
        pass

    def writable(self) -> None:
        pass

    def lost(self) -> None:
        pass

    def receive(self, receiver: object) -> None:
        pass

    def send(self, parts: object, size: int) -> None:
        pass

    def close(self, code: int = 1000, reason: str = "") -> None:
        pass


def _tunnel(data: bytes) -> None:
    async def run() -> None:
        tunnel = Mux(_Silent(), accept=lambda stream, _: stream.abort("cancelled"))  # type: ignore[arg-type]
        tunnel.message(memoryview(data))
        await asyncio.sleep(0)

    asyncio.run(run())


def _in_pieces(make: Callable[[], Callable[[bytes], object]]) -> Callable[[bytes], None]:
    """Feed all at once, and again in pieces."""

    def parse(data: bytes) -> None:
        for size in (len(data) or 1, PIECE):
            feed = make()
            for start in range(0, len(data), size):
                feed(data[start : start + size])

    return parse


def _outputs() -> Callable[[bytes], object]:
    outputs = Outputs("/x")
    return lambda data: [*outputs.feed(data)]


def _http1() -> Callable[[bytes], object]:
    http = Http1(Target.of("http://127.0.0.1:1", None))
    http.begin(Request(method="GET", path="/x"))

    def feed(data: bytes) -> None:
        http.feed(data)
        if http.head() is not None:
            while http.body():
                pass

    return feed


def _archive() -> bytes:
    whole = BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        member = tarfile.TarInfo("a" * 120)
        member.size = 3
        tar.addfile(member, BytesIO(b"abc"))
    return whole.getvalue()


def _unpacked(data: bytes) -> None:
    """As the inside of an archive, so that more than gzip's header is tried."""
    for whole in (data, gzip.compress(data, 1)):
        reader = archives.Reader()
        try:
            reader.feed(whole)
            reader.end()
        except archives.BadArchive as error:
            assert str(error).isascii()  # noqa: PT017


_FRAME = b"\x82\x83\1\2\3\4abc\x89\x80\0\0\0\0\x88\x82\0\0\0\0\3\xe8"
_EVENT = b'id: 1\r\ndata: {"id": "x"}\r\n\r\n: ping\n\n'
_TUNNEL = msgspec.msgpack.encode([Open(1, UnitPort(unit_id="u", port=1)), Data(1, 0, b"x"), Abort(1, "c", "d")])
_HEARTBEAT = msgspec.msgpack.encode(Heartbeat(sent_at=NOW, units=[], gpus=[]))
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: b\r\n\r\n{}"
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
_BAD_HTTP = (h11.RemoteProtocolError, ConnectionResetError, BadAnswer)
_BAD_SCHEDULE = (BadSchedule, msgspec.ValidationError)

PARSERS = {
    "cron": Parser(lambda text: _schedule(text, "UTC"), _BAD_SCHEDULE, "*/5 0-3 1,2 * mon", " *,-/0 9 mon"),
    "time zones": Parser(lambda text: _schedule("0 0 * * *", text), _BAD_SCHEDULE, "Europe/Berlin", "./a\0é"),
    "requirements": Parser(
        requirements.normal, (requirements.BadRequirements,), "a[b]>=1 ; x == '1' # c", "a[,=;#(\n'"
    ),
    "egress rules": Parser(egress.parse, (ValueError,), "*.example.org:80,443", "*.:0-9a,/["),
    "cursors": Parser(paging.decode_cursor, (Invalid,), paging.encode_cursor("iv", 1), "A=-_\xff["),
    "queries": Parser(lambda text: queries.read(text, ("a",)), (Invalid,), "a=1&b=%20", "&=%;+a\ud800", 256),
    "our signatures": Parser(lambda text: signature.verify(b"", text, "s", now=0.0), (), "t=1,v1=" + "0" * 64, "t=1,v"),
    "providers' signatures": Parser(_provider_header, (BadSignature,), "t=1,v1=00", "t=1,v "),
    "credentials": Parser(_port_credential, (BrowserRefused,), "Basic dTpw", "Basic =\xff:/\udcff"),
    "forwarded addresses": Parser(
        lambda data: clients.client_address("127.0.0.1", data, LOOPBACK), (), b"127.0.0.1, ::1", ",1.: 27"
    ),
    "heads of requests": Parser(_api_head, (), b"localhost:80", "a:[].0\xff%", 256),
    "heads of answers": Parser(headers.simple_head, (), _ANSWER[:-6], "\r\na: \x80HTP/1.2"),
    "commands": Parser(execution.read_command, (Invalid,), '{"argv": ["a"], "env": {}}', '{["a:,\\\ud800'),
    "frames of agents": Parser(frames.decode, (frames.Malformed,), _HEARTBEAT, "\x81\x91\xa1a\xdc\xff\xc1"),
    "hellos of agents": Parser(
        frames.decode_hello, (frames.Malformed, frames.UnsupportedVersion), _HEARTBEAT, "\x81\x91\xa1a\xdd\xff"
    ),
    "frames of tunnels": Parser(_tunnel, (Violation,), _TUNNEL, "\x91\xdd\0\x94\xc4\x01\xff\xa1", 256),
    "frames of websockets": Parser(_websocket, (), _FRAME, "\x82\x80\x89\xfe\xff\0\x7f"),
    "events": Parser(_in_pieces(lambda: Follower(None).feed), (BadAnswer,), _EVENT, 'data: \n\r[{"\xff', 256),
    "output": Parser(_in_pieces(_outputs), (BadAnswer,), _EVENT, 'data: \n\r[{"\xff', 256),
    "answers": Parser(
        lambda data: decode(Answer(status=200, headers={}, body=data), ErrorBody),
        (SdkError,),
        b'{"error": {}}',
        '[{"\\:\xff',
    ),
    "ends of commands": Parser(commands.ending, (SdkError,), '{"type": "exit", "code": 0}', '[{"\\:\xff'),
    "answers over HTTP": Parser(_in_pieces(_http1), _BAD_HTTP, _ANSWER, "HTP/1. 20\r\na:\x80", 256),
    "chunks over HTTP": Parser(_in_pieces(_http1), _BAD_HTTP, _CHUNKED, "01\r\n;a ", 256),
    "code archives": Parser(_unpacked, (), _archive(), "\0a0x5\x1f\xff"),
}


@pytest.mark.parametrize("name", PARSERS)
def test_long_input_costs_what_its_size_says(name: str) -> None:
    PARSERS[name].assert_linear()


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_input_is_read_or_refused(name: str, data: st.DataObject) -> None:
    PARSERS[name].assert_typed(data)


@pytest.mark.parametrize("name", ["events", "output"])
def test_a_long_event_in_small_pieces_costs_what_its_size_says(name: str) -> None:
    parser = PARSERS[name]
    sizes = (64 << 10, 256 << 10, 1 << 20)
    assert_linear(parser.parse, parser.long(b"data: ", "a"), sizes=sizes, bytes_per_byte_max=None)


DEEP = {
    "commands": '{"argv": ' + "[" * 100_000,
    "frames of agents": b"\x81\xa4type" + b"\x91" * 100_000,
    "frames of tunnels": b"\x91" * 100_000,
    "events": b'data: {"data":' + b"[" * 100_000 + b"\n\n",
    "output": b'data: {"data":' + b"[" * 100_000 + b"\n\n",
    "answers": b'{"error":' + b'{"a":' * 100_000,
    "ends of commands": '{"type": "exit", "x":' + "[" * 100_000,
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_input_is_refused(name: str) -> None:
    parser = PARSERS[name]
    with pytest.raises(parser.refusals):
        parser.parse(DEEP[name])


def test_whoever_catches_a_decoders_error_catches_all_of_them() -> None:
    """`UNREADABLE`: bytes that are no UTF-8 and values that are nested too deeply have errors of their own."""
    source = Path(archives.__file__).parents[1]
    assert not [
        f"{path.relative_to(source)}:{node.lineno}"
        for path in source.rglob("*.py")
        if "msgspec.DecodeError" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and node.type is not None
        and "msgspec.DecodeError" in ast.unparse(node.type)
    ]
