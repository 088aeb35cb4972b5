"""A 64 KB exchange with a server in a unit (gateway, tunnel, agent), against the same server reached directly.

The client is aiohttp in a process of its own both times.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from bench.figures import Figure, median_of_three, rate
from bench.stack import running
from penstock import AsyncClient
from penstock.embedded.child import free_port

CONCURRENCY = 16
SECONDS = 4.0
PORT = 8000
_SERVER = Path(__file__).parent / "payload_server.py"


async def _load(url: str, headers: dict[str, str]) -> float:
    """GET in a loop from CONCURRENCY tasks; whole answers a second."""
    done = 0
    deadline = time.perf_counter() + SECONDS

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal done
        while time.perf_counter() < deadline:
            async with session.get(url, headers=headers) as answer:
                body = await answer.read()
                if answer.status != 200 or len(body) != 65536:
                    raise RuntimeError(f"{answer.status} with {len(body)} bytes: {body[:200]!r}")
                done += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENCY)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(ask(session) for _ in range(CONCURRENCY)))
        return done / (time.perf_counter() - began)


async def _load_in_child(url: str, headers: dict[str, str]) -> float:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.tunnel", json.dumps([url, headers]), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    return float(out)


@asynccontextmanager
async def _direct_server() -> AsyncIterator[str]:
    port = free_port()
    child = await asyncio.create_subprocess_exec(sys.executable, _SERVER, str(port))
    await asyncio.sleep(0.5)
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        child.terminate()
        await child.wait()


async def _ready(url: str, headers: dict[str, str]) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(100):
            async with session.get(url, headers=headers) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError("the unit's server does not answer")


async def run() -> list[Figure]:
    """Exchanges per second through the tunnel and directly."""
    with running() as stack:
        async with AsyncClient(stack.api, stack.key) as client:
            allocation = await client.allocations.create(
                "g1.1", command=["python3", "-c", _SERVER.read_text(), str(PORT)], ports=[PORT]
            )
            await client.allocations.wait(allocation.id)
            url = f"{stack.gateway}/u/{allocation.id}/{PORT}/"
            key = {"Authorization": f"Bearer {stack.key}"}
            await _ready(url, key)
            async with _direct_server() as direct_url:
                direct = await median_of_three(lambda: _load_in_child(direct_url, {}))
            tunnelled = await median_of_three(lambda: _load_in_child(url, key))
            await client.allocations.release(allocation.id)
    return [rate("tunnel.http_64k", tunnelled, "requests/s", direct, 0.4)]


if __name__ == "__main__":
    print(asyncio.run(_load(*json.loads(sys.argv[1]))))
