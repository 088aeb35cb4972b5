"""The api's listener from the wire: framing, connections that go on or end, bounds, and how it stops."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.embedded.child import free_port
from penstock.fleet import pki
from penstock.kit import listener, serving
from penstock.kit.errors import Invalid
from penstock.kit.serving import Listen
from waiting import PATIENCE_S

BIG = bytes(range(256)) * (20 << 12)
GET = b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
App = Callable[[Any, Any, Any], Any]


async def respond(send: Any, status: int, *pieces: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """A response of one piece, or of several."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    for piece in pieces[:-1]:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": pieces[-1]})


async def body_of(receive: Any) -> bytes | None:
    """The whole body, None if it broke off."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message["body"])
        if not message["more_body"]:
            return b"".join(pieces)


class Routes:
    """An application with one route for each kind of response."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.began = asyncio.Event()
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Find the route."""
        self.seen.append(scope)
        route = getattr(self, scope["path"].strip("/").replace("-", "_"), None)
        await (respond(send, 404, b"") if route is None else route(receive, send))

    async def last(self, _: Any, send: Any) -> None:
        await respond(send, 200, b"last")

    async def echo(self, receive: Any, send: Any) -> None:
        body = await body_of(receive)
        await respond(send, 400 if body is None else 200, body or b"")

    async def pieces(self, _: Any, send: Any) -> None:
        await respond(send, 200, b"a", b"", b"bc", b"")

    async def sized(self, _: Any, send: Any) -> None:
        await respond(send, 200, b"a", b"bc", b"", headers=((b"content-length", b"3"),))

    async def short(self, _: Any, send: Any) -> None:
        await respond(send, 200, b"a", b"", headers=((b"content-length", b"3"),))

    async def empty(self, _: Any, send: Any) -> None:
        await respond(send, 204, b"", headers=((b"content-length", b"0"),))

    async def unchanged(self, _: Any, send: Any) -> None:
        await respond(send, 304, b"", headers=((b"etag", b'"x"'),))

    async def forged(self, _: Any, send: Any) -> None:
        await respond(send, 200, b"", headers=((b"location", b"/\r\nset-cookie: a=b"),))

    async def fails_after(self, _: Any, send: Any) -> None:
        await respond(send, 200, b"whole")
        raise ValueError("a bug after the response")

    async def endless(self, _: Any, send: Any) -> None:
        await respond(send, 200, *[bytes(1 << 20)] * 64)

    async def fails(self, _: Any, __: Any) -> None:
        raise ValueError("a bug")

    async def fails_later(self, _: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise ValueError("a bug")

    async def refuses(self, _: Any, send: Any) -> None:
        await respond(send, 413, b"no", headers=((b"connection", b"close"),))

    async def forgets(self, _: Any, __: Any) -> None:
        """No response."""

    async def download(self, _: Any, send: Any) -> None:
        await respond(send, 200, BIG)

    async def slow(self, _: Any, send: Any) -> None:
        self.began.set()
        await self.go_on.wait()
        await respond(send, 200, b"slow")

    async def watches(self, receive: Any, send: Any) -> None:
        """A stream, watched as frameworks do: the end of the response ends the watch too."""
        await body_of(receive)
        watching = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        self.began.set()
        waiting = asyncio.create_task(self.go_on.wait())
        await asyncio.wait([watching, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not watching.done():
            await send({"type": "http.response.body", "body": b"b"})
        assert (await watching)["type"] == "http.disconnect"
        self.left.set()


@asynccontextmanager
async def served(app: App, **listen: str) -> AsyncIterator[int]:
    """The port of a listener for this application."""
    port = free_port()
    task = asyncio.create_task(serving.serve(app, Listen(host="127.0.0.1", port=port, **listen), stopping=lambda: None))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not task.done():
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    await asyncio.sleep(0.01)
                    continue
                writer.close()
                break
        yield port
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def routes() -> Routes:
    """The application."""
    return Routes()


@pytest.fixture
async def port(routes: Routes) -> AsyncIterator[int]:
    """Where it is served."""
    async with served(routes) as found:
        yield found


async def said(port: int, request: bytes) -> bytes:
    """All that the server says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read(-1)
    finally:
        writer.close()


