"""From POST to active with warm stock, as a client sees it, against what it cannot do without: a bare zygote handoff
and two bare commits on the same Postgres, in the same run."""

import asyncio
import statistics
import sys
import time

import asyncpg

from bench.figures import Figure, bound, latency, median_of_three
from bench.stack import Stack, running
from bench.zygote import bare_handoff_s
from penstock import AsyncClient

SAMPLES = 30
FLOOR = 8
_LIMIT_MS = 60.0
_FILL_S = 60.0


def _zygote_ms() -> float:
    return statistics.median(bare_handoff_s(SAMPLES)) * 1000


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
    """One at a time, and the stock is refilled between the rounds."""
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
    """Until the client reads that it is active; a millisecond between the reads leaves the cores to those who work."""
    began = time.perf_counter()
    allocation = await client.allocations.create("g1.1")
    while allocation.state == "provisioning":
        await asyncio.sleep(0.001)
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
        zygote = await median_of_three(lambda: asyncio.to_thread(_zygote_ms))
        print(f"# a bare handoff {zygote:.2f} ms, two bare commits {commits:.2f} ms", file=sys.stderr)
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
