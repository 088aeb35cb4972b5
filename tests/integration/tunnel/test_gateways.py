"""Several gateways, tunnels that come and go, and rights that end."""

import asyncio
import json
import ssl
import time
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import WSMsgType, web

from integration.tunnel.stage import Gateway, World, error_of
from penstock.access.sessions import Sessions
from penstock.fleet import pki
from penstock.node.tunnel import NodeTunnel
from penstock.wire.link import Close
from penstock.wire.tunnel import Data, Open, UnitPort


async def slow(request: web.BaseRequest) -> web.StreamResponse:
    """Sends a beginning and then nothing for long."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"begin")
    await asyncio.sleep(60)
    return response


async def hello(request: web.BaseRequest) -> web.Response:
    return web.Response(text=f"hello {len(await request.read())}")


async def get(http: aiohttp.ClientSession, world: World, through: Gateway) -> tuple[int, Any]:
    async with http.get(f"{world.at(through)}/", headers=world.headers) as answer:
        return answer.status, await (answer.json() if answer.status >= 400 else answer.text())


async def test_request_to_another_gateway_is_forwarded(world: World, http: aiohttp.ClientSession) -> None:
    second = await world.add_gateway()
    async with world.serving(hello):
        assert await get(http, world, second) == (200, "hello 0")
        body = b"x" * (1 << 19)
        async with http.post(f"{world.at(second)}/", data=body, headers=world.headers) as answer:
            assert await answer.text() == f"hello {len(body)}"


async def test_commands_and_websockets_are_forwarded(world: World, http: aiohttp.ClientSession) -> None:
    second = await world.add_gateway(only="edge")

    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    async with world.serving(echo), http.ws_connect(f"{world.at(second)}/", headers=world.headers) as socket:
        await socket.send_str("over two gateways")
        assert await socket.receive_str() == "over two gateways"
    async with http.ws_connect(f"{second.url}/ws/exec/{world.allocation_id}", headers=world.headers) as socket:
        await socket.send_json({"argv": ["echo", "hi"]})
        assert await socket.receive_bytes() == b"\1hi\n"
        assert (await socket.receive_json())["code"] == 0


async def test_forwarded_refusals_keep_their_reason(world: World, http: aiohttp.ClientSession) -> None:
    second = await world.add_gateway(only="edge")
    status, body = await get(http, world, second)
    assert (status, error_of(body)) == (502, "access.port_refused")
    await world.disconnect_node()
    status, body = await get(http, world, second)
    assert (status, error_of(body)) == (503, "access.node_unreachable")


async def test_slow_client_of_another_gateway_bounds_what_is_held(world: World, http: aiohttp.ClientSession) -> None:
    second = await world.add_gateway(only="edge")
    written = 0

    async def endless(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            written += 65536

    async with world.serving(endless), http.get(f"{world.at(second)}/", headers=world.headers) as answer:
        seen = -1
        while seen != written:
            seen = written
            await asyncio.sleep(0.3)
        assert 0 < written < 32 << 20
        answer.close()


async def test_gateway_that_holds_the_tunnel_and_dies_is_a_503(world: World, http: aiohttp.ClientSession) -> None:
    second = await world.add_gateway(only="edge")
    async with world.serving(hello):
        assert (await get(http, world, second))[0] == 200
        async with world.database.read() as conn:
            row = await conn.fetchrow("select * from access.tunnels")
        await world.gateways[0].stop()
        async with world.database.transaction() as tx:
            # As after kill -9: nobody took the row away.
            assert row is not None
            await tx.execute("insert into access.tunnels values ($1, $2, $3, $4, $5)", *row.values())
        status, body = await get(http, world, second)
        assert (status, error_of(body)) == (503, "access.node_unreachable")


async def test_tunnel_lost_in_the_middle_breaks_off_and_comes_back(world: World, http: aiohttp.ClientSession) -> None:
    async with world.serving(slow), http.get(f"{world.base}/", headers=world.headers) as answer:
        assert await answer.content.readexactly(5) == b"begin"
        await world.disconnect_node()
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await asyncio.wait_for(answer.read(), 5)
    async with world.serving(hello):
        await world.connect_node()
        assert await get(http, world, world.gateways[0]) == (200, "hello 0")


async def test_tunnel_lost_before_the_answer_is_a_503(world: World, http: aiohttp.ClientSession) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with world.serving_raw(silent):
        asking = asyncio.create_task(get(http, world, world.gateways[0]))
        while not world.units.connects:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        await world.disconnect_node()
        status, body = await asyncio.wait_for(asking, 30)
        assert (status, error_of(body)) == (503, "access.node_unreachable")


async def test_command_is_told_when_its_node_is_lost(world: World, http: aiohttp.ClientSession) -> None:
    url = f"{world.gateways[0].url}/ws/exec/{world.allocation_id}"
    async with http.ws_connect(url, headers=world.headers) as socket:
        await socket.send_json({"argv": ["sleep", "60"]})
        while not world.units.executions:
            await asyncio.sleep(0.02)
        await world.disconnect_node()
        note = json.loads(await socket.receive_str(timeout=30))
        assert (note["type"], note["code"]) == ("error", "access.node_unreachable")
        assert (await socket.receive()).type is WSMsgType.CLOSE
        assert socket.close_code == 1011
    assert await asyncio.wait_for(world.units.executions[0].child.wait(), 30) == -9


async def test_a_request_waits_for_a_node_that_is_on_its_way_back(world: World, http: aiohttp.ClientSession) -> None:
    async with world.serving(hello):
        await world.disconnect_node()
        asked = asyncio.create_task(get(http, world, world.gateways[0]))
        await asyncio.sleep(0.5)
        assert not asked.done(), await asked
        await world.connect_node()
        assert await asked == (200, "hello 0")


async def test_newer_tunnel_supersedes_the_older(world: World, http: aiohttp.ClientSession) -> None:
    # Its own would come back, and supersede in turn.
    await world.disconnect_node()
    assert world.identity is not None
    closed: list[int | None] = []
    async with node_socket(world) as older:
        newer = asyncio.create_task(NodeTunnel(world.identity, world.units).serve_once())
        message = await older.receive(timeout=30)
        closed.append(older.close_code)
        assert message.type is WSMsgType.CLOSE
        async with world.serving(hello):
            assert await get(http, world, world.gateways[0]) == (200, "hello 0")
        newer.cancel()
        await asyncio.gather(newer, return_exceptions=True)
    assert closed == [Close.SUPERSEDED]


async def test_newer_tunnel_on_another_gateway_supersedes_the_older(world: World, http: aiohttp.ClientSession) -> None:
    await world.disconnect_node()
    second = await world.add_gateway(only="link")
    async with node_socket(world) as older, node_socket(world, second):
        await older.receive(timeout=30)
        assert older.close_code == Close.SUPERSEDED


async def test_stopping_gateway_tells_nodes_that_it_restarts(world: World) -> None:
    await world.disconnect_node()
    async with node_socket(world) as socket:
        stopping = asyncio.create_task(world.gateways[0].stop())
        await socket.receive(timeout=30)
        assert socket.close_code == Close.RESTARTING
        await asyncio.wait_for(stopping, 30)


async def test_stopping_gateway_lets_requests_finish(world: World, http: aiohttp.ClientSession) -> None:
    async def takes_a_moment(request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response(text="done")

    async with world.serving(takes_a_moment):
        asking = asyncio.create_task(get(http, world, world.gateways[0]))
        await asyncio.sleep(0.2)
        await world.gateways[0].stop()
        assert await asking == (200, "done")


class node_socket:  # noqa: N801 (used as a context manager)
    """A node's bare tunnel socket, without an agent behind it."""

    def __init__(self, world: World, through: Gateway | None = None) -> None:
        assert world.identity is not None
        self._tls = world.identity.tls()
        self._url = f"wss://127.0.0.1:{(through or world.gateways[0]).settings.link_port}/tunnel"
        self._session = aiohttp.ClientSession()

    async def __aenter__(self) -> aiohttp.ClientWebSocketResponse:
        self._socket = await self._session.ws_connect(self._url, ssl=self._tls)
        await asyncio.sleep(0.2)
        return self._socket

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()
        await self._session.close()


