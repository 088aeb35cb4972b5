"""The start of the command line: one command that talks to the api, as a person waits for it."""

import asyncio
import os
import statistics
import sys
import time
import urllib.request

from bench.figures import Figure, bound, fact
from bench.stack import Stack, running

_RUNS = 21
_LIMIT_S = 0.25


async def run() -> list[Figure]:
    """Seconds of `penstock alloc list`, beside a bare interpreter and one request of the same run."""
    with running() as stack:
        key = {"PENSTOCK_API_URL": stack.api, "PENSTOCK_API_KEY": stack.key}
        listing = ["-m", "penstock.command", "alloc", "list"]
        lists = {"json": await _median_s([*listing, "-o", "json"], key), "table": await _median_s(listing, key)}
        bare = await _median_s(["-c", "pass"], {})
        request = await asyncio.to_thread(_request_s, stack)
    return [
        *(bound(f"cli.alloc_list_{name}", value, "s", _LIMIT_S) for name, value in lists.items()),
        fact("cli.bare_python", bare, "s"),
        fact("cli.one_request", request, "s"),
    ]


async def _median_s(arguments: list[str], env: dict[str, str]) -> float:
    """The first run, which compiles, is not counted."""
    samples = [await _seconds(arguments, env) for _ in range(_RUNS + 1)]
    return statistics.median(samples[1:])


async def _seconds(arguments: list[str], env: dict[str, str]) -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env={**os.environ, **env}, stdout=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    return time.perf_counter() - began


def _request_s(stack: Stack) -> float:
    request = urllib.request.Request(
        f"{stack.api}/api/v1/allocations", headers={"Authorization": f"Bearer {stack.key}"}
    )
    samples: list[float] = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        with urllib.request.urlopen(request, timeout=10) as response:
            response.read()
        samples.append(time.perf_counter() - began)
    return statistics.median(samples)
