"""From POST to active with warm stock, as a client sees it, against what it cannot do without: a bare zygote that forks
and takes a descriptor over, and two bare commits, in the same run on the same Postgres."""

import array
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time

import asyncpg

from bench.figures import Figure, bound, latency, median_of_three
from bench.stack import Stack, running
from penstock import AsyncClient

SAMPLES = 30
FLOOR = 8
_LIMIT_MS = 60.0
_FILL_S = 60.0

#: Forks for every descriptor that it is sent; the child writes to it.
_ZYGOTE = """
import os, signal, socket, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
door = socket.socket(fileno=int(sys.argv[1]))
while True:
    _, fds, _, _ = socket.recv_fds(door, 1, 1)
    if not fds:
        break
    if os.fork() == 0:
        os.write(fds[0], b"1")
        os._exit(0)
    os.close(fds[0])
"""


def zygote_ms() -> float:
    """From handing a descriptor over to the first byte of the process that was forked for it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _ZYGOTE, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        samples = [_handed_ms(ours) for _ in range(SAMPLES)]
        ours.shutdown(socket.SHUT_RDWR)
    child.wait(10)
    return statistics.median(samples)


def _handed_ms(door: socket.socket) -> float:
    reader, writer = os.pipe()
    began = time.perf_counter()
    door.sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writer]))])
    os.close(writer)
    assert os.read(reader, 1) == b"1"
    took = (time.perf_counter() - began) * 1000
    os.close(reader)
    return took


async def _commits_ms(conn: "asyncpg.Connection[asyncpg.Record]") -> float:
    """Two transactions of one insert each."""
    await conn.execute(
        "create table if not exists public.bench (id bigint generated always as identity, at timestamptz)"
    )
    samples: list[float] = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        for _ in range(2):
            await conn.execute("insert into public.bench (at) values (now())")
        samples.append((time.perf_counter() - began) * 1000)
    return statistics.median(samples)


async def _full(client: AsyncClient) -> None:
    """Wait until the stock is at its floor and nothing starts."""
    ends = time.monotonic() + _FILL_S
    while time.monotonic() < ends:
        async for floor in client.stock.list():
            if floor.ready >= floor.floor and not floor.starting:
                return
        await asyncio.sleep(0.1)
    raise TimeoutError("the stock did not fill up")


async def _active_ms(client: AsyncClient) -> float:
    """One at a time, asked again without a pause until it is active; the stock is refilled between the rounds."""
    samples: list[float] = []
    while len(samples) < SAMPLES:
        await _full(client)
        made = [await _one_ms(client) for _ in range(FLOOR)]
        samples += [took for _, took in made]
        for allocation_id, _ in made:
            await client.allocations.release(allocation_id)
        for allocation_id, _ in made:
            await client.allocations.wait(allocation_id, until=("released",))
    return statistics.median(samples)


async def _one_ms(client: AsyncClient) -> tuple[str, float]:
    began = time.perf_counter()
    allocation = await client.allocations.create("g1.1")
    while allocation.state == "provisioning":
        allocation = await client.allocations.get(allocation.id)
    took = (time.perf_counter() - began) * 1000
    assert allocation.state == "active", allocation
    assert "from warm stock" in [line.reason for line in allocation.timeline], allocation.timeline
    return allocation.id, took


async def _measure(stack: Stack) -> list[Figure]:
    conn = await asyncpg.connect(stack.setting("api", "PENSTOCK_DATABASE_URL"))
    async with AsyncClient(stack.api, stack.key) as client:
        await client.stock.put("g1.1", floor=FLOOR)
        await _full(client)
        commits = await median_of_three(lambda: _commits_ms(conn))
        zygote = statistics.median([await asyncio.to_thread(zygote_ms) for _ in range(3)])
        active = await median_of_three(lambda: _active_ms(client))
        await client.stock.delete("g1.1")
    await conn.close()
    return [
        latency("handoff.post_to_active_p50", active, "ms", zygote + commits, 10.0),
        bound("handoff.post_to_active_p50_absolute", active, "ms", _LIMIT_MS),
    ]


async def run() -> list[Figure]:
    """Latency from stock."""
    with running() as stack:
        return await _measure(stack)
