"""WebSockets to a unit's port."""

import asyncio

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from integration.tunnel.stage import World, error_of


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    """Says back what it hears; `bye` closes with a code of its own."""
    socket = web.WebSocketResponse(protocols=("chat.v2",), autoping=False, max_msg_size=0)
    await socket.prepare(request)
    async for message in socket:
        if message.type is WSMsgType.PING:
            await socket.pong(b"unit:" + message.data)
        elif message.type is WSMsgType.TEXT and message.data == "bye":
            await socket.close(code=4321, message=b"see you")
        elif message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    return socket


def vanish(socket: aiohttp.ClientWebSocketResponse) -> None:
    """Break the client's connection without a word."""
    connection = socket._response.connection
    assert connection is not None
    assert connection.transport is not None
    connection.transport.abort()


async def test_messages_subprotocol_and_close_code_pass(world: World, http: aiohttp.ClientSession) -> None:
    async with (
        world.serving(echo),
        http.ws_connect(
            f"{world.base}/chat", headers=world.headers, protocols=("chat.v1", "chat.v2"), compress=15, max_msg_size=0
        ) as socket,
    ):
        assert socket.protocol == "chat.v2"
        await socket.send_str("hello")
        assert (await socket.receive_str()) == "hello"
        big = b"x" * (3 << 20)
        await socket.send_bytes(big)
        assert (await socket.receive_bytes()) == big
        await socket.send_str("bye")
        last = await socket.receive()
        assert (last.type, last.data, last.extra) == (WSMsgType.CLOSE, 4321, "see you")


async def test_pings_are_answered_by_the_unit_itself(world: World, http: aiohttp.ClientSession) -> None:
    async with (
        world.serving(echo),
        http.ws_connect(f"{world.base}/", headers=world.headers, autoping=False) as socket,
    ):
        await socket.ping(b"1")
        answer = await socket.receive()
        assert (answer.type, answer.data) == (WSMsgType.PONG, b"unit:1")


async def test_clients_close_reaches_the_unit(world: World, http: aiohttp.ClientSession) -> None:
    codes: asyncio.Queue[int | None] = asyncio.Queue()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            pass
        codes.put_nowait(socket.close_code)
        return socket

    async with world.serving(handler):
        async with http.ws_connect(f"{world.base}/", headers=world.headers) as socket:
            await socket.close(code=4001)
        assert await asyncio.wait_for(codes.get(), 30) == 4001


async def test_client_that_vanishes_ends_the_units_socket(world: World, http: aiohttp.ClientSession) -> None:
    gone = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            pass
        gone.set()
        return socket

    async with world.serving(handler):
        socket = await http.ws_connect(f"{world.base}/", headers=world.headers)
        vanish(socket)
        await asyncio.wait_for(gone.wait(), 30)


async def test_unit_that_declines_the_upgrade_is_heard(world: World, http: aiohttp.ClientSession) -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=418, text="no")

    async with world.serving(handler):
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await http.ws_connect(f"{world.base}/", headers=world.headers)
        assert caught.value.status == 418


@pytest.mark.parametrize("path", ["u", "exec"])
async def test_other_sites_pages_are_refused_before_the_upgrade(
    world: World, http: aiohttp.ClientSession, path: str
) -> None:
    url = f"{world.base}/" if path == "u" else f"{world.gateways[0].url}/ws/exec/{world.allocation_id}"
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for origin in ("https://evil.example", "null"):
        given = world.headers | upgrade | {"Origin": origin}
        async with world.serving(echo), http.get(url, headers=given) as answer:
            assert answer.status == 403
            assert error_of(await answer.json()) == "access.origin_refused"


async def test_own_and_allowed_origins_pass(world: World, http: aiohttp.ClientSession) -> None:
    edge = await world.add_gateway(allowed_origins="https://console.example", only="edge")
    async with world.serving(echo):
        for origin in (edge.url, "https://console.example"):
            given = world.headers | {"Origin": origin}
            async with http.ws_connect(f"{world.at(edge)}/", headers=given) as socket:
                await socket.send_str("hi")
                assert await socket.receive_str() == "hi"


async def test_slow_reader_stops_the_unit(world: World, http: aiohttp.ClientSession) -> None:
    sent = 0

    async def flood(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        while True:
            await socket.send_bytes(b"x" * 65536)
            sent += 65536

    async with world.serving(flood):
        socket = await http.ws_connect(f"{world.base}/", headers=world.headers)
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.3)
        assert 0 < sent < 32 << 20
        vanish(socket)
