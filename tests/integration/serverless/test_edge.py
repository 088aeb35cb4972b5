"""Functions at the gateway: what callers may send, and what of a handler's answer reaches them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from tests.conftest import Servers
from tests.integration.serverless.stage import Stage, caller, shared

from penstock.embedded.child import free_port
from penstock.kit.caller import Caller
from penstock.kit.errors import PenstockError
from penstock.kit.exchanges import Exchanges
from penstock.serverless.edge import FunctionEdge
from penstock.serverless.following import Followers
from penstock.wire.serverless import WorkerDispatchMessage


class Everybody:
    """Whoever comes may call (the Protocol `Keys`); `reads` says whether they may also look."""

    def __init__(self) -> None:
        self.reads = True

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        more = {"functions.read"} if self.reads else set[str]()
        return replace(caller(), actions=frozenset({"functions.invoke", *more}))


class Gate:
    """A gateway with nothing but functions, and one connection at a time to it."""

    def __init__(self, stage: Stage, keys: Everybody, port: int) -> None:
        self.stage = stage
        self.keys = keys
        self.port = port

    async def send(self, head: bytes, body: bytes = b"") -> tuple[int, bytes]:
        """Status, and all that came."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        length = f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        writer.write(head + b"\r\nHost: x\r\n" + length + body)
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
        return int(answer.split(b" ", 2)[1]), answer


@pytest.fixture(scope="module")
async def gate(servers: Servers) -> AsyncIterator[Gate]:
    async with shared(servers) as stage:
        keys = Everybody()

        async def still(_: Caller) -> bool:
            return True

        followers = Followers(stage.db, still, lambda shown: shown.row)  # pyright: ignore[reportArgumentType]
        exchanges = Exchanges(still)
        edge = FunctionEdge(stage.db, keys, stage.invoker, stage.shelf, followers, None, exchanges)  # pyright: ignore[reportArgumentType]

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await edge.call(request)
            except PenstockError as error:
                return web.Response(status=400, text=f"{error.code} {error.field} {error.detail}")

        runner = web.ServerRunner(web.Server(handle))
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await stage.define(concurrency=4, workers_max=1)
        yield Gate(stage, keys, port)
        await runner.cleanup()


async def test_bytes_that_are_no_text_are_passed_on_as_such(gate: Gate) -> None:
    seen: list[WorkerDispatchMessage] = []

    async def look(dispatch: WorkerDispatchMessage) -> Any:
        seen.append(dispatch)
        return 1

    await gate.stage.call()
    next(iter(gate.stage.workers.values())).handler = look
    status, answer = await gate.send(b"POST /f/f/a%FFb HTTP/1.1\r\nX-Odd: a\xff", b"1")
    assert status == 200, answer
    assert (seen[0].attributes["path"], seen[0].headers["X-Odd"]) == ("/a%FFb", "a�")


async def test_json_that_is_too_deep_is_refused(gate: Gate) -> None:
    status, answer = await gate.send(b"POST /f/f HTTP/1.1", b"[" * 50_000 + b"]" * 50_000)
    assert (status, b"body must be JSON" in answer) == (400, True)


async def test_headers_that_would_break_the_answer_are_left_out(gate: Gate) -> None:
    await gate.stage.call()
    worker = next(iter(gate.stage.workers.values()))

    async def odd(dispatch: WorkerDispatchMessage) -> Any:
        headers = {"X-Fine": "1", "X Space": "2", "X-Bell": "\x07", "": "3", "Transfer-Encoding": "chunked"}
        await worker.result(dispatch, body="text", headers=headers, contentType="text/plain\x01", statusCode=102)
        await asyncio.Event().wait()

    worker.handler = odd
    status, answer = await gate.send(b"POST /f/f HTTP/1.1")
    assert status == 200
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"X-Fine: 1" in head
    assert b"application/octet-stream" in head
    assert not any(each in head for each in (b"X Space", b"X-Bell", b"chunked"))
    assert body == b"text"


async def test_a_stream_that_nobody_may_follow_is_not_begun(gate: Gate) -> None:
    count = "select count(*) from serverless.invocations"
    before = await gate.stage.value(count)
    gate.keys.reads = False
    try:
        status, answer = await gate.send(b"POST /f/f?mode=stream HTTP/1.1")
    finally:
        gate.keys.reads = True
    assert (status, b"permission_denied" in answer) == (400, True), answer
    assert await gate.stage.value(count) == before