async def test_frames_out_of_order_close_the_tunnel_with_4400(world: World) -> None:
    await world.disconnect_node()
    for message in (
        b"garbage",
        msgspec.msgpack.encode([Data(7, 0, b"x")]),
        msgspec.msgpack.encode([Open(1, UnitPort(unit_id="u", port=1))]),
    ):
        async with node_socket(world) as socket:
            await socket.send_bytes(message)
            await socket.receive(timeout=30)
            assert socket.close_code == Close.MALFORMED
    async with node_socket(world) as socket:
        # The head alone of a message of 2 MB: it is refused before any of it was read.
        socket._writer.transport.write(b"\x82\xff" + (2 << 20).to_bytes(8, "big") + b"mask")
        message = await socket.receive(timeout=30)
        assert (message.type, message.data) == (WSMsgType.CLOSE, Close.TOO_BIG)


async def test_only_our_certificates_may_connect(world: World, tmp_path: Any) -> None:
    other = tmp_path / "other-ca"
    pki.init(other, ["127.0.0.1"])
    address = f"wss://127.0.0.1:{world.gateways[0].settings.link_port}"
    without = ssl.create_default_context(cafile=str(world.folder / "ca.crt"))
    strange = pki.client_context(world.folder / "ca.crt", other / "gateway.crt", other / "gateway.key")
    async with aiohttp.ClientSession() as session:
        for context in (without, strange):
            for path in ("/tunnel", "/peer"):
                with pytest.raises((aiohttp.ClientError, OSError)):
                    await session.ws_connect(address + path, ssl=context)


