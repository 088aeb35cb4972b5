"""From no worker at all to the handler's answer, with warm stock and without; beside a bare zygote handoff and a bare
sandboxed interpreter of the same run."""

import asyncio
import statistics
import time

import aiohttp

from bench.figures import Figure, bound, fact
from bench.stack import Stack, running
from bench.zygote import bare_handoff_s
from penstock import AsyncClient
from penstock.wire.rest import FunctionPut

_SAMPLES = 15
_FLOOR = 4
_WAIT_S = 60.0


async def run() -> list[Figure]:
    """Both figures; each sample is a function of its own, so that it begins with nothing."""
    zygote_ms = statistics.median(bare_handoff_s(30)) * 1000
    with running(simulated_gpus=32) as stack:
        async with AsyncClient(stack.api, stack.key) as client:
            without = await _median_ms(stack, client, "without")
            await client.stock.put("g1.1", floor=_FLOOR)
            warm = await _median_ms(stack, client, "stock", stocked=True)
    return [
        bound("coldstart_with_stock_p50", warm, "ms", 100.0),
        bound("coldstart_without_stock_p50", without, "ms", 1000.0),
        fact("coldstart_bare_zygote_p50", zygote_ms, "ms"),
    ]


async def _median_ms(stack: Stack, client: AsyncClient, name: str, *, stocked: bool = False) -> float:
    samples: list[float] = []
    async with aiohttp.ClientSession() as http:
        for number in range(_SAMPLES):
            if stocked:
                await _full(client)
            samples.append(await _one_ms(stack, client, http, f"{name}-{number}"))
    return statistics.median(samples)


async def _one_ms(stack: Stack, client: AsyncClient, http: aiohttp.ClientSession, name: str) -> float:
    await client.functions.put(name, FunctionPut(sku="g1.1"))
    await asyncio.sleep(0.3)
    began = time.perf_counter()
    headers = {"Authorization": f"Bearer {stack.key}"}
    async with http.post(f"{stack.gateway}/f/{name}", json={}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    took = (time.perf_counter() - began) * 1000
    await client.functions.delete(name)
    return took


async def _full(client: AsyncClient) -> None:
    ends = time.monotonic() + _WAIT_S
    while time.monotonic() < ends:
        async for floor in client.stock.list():
            if floor.ready >= floor.floor and not floor.starting:
                return
        await asyncio.sleep(0.1)
    raise TimeoutError("the stock did not fill up")
