"""Bodies on their way when their key is revoked: the exchange is cut within five seconds, whichever way it goes."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from .conftest import Api, People, Person, person
from .test_objects import MIB, call, rows

#: More than the buffers of a connection's two ends hold.
BIG = os.urandom(16 * MIB)
PROMISE_S = 5.0


async def revoke(api: Api, doomed: Person) -> None:
    answer = await api.call("DELETE", f"/keys/{doomed.key_id}", headers={"Penstock-Project": doomed.project_id})
    assert answer.status == 204


@asynccontextmanager
async def connection(api: Api, head: str, key: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One whose receive buffer is small."""
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", api.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=1024)
    writer.write(f"{head} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode())
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("pace", ["steady", "silent"])
async def test_an_upload_is_cut(api: Api, people: People, pace: str) -> None:
    doomed = await person(api, people.developer.project_id, "developer")
    async with connection(api, f"PUT /api/v1/objects/cut-{pace}", doomed.key) as (reader, writer):
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n100000\r\n" + b"x" * MIB + b"\r\n")
        async with asyncio.timeout(20):
            while not await rows(api, "select id from storage.blobs where state = 'writing'"):
                await asyncio.sleep(0.02)
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        await revoke(api, doomed)
        deadline = time.monotonic() + PROMISE_S
        while pace == "steady" and not answer.done() and time.monotonic() < deadline:
            writer.write(b"5\r\nhello\r\n")
            await asyncio.sleep(0.05)
        async with asyncio.timeout(deadline - time.monotonic()):
            assert b" 401 " in (await answer).split(b"\r\n", 1)[0]
    assert (await call(api, "GET", f"/cut-{pace}", people.developer.key)).status == 404
    async with asyncio.timeout(20):
        while await rows(api, "select id from storage.blobs where state = 'writing'"):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("pace", ["steady", "silent"])
async def test_a_download_is_cut(api: Api, people: People, pace: str) -> None:
    doomed = await person(api, people.developer.project_id, "developer")
    assert (await call(api, "PUT", "/long", people.developer.key, data=BIG)).status == 200
    async with connection(api, "GET /api/v1/objects/long", doomed.key) as (reader, writer):
        writer.write(b"\r\n")
        assert b" 200 " in (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0]
        await revoke(api, doomed)
        came = 0
        async with asyncio.timeout(PROMISE_S):
            while f'"key_id": "{doomed.key_id}"' not in api.log.read_text():
                came += len(await reader.read(1024)) if pace == "steady" else 0
                await asyncio.sleep(0.05)
        # What was under way in buffers still comes; then the connection is closed, long before the end.
        async with asyncio.timeout(20):
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await reader.readexactly(len(BIG) - came)
    assert (await call(api, "GET", "/long", doomed.key)).status == 401


async def test_a_body_that_trickles_is_not_taken(api: Api, people: People) -> None:
    """It would be taken for eight seconds else, and done as the key allowed when it began."""
    doomed = await person(api, people.developer.project_id, "developer")
    async with connection(api, "POST /api/v1/allocations", doomed.key) as (reader, writer):
        writer.write(b'Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"sku"')
        await asyncio.sleep(0.5)
        await revoke(api, doomed)
        async with asyncio.timeout(PROMISE_S):
            assert b" 401 " in (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n", 1)[0]


async def test_who_keeps_a_key_loses_nothing(api: Api, people: People) -> None:
    """Slow, but allowed: what takes longer than several checks still comes whole."""
    key = people.developer.key
    assert (await call(api, "PUT", "/slow-and-good", key, data=BIG)).status == 200
    async with connection(api, "GET /api/v1/objects/slow-and-good", key) as (reader, writer):
        writer.write(b"\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(2.5)
        async with asyncio.timeout(60):
            assert await reader.readexactly(len(BIG)) == BIG
