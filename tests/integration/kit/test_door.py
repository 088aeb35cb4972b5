"""The door before a TLS listener, with real sockets."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from penstock.fleet import pki
from penstock.kit.door import Door, Rate

PER_S = 40
BURST = 4
WAITING = 20


class Echo(asyncio.Protocol):
    """Says back what it hears."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    pki.init(tmp_path, ["127.0.0.1"])
    return tmp_path


@pytest.fixture
async def door(keys: Path) -> AsyncIterator[Door]:
    rate = Rate(per_s=PER_S, burst=BURST)
    opened = Door(Echo, tls=pki.server_context(keys), rate=rate, waiting_max=WAITING)
    await opened.open("127.0.0.1", 0)
    yield opened
    await opened.close()


async def _connect(door: Door, tls: ssl.SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", door.ports[0], ssl=tls)


async def _echo_s(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    began = time.perf_counter()
    writer.write(b"1")
    assert await reader.readexactly(1) == b"1"
    return time.perf_counter() - began


async def test_a_storm_is_let_in_at_the_rate_and_what_does_not_fit_is_turned_away(door: Door, keys: Path) -> None:
    tls = pki.peer_context(keys)
    established = await _connect(door, tls)
    began = time.perf_counter()
    storm = [asyncio.create_task(_connect(door, tls)) for _ in range(60)]
    slowest = 0.0
    while not all(dialled.done() for dialled in storm):
        slowest = max(slowest, await _echo_s(*established))
        await asyncio.sleep(0.01)
    took_s = time.perf_counter() - began
    outcomes = await asyncio.gather(*storm, return_exceptions=True)
    inside = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert all(isinstance(outcome, tuple | OSError) for outcome in outcomes)
    # Whoever was in the queue got in, at the rate; the test's own slowness can let in a few more.
    assert WAITING <= len(inside) < 60
    assert took_s >= (len(inside) - 2 * BURST) / PER_S
    assert slowest < 1.0
    for _, writer in [established, *inside]:
        writer.close()


async def test_while_it_is_crowded_inside_few_are_let_in(keys: Path) -> None:
    crowded = [True]
    rate = Rate(per_s=1000, burst=100)
    door = Door(Echo, tls=pki.server_context(keys), rate=rate, waiting_max=20, crowded=lambda: crowded[0])
    await door.open("127.0.0.1", 0)
    dialled = [asyncio.create_task(_connect(door, pki.peer_context(keys))) for _ in range(5)]
    done, _ = await asyncio.wait(dialled, timeout=0.5)
    assert not done
    crowded[0] = False
    for _, writer in await asyncio.gather(*dialled):
        writer.close()
    await door.close()


async def test_a_closed_door_lets_nobody_in(keys: Path) -> None:
    door = Door(Echo, tls=pki.server_context(keys), rate=Rate(per_s=1, burst=1), waiting_max=2)
    await door.open("127.0.0.1", 0)
    port = door.ports[0]
    await door.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_a_port_that_is_taken_is_told(door: Door, keys: Path) -> None:
    other = Door(Echo, tls=pki.server_context(keys), rate=Rate(per_s=1, burst=1), waiting_max=2)
    with pytest.raises(OSError, match="in use"):
        await other.open("127.0.0.1", door.ports[0])