async def test_nodes_are_not_gateways_and_gateways_are_not_nodes(world: World) -> None:
    assert world.identity is not None
    address = f"wss://127.0.0.1:{world.gateways[0].settings.link_port}"
    cases = [
        (world.identity.tls(), "/peer", Close.IDENTITY_MISMATCH),
        (pki.peer_context(world.folder), "/tunnel", Close.UNAUTHENTICATED),
    ]
    async with aiohttp.ClientSession() as session:
        for context, path, code in cases:
            async with session.ws_connect(address + path, ssl=context) as socket:
                await socket.receive(timeout=30)
                assert socket.close_code == code


async def test_revoked_node_is_out_within_five_seconds(world: World, http: aiohttp.ClientSession) -> None:
    async with world.serving(hello):
        assert (await get(http, world, world.gateways[0]))[0] == 200
        async with world.database.transaction() as tx:
            # Without a hint: the regular check must find it.
            await tx.execute("update fleet.certificates set revoked_at = now()")
        began = time.monotonic()
        while (await get(http, world, world.gateways[0]))[0] == 200:
            assert time.monotonic() - began < 5
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("hinted", [True, False])
async def test_revoked_key_ends_its_exchanges_within_five_seconds(
    world: World, http: aiohttp.ClientSession, *, hinted: bool
) -> None:
    key_id, secret = await world.new_key()
    headers = {"Authorization": f"Bearer {secret}"}
    url = f"{world.gateways[0].url}/ws/exec/{world.allocation_id}"
    async with world.serving(slow), http.get(f"{world.base}/", headers=headers) as answer:
        assert await answer.content.readexactly(5) == b"begin"
        async with http.ws_connect(url, headers=headers) as socket:
            await socket.send_json({"argv": ["sleep", "60"]})
            while not world.units.executions:
                await asyncio.sleep(0.02)
            began = time.monotonic()
            if hinted:
                await world.revoke(key_id)
            else:
                async with world.database.transaction() as tx:
                    await tx.execute("update identity.keys set revoked_at = now() where id = $1", key_id)
            note = json.loads(await socket.receive_str(timeout=30))
            assert (note["code"], (await socket.receive()).data) == ("unauthenticated", 4401)
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await asyncio.wait_for(answer.read(), 10)
            assert time.monotonic() - began < (1 if hinted else 5)
    assert await asyncio.wait_for(world.units.executions[0].child.wait(), 5) == -9


async def test_revoked_session_ends_its_commands_within_five_seconds(world: World, http: aiohttp.ClientSession) -> None:
    session_id, secret = await world.new_session()
    url = f"{world.gateways[0].url}/ws/exec/{world.allocation_id}"
    async with http.ws_connect(url, headers={"Authorization": f"Bearer {secret}"}) as socket:
        await socket.send_json({"argv": ["sleep", "60"]})
        while not world.units.executions:
            await asyncio.sleep(0.02)
        began = time.monotonic()
        await world.end_session(session_id)
        note = json.loads(await socket.receive_str(timeout=30))
        assert (note["code"], (await socket.receive()).data) == ("unauthenticated", 4401)
        assert time.monotonic() - began < 5
    assert await asyncio.wait_for(world.units.executions[0].child.wait(), 30) == -9


@pytest.mark.parametrize("hinted", [True, False])
async def test_released_allocation_ends_its_exchanges_within_five_seconds(
    world: World, http: aiohttp.ClientSession, *, hinted: bool
) -> None:
    async def echo(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await socket.send_str(message.data)
        return socket

    async with world.serving(echo), http.ws_connect(f"{world.base}/", headers=world.headers) as socket:
        await socket.send_str("still here")
        assert await socket.receive_str() == "still here"
        began = time.monotonic()
        await world.set_state("releasing")
        if hinted:
            async with world.database.transaction() as tx:
                tx.hint(f"hint.allocation.{world.allocation_id}")
        ended = await socket.receive(timeout=30)
        assert ended.type in (WSMsgType.CLOSED, WSMsgType.ERROR, WSMsgType.CLOSE)
        assert time.monotonic() - began < (1 if hinted else 5)


async def test_finished_exchanges_are_forgotten(
    world: World, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Sessions] = []
    original = Sessions.begin
    monkeypatch.setattr(Sessions, "begin", lambda self, *given: (seen.append(self), original(self, *given))[1])
    async with world.serving(hello):
        for _ in range(3):
            assert (await get(http, world, world.gateways[0]))[0] == 200
    assert len(seen) == 3
    assert len(seen[0]) == 0
