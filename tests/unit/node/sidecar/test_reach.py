"""Whether the queue is in reach, as a server comes and goes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.embedded.ports import free_port
from penstock.node.sidecar import reach
from penstock.node.sidecar.reach import Pace

_PACE = Pace(look_s=0.01, again_s=0.01, misses=5)


@asynccontextmanager
async def _listening(port: int) -> AsyncIterator[None]:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
    async with server:
        yield


async def _until(told: list[bool], expected: list[bool]) -> None:
    async with asyncio.timeout(20):
        while len(told) < len(expected):
            await asyncio.sleep(0.001)
    assert told == expected


async def test_it_tells_what_it_finds_first_and_each_change() -> None:
    port, told = free_port(), list[bool]()
    watch = asyncio.create_task(reach.watch(f"nats://127.0.0.1:{port}", None, told.append, _PACE))
    await _until(told, [False])
    async with _listening(port):
        await _until(told, [False, True])
    await _until(told, [False, True, False])
    watch.cancel()


async def test_a_server_that_restarts_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True, *[False] * 4, True, *[False] * 5])
    told, over = list[bool](), asyncio.Event()

    async def reaches(*_: object) -> bool:
        found = next(looks, None)
        if found is None:
            over.set()
            await asyncio.Event().wait()
        return bool(found)

    monkeypatch.setattr(reach, "reaches", reaches)
    watch = asyncio.create_task(reach.watch("nats://n", None, told.append, Pace(look_s=0, again_s=0, misses=5)))
    async with asyncio.timeout(20):
        await over.wait()
    assert told == [True, False]
    watch.cancel()


async def test_one_address_of_many_is_enough() -> None:
    away, there = free_port(), free_port()
    async with _listening(there):
        assert await reach.reaches(f"nats://127.0.0.1:{away},nats://127.0.0.1:{there}", None)
        assert not await reach.reaches(f"nats://127.0.0.1:{away}", None)
