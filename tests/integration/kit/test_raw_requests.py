"""Bytes that could be read in two ways: the api's listener, the gateway's and that of nodes refuse the same ones."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock

import pytest
from aiohttp import web

from penstock.kit.asgi import Bridge
from penstock.kit.edge import Edge
from penstock.kit.exchanges import Exchanges
from penstock.kit.listener import listener

GOOD = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
#: What follows would be a request of its own to whoever reads the first one differently.
AFTER = b"GET /second HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
STATUS = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9] ")
REFUSED = {
    "a header line ended by a bare line feed": b"GET / HTTP/1.1\r\nHost: a\nX-A: b\r\n\r\n",
    "a request line ended by a bare line feed": b"GET / HTTP/1.1\nHost: a\r\n\r\n",
    "a head ended by bare line feeds": b"GET / HTTP/1.1\r\nHost: a\n\n",
    "a request line without a version": b"GET /\nHost: a\r\n\r\n",
    "a bare carriage return": b"GET / HTTP/1.1\r\nHost: a\rX-A: b\r\n\r\n",
    "a carriage return in a value": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: b\rc\r\n\r\n",
    "both lengths": POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    "a length with a sign": POST + b"Content-Length: +3\r\n\r\nabc",
    "a length that is no number": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "a folded header": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: b\r\n c\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
    "a header without a colon": b"GET / HTTP/1.1\r\nHost: a\r\nX-A\r\n\r\n",
    "a zero byte in a value": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: b\0c\r\n\r\n",
    "a zero byte in a name": b"GET / HTTP/1.1\r\nHost: a\r\nX\0A: b\r\n\r\n",
    "a header that is too large": b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"b" * (80 << 10) + b"\r\n\r\n",
    "too many headers": b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 500 + b"\r\n",
    "a target that is too long": b"GET /" + b"a" * (80 << 10) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    "chunked inside another coding": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
}


async def _take(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    return web.Response(body=b"ok")


@pytest.fixture(scope="module")
async def ports() -> AsyncIterator[dict[str, int]]:
    """One of each listener."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", _answer)
    runners: dict[str, web.BaseRunner] = {
        "api": web.ServerRunner(listener(Bridge(Edge(_take, Exchanges(AsyncMock()))).handle, idle_s=30, linger_s=1)),
        "gateway": web.ServerRunner(listener(_answer, idle_s=30, linger_s=1, cancels=True)),
        "link": web.AppRunner(app, access_log=None),
    }
    async with AsyncExitStack() as stack:
        found = {}
        for name, runner in runners.items():
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            found[name] = runner.addresses[0][1]
        yield found


async def _said(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(20):
            return await reader.read(-1)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("name", ["api", "gateway", "link"])
async def test_a_plain_request_is_answered(name: str, ports: dict[str, int]) -> None:
    assert (await _said(ports[name], GOOD)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ["api", "gateway", "link"])
async def test_what_could_be_read_in_two_ways_is_refused(name: str, case: str, ports: dict[str, int]) -> None:
    said = await _said(ports[name], REFUSED[case] + AFTER)
    assert STATUS.findall(said) == [said[:13]]
    assert said[8:13] == b" 400 ", said[:200]
    assert b"200 OK" not in said


BAD_CHUNKS = [
    b"zz\r\nab\r\n0\r\n\r\n",
    b"2\nab\n0\n\n",
    b"-2\r\nab\r\n0\r\n\r\n",
    b"2\r\nabc\r\n0\r\n\r\n",
    b"f" * 40 + b"\r\n",
]


@pytest.mark.parametrize("chunks", BAD_CHUNKS)
@pytest.mark.parametrize("name", ["api", "gateway", "link"])
async def test_bad_chunks_never_lead_to_a_second_request(name: str, chunks: bytes, ports: dict[str, int]) -> None:
    said = await _said(ports[name], POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + AFTER)
    assert b"200 OK" not in said
    assert len(STATUS.findall(said)) <= 1