def split(answer: bytes) -> tuple[list[bytes], bytes]:
    """The lines of the head, and the rest."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    return head.lower().split(b"\r\n"), rest


async def test_requests_follow_one_another_on_a_connection(port: int) -> None:
    answer = await said(port, GET % b"/last" + GET % b"/pieces" + GET % b"/unknown" + LAST)
    assert [line for line in answer.split(b"\r\n") if b"HTTP/1.1 " in line] == [
        b"HTTP/1.1 200 OK",
        b"lastHTTP/1.1 200 OK",
        b"HTTP/1.1 404 Not Found",
        b"HTTP/1.1 200 OK",
    ]
    assert answer.count(b"connection: close") == 1


async def test_the_scope_says_what_was_sent(port: int, routes: Routes) -> None:
    await said(port, b"GET /a%2Fb%20%FF?c=%20d HTTP/1.1\r\nHost: a\r\nX-One:  1 \r\nConnection: close\r\n\r\n")
    await said(port, b"GET http://b/c/d?e HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    first, second = routes.seen
    assert (first["path"], first["raw_path"]) == ("/a/b \udcff", b"/a%2Fb%20%FF")
    assert (first["query_string"], first["client"][0], first["scheme"]) == (b"c=%20d", "127.0.0.1", "http")
    assert (b"x-one", b"1") in first["headers"]
    assert (second["path"], second["query_string"]) == ("/c/d", b"e")


async def test_a_body_of_unknown_length_is_chunked(port: int) -> None:
    lines, rest = split(await said(port, GET % b"/pieces" + LAST))
    assert b"transfer-encoding: chunked" in lines
    assert rest.startswith(b"1\r\na\r\n2\r\nbc\r\n0\r\n\r\nHTTP/1.1 200 ")


async def test_a_client_of_http_1_0_is_told_the_end_by_the_connections(port: int) -> None:
    lines, rest = split(await said(port, b"GET /pieces HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"))
    assert b"connection: close" in lines
    assert rest == b"abc"
    assert split(await said(port, b"GET /last HTTP/1.0\r\nHost: a\r\n\r\n"))[1] == b"last"
    kept = b"GET /last HTTP/1.0\r\nHost: a\r\nConnection: keep-alive\r\n\r\n"
    assert (await said(port, kept + LAST)).count(b" 200 OK") == 2


async def test_an_announced_length_is_kept(port: int) -> None:
    lines, rest = split(await said(port, GET % b"/sized" + LAST))
    assert b"content-length: 3" in lines
    assert rest.startswith(b"abcHTTP/1.1 200 ")


async def test_a_body_that_is_too_short_ends_the_connection(port: int) -> None:
    assert split(await said(port, GET % b"/short" + LAST))[1] == b"a"


@pytest.mark.parametrize(
    ("request_line", "status", "says"),
    [
        (b"HEAD /sized", b"http/1.1 200 ok", b"content-length: 3"),
        (b"HEAD /pieces", b"http/1.1 200 ok", b"server: penstock"),
        (b"GET /empty", b"http/1.1 204 no content", b"server: penstock"),
        (b"GET /unchanged", b"http/1.1 304 not modified", b'etag: "x"'),
    ],
)
async def test_some_responses_have_no_body(port: int, request_line: bytes, status: bytes, says: bytes) -> None:
    lines, rest = split(await said(port, request_line + b" HTTP/1.1\r\nHost: a\r\n\r\n" + LAST))
    assert (lines[0], says in lines) == (status, True)
    assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
    assert rest.endswith(b"\r\n\r\nlast")
    if b"204" in status:
        assert not any(line.startswith(b"content-length") for line in lines)


async def test_large_bodies_go_both_ways(port: int) -> None:
    request = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BIG)
    assert split(await said(port, request + BIG))[1] == BIG
    assert split(await said(port, GET % b"/download" + LAST))[1][: len(BIG)] == BIG


async def test_a_connection_goes_on_after_a_large_body(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for path in (b"/echo", b"/last", b"/echo"):
        writer.write(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (path, 1 << 20))
        writer.write(bytes(1 << 20))
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        await asyncio.sleep(0.3)
    writer.write(LAST)
    assert (await reader.read(-1)).endswith(b"last")
    writer.close()


async def test_a_client_that_waits_with_its_body_is_told_to_go_on_when_it_is_wanted(port: int) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head % b"/echo")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"ab" + LAST)
    assert (await reader.read(-1)).count(b"HTTP/1.1 200 OK") == 2
    writer.close()
    refused = await said(port, head % b"/last")
    assert b"100 Continue" not in refused
    assert b"connection: close" in split(refused)[0]


async def test_an_answer_leaves_before_the_body_has_come(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /refuses HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n" + b"x" * 100_000)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
    writer.write(LAST)
    async with asyncio.timeout(PATIENCE_S):
        assert b"HTTP/1.1" not in await reader.read(-1)
    writer.close()


@pytest.mark.parametrize("path", [b"/fails", b"/forgets", b"/forged"])
async def test_a_bug_is_answered_and_ends_the_connection(port: int, path: bytes) -> None:
    lines, rest = split(await said(port, GET % path + LAST))
    assert lines[0] == b"http/1.1 500 internal server error"
    assert b"set-cookie: a=b" not in lines
    assert b'"internal"' in rest
    assert b"HTTP/1.1" not in rest


async def test_a_bug_in_the_middle_of_a_response_breaks_it_off(port: int) -> None:
    assert split(await said(port, GET % b"/fails_later" + LAST))[1] == b"1\r\na\r\n"


async def test_an_application_sees_its_client_leave(port: int, routes: Routes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET % b"/watches")
    async with asyncio.timeout(PATIENCE_S):
        await routes.began.wait()
        writer.close()
        await routes.left.wait()


async def test_the_end_of_a_response_ends_the_watch_for_its_client(port: int, routes: Routes) -> None:
    routes.go_on.set()
    answer = await said(port, GET % b"/watches" + LAST)
    assert b"1\r\na\r\n1\r\nb\r\n0\r\n\r\nHTTP/1.1 200 OK" in answer
    assert routes.left.is_set()


@pytest.mark.parametrize("path", [b"/echo", b"/last"])
async def test_a_malformed_body_ends_the_connection_without_an_alarm(
    port: int, path: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n" % path
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    await asyncio.sleep(0.05)
    writer.write(b"zz\r\n" + LAST)
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read(-1)
    writer.close()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_request_for_another_protocol_is_the_last(port: int) -> None:
    request = b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n"
    for protocol in (b"websocket", b"h2c"):
        assert (await said(port, request % protocol + LAST)).count(b"HTTP/1.1 200 OK") == 1


async def test_a_slow_head_ends_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.3)
    assert await said(port, b"GET /last HTTP/1.1\r\nHost: ") == b""
    reader, writer = await held(port)
    writer.write(b"GET /la")
    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read(-1) == b""
    writer.close()


async def test_a_head_in_pieces_is_taken(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for start in range(0, len(LAST), 7):
        writer.write(LAST[start : start + 7])
        await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.read(-1)).endswith(b"last")
    writer.close()


async def test_a_head_that_is_too_large_in_all_is_refused(port: int) -> None:
    fields = b"".join(b"X-%d: %s\r\n" % (number, b"b" * 8192) for number in range(9))
    lines, _ = split(await said(port, b"GET /last HTTP/1.1\r\nHost: a\r\n" + fields))
    assert lines[0] == b"http/1.1 431 request header fields too large"


async def held(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that was answered and goes on."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(GET % b"/last")
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                await reader.readuntil(b"last")
                return reader, writer
            writer.close()


async def test_frames_of_a_websocket_are_no_head() -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data)
        return socket

    runner = web.ServerRunner(listener.listener(echo, idle_s=30, linger_s=1, cancels=True))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
        for _ in range(8):
            await socket.send_bytes(bytes(32 << 10))
            assert await socket.receive_bytes(timeout=PATIENCE_S) == bytes(32 << 10)
    await runner.cleanup()


async def test_connections_beyond_the_bound_are_ended(monkeypatch: pytest.MonkeyPatch, routes: Routes) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS_MAX", 2)
    async with served(routes) as port:
        writers = [(await held(port))[1] for _ in range(2)]
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read(-1) == b""
        writers[0].close()
        writers += [writer, (await held(port))[1]]
        for writer in writers:
            writer.close()


async def test_a_stop_lets_requests_finish_and_ends_idle_connections(routes: Routes) -> None:
    async with served(routes) as port:
        idle, waiting = await held(port)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"/slow")
        await routes.began.wait()
        asyncio.get_running_loop().call_later(0.5, routes.go_on.set)
    assert (await reader.read(-1)).endswith(b"slow")
    assert await idle.read(-1) == b""
    for each in (waiting, writer):
        each.close()


async def test_a_stop_does_not_wait_for_ever(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_STOP_GRACE_S", 0.3)
    async with served(routes) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"/slow")
        await routes.began.wait()
    writer.close()
    routes.go_on.set()


async def test_a_stop_reads_the_body_of_a_request_under_way(routes: Routes) -> None:
    async with served(routes) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n01234")
        async with asyncio.timeout(PATIENCE_S):
            while not routes.seen:
                await asyncio.sleep(0.01)

        async def rest() -> bytes:
            await asyncio.sleep(0.3)
            writer.write(b"56789")
            return await reader.read()

        answered = asyncio.create_task(rest())
        await asyncio.sleep(0.1)
    async with asyncio.timeout(PATIENCE_S):
        answer = await answered
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"0123456789")


async def test_a_client_that_reads_nothing_is_ended(routes: Routes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_STALL_S", 0.3)
    async with served(routes) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 10)
        writer.write(GET % b"/endless")
        await asyncio.sleep(2)
        async with asyncio.timeout(PATIENCE_S):
            with suppress(ConnectionError):
                received = len(await reader.read())
                assert received < 64 << 20
        writer.close()


async def test_a_bug_after_a_whole_response_adds_no_second_one(port: int) -> None:
    answer = await said(port, GET % b"/fails-after")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_the_listener_speaks_tls_and_only_http_1(routes: Routes, tmp_path: Path) -> None:
    pki.init(tmp_path, ["127.0.0.1"])
    files = {"tls_cert": str(tmp_path / "gateway.crt"), "tls_key": str(tmp_path / "gateway.key")}
    async with served(routes, **files) as port:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
        context.set_alpn_protocols(["h2", "http/1.1"])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(LAST)
        assert (await reader.read(-1)).endswith(b"last")
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() in (None, "http/1.1")
        writer.close()
    assert routes.seen[-1]["scheme"] == "https"


async def test_a_certificate_that_cannot_be_used_is_named_at_the_start(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no certificate")
    with pytest.raises(Invalid, match="tls_cert"):
        serving.check(
            Listen(
                host="127.0.0.1",
                port=free_port(),
                tls_cert=str(tmp_path / "cert.pem"),
                tls_key=str(tmp_path / "key.pem"),
            )
        )
