"""Calls of functions at a real gateway: how long a caller waits, and what becomes of one whose key is revoked."""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import pytest

from integration.serverless.stage import Stage
from integration.tunnel.stage import World, error_of
from penstock.flows.objects import ObjectBytes, open_objects
from penstock.kit.bus import Bus
from waiting import attempts

PROMISE_S = 5.0
MIB = 1 << 20
#: More than the buffers of a connection's two ends hold.
LARGE = os.urandom(16 * MIB)


@pytest.fixture
async def url(world: World, nats_bus: Bus) -> str:
    """Of a function without workers: nothing of it ever ends by itself."""
    await Stage(world.database, nats_bus).define("waits")
    return f"{world.gateways[0].url}/f/waits"


async def state_of(world: World, invocation_id: str) -> str:
    async with world.database.read() as conn:
        return await conn.fetchval("select state from serverless.invocations where id = $1", invocation_id) or ""


async def until_taken(world: World, invocation_id: str) -> None:
    async for _ in attempts():
        if await state_of(world, invocation_id):
            return
    raise AssertionError("the invocation was not accepted")


async def test_a_call_of_a_revoked_key_ends_within_five_seconds(
    world: World, http: aiohttp.ClientSession, url: str
) -> None:
    key_id, secret = await world.new_key()
    headers = {"Authorization": f"Bearer {secret}", "Penstock-Invocation-Id": "in-flight"}

    async def call() -> tuple[int, str]:
        async with http.post(url, json={}, headers=headers) as answer:
            return answer.status, error_of(await answer.json())

    waiting = asyncio.create_task(call())
    await until_taken(world, "in-flight")
    assert not waiting.done()
    await world.revoke(key_id)
    async with asyncio.timeout(PROMISE_S):
        assert await waiting == (401, "unauthenticated")
    assert await state_of(world, "in-flight") == "queued"
    headers["Penstock-Invocation-Id"] = "too-late"
    assert await call() == (401, "unauthenticated")
    assert await state_of(world, "too-late") == ""


async def test_the_payload_of_a_revoked_key_is_not_waited_for(world: World, url: str) -> None:
    key_id, secret = await world.new_key()
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gateways[0].settings.port)
    head = f"POST /f/waits HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\nContent-Length: 100\r\n\r\n"
    writer.write(head.encode() + b'{"a":')
    await asyncio.sleep(0.5)
    await world.revoke(key_id)
    async with asyncio.timeout(PROMISE_S):
        assert b" 401 " in await reader.readline()
    writer.close()
    async with world.database.read() as conn:
        assert await conn.fetchval("select count(*) from serverless.invocations") == 0


async def large_result(world: World, http: aiohttp.ClientSession, url: str) -> dict[str, str]:
    """The headers of a call whose answer is there, and large."""
    headers = {**world.headers, "Penstock-Invocation-Id": "large", "Penstock-Wait": "0"}
    async with http.post(url, json={}, headers=headers) as answer:
        assert answer.status == 202

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(LARGE), MIB):
            yield LARGE[start : start + MIB]

    bytes_ = ObjectBytes(open_objects(world.database, world.gateways[0].settings))
    kept = await bytes_.keep("prj_default", "invocations/large/result-1", pieces(), bytes_max=len(LARGE))
    async with world.database.transaction() as tx:
        await tx.execute(
            "update serverless.invocations set waiting = false, state = 'succeeded', finished_at = clock_timestamp(),"
            " result_ref = $1, result_type = 'application/octet-stream' where id = 'large'",
            {"key": kept.key, "bytes": kept.bytes, "sha256": kept.sha256},
        )
    return {"Penstock-Invocation-Id": "large"}


async def test_a_large_result_of_a_revoked_key_is_cut(
    world: World, http: aiohttp.ClientSession, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = await large_result(world, http, url)
    async with http.post(url, json={}, headers={**world.headers, **asked}) as answer:
        assert (answer.status, await answer.read() == LARGE) == (200, True)
    key_id, secret = await world.new_key()
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", world.gateways[0].settings.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    lines = {"Host": "x", "Authorization": f"Bearer {secret}", "Content-Length": "2", **asked}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    writer.write(f"POST /f/waits HTTP/1.1\r\n{head}\r\n{{}}".encode())
    assert b" 200 " in (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0]
    await world.revoke(key_id)
    async with asyncio.timeout(PROMISE_S):
        while key_id not in capsys.readouterr().out:
            await asyncio.sleep(0.05)
    # What was under way in buffers still comes; then the connection is closed, without another answer in the middle.
    received = bytearray()
    with suppress(ConnectionResetError):
        while piece := await reader.read(1 << 16):
            received += piece
    writer.close()
    assert len(received) < len(LARGE)
    assert LARGE.startswith(received)


async def test_a_caller_waits_as_long_as_it_says(world: World, http: aiohttp.ClientSession, url: str) -> None:
    for wait in ("0", "0.5"):
        began = time.monotonic()
        async with http.post(url, json={}, headers={**world.headers, "Penstock-Wait": wait}) as answer:
            told = await answer.json()
        assert float(wait) <= time.monotonic() - began < PROMISE_S
        assert (answer.status, answer.headers["Penstock-State"], told["state"]) == (202, "queued", "queued")
        assert answer.headers["Location"].endswith(told["invocationID"])
        assert await state_of(world, told["invocationID"]) == "queued"
    for wait in ("", "-1", "soon", "nan", "1e9"):
        async with http.post(url, json={}, headers={**world.headers, "Penstock-Wait": wait}) as answer:
            assert (answer.status, (await answer.json())["error"]["field"]) == (400, "Penstock-Wait"), wait


async def test_the_wait_ends_with_the_work(world: World, http: aiohttp.ClientSession, url: str) -> None:
    """The longest wait is only a bound: a call that ends is answered at once."""
    headers = {**world.headers, "Penstock-Wait": "50", "Penstock-Invocation-Id": "ends"}
    waiting = asyncio.create_task(http.post(url, json={}, headers=headers))
    await until_taken(world, "ends")
    async with world.database.transaction() as tx:
        await tx.execute(
            "update serverless.invocations set waiting = false, state = 'succeeded', finished_at = clock_timestamp(),"
            " result = '7', result_type = 'application/json' where id = 'ends'"
        )
    async with asyncio.timeout(PROMISE_S), await waiting as answer:
        assert (answer.status, json.loads(await answer.read())) == (200, 7)
