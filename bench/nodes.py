"""What a gateway costs with 100, 300 and 1,000 agents that keep links and tunnels to it, and how fast a task reaches
them; then the gateway is killed under load, and all must come back with no task lost.

The agents are `penstock sim`'s, in this process: the clock that dispatches is the clock that receives. The gateway is
judged by the kernel's own count of its CPU time and memory.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench.figures import Figure, bound, none, percentile
from bench.stack import Stack, running
from penstock import AsyncClient
from penstock.fleet.pki import TaskSigner
from penstock.fleet.tasks import Tasks
from penstock.kit import bus, db, process, telemetry
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.node.identity import Identity
from penstock.processes.sim import Enroller, Fleet, Wanted
from penstock.wire.tasks import HEALTH_PROBE, HealthProbe, SignedTask, TaskBody

SIZES = (100, 300, 1000)
GPUS = 8
SETTLE_S = 8.0
CPU_S = 20.0
TASKS = 800
TASKS_PER_S = 100.0
CONNECT_S = 60.0
BACK_S = 30.0
TASK_EXPIRES_S = 120.0
CORES_MAX = 0.5
MEMORY_MB_MAX = 400.0
TASK_P99_MS_MAX = 150.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Watch:
    """When tasks were dispatched, and when they first arrived."""

    sent: dict[str, float] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)

    def arrive(self, signed: SignedTask) -> None:
        """A frame brought it."""
        task_id = msgspec.msgpack.decode(signed.body, type=TaskBody).task_id
        self.arrived.setdefault(task_id, time.perf_counter())

    def latencies_ms(self, task_ids: list[str]) -> list[float]:
        """From the commit to the arrival."""
        return [(self.arrived[task_id] - self.sent[task_id]) * 1000 for task_id in task_ids if task_id in self.arrived]


class Dispatcher:
    """Asks nodes whether they are well."""

    def __init__(self, database: Database, signer: TaskSigner, watch: Watch) -> None:
        self._database = database
        self._tasks = Tasks(signer)
        self._watch = watch

    async def dispatch(self, node_id: str) -> str:
        """One task. The clock is read before the commit, so what is measured includes it."""
        async with self._database.transaction() as tx:
            task_id = await self._tasks.dispatch(
                tx,
                node_id=node_id,
                type=HEALTH_PROBE,
                allocation_id=None,
                fence=0,
                params=HealthProbe(),
                dedupe_key=new_id("bch"),
                expires_s=TASK_EXPIRES_S,
            )
            self._watch.sent[task_id] = time.perf_counter()
        return task_id

    async def many(self, node_ids: list[str], count: int) -> list[str]:
        """So many tasks at a steady rate, round robin."""
        began, made = time.perf_counter(), list[asyncio.Task[str]]()
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / TASKS_PER_S - time.perf_counter()))
            made.append(asyncio.create_task(self.dispatch(node_ids[number * 37 % len(node_ids)])))
        return list(await asyncio.gather(*made))

    async def until_ended(self, task_ids: list[str], *, timeout_s: float) -> list[str]:
        """Wait for all of them; those that did not succeed."""
        ends_at = time.monotonic() + timeout_s
        while True:
            async with self._database.read() as conn:
                rows = await conn.fetch(
                    "select id from fleet.tasks where id = any($1) and state = 'succeeded'", task_ids
                )
            if len(rows) == len(task_ids) or time.monotonic() > ends_at:
                return list(set(task_ids) - {row["id"] for row in rows})
            await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Usage:
    """What the gateway has used."""

    cpu_s: float
    rss_mb: float
    at: float


def _gateway_pid(stack: Stack) -> int:
    status = json.loads((stack.data / "status.json").read_text())
    return next(entry["pid"] or 0 for entry in status["processes"] if entry["name"] == "gateway")


def _usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    rss_kb = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return Usage((int(fields[11]) + int(fields[12])) / _CLOCK_TICKS, rss_kb / 1024, time.monotonic())


async def _cores(pid: int) -> float:
    """How much of a core the gateway needs."""
    before = _usage(pid)
    await asyncio.sleep(CPU_S)
    after = _usage(pid)
    return (after.cpu_s - before.cpu_s) / (after.at - before.at)


async def _connected(fleets: list[Fleet], *, timeout_s: float) -> float:
    """Until all links stand; the seconds it took."""
    began = time.monotonic()
    while not all(node.link.standing for fleet in fleets for node in fleet.nodes):
        if time.monotonic() - began > timeout_s:
            return float("inf")
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@asynccontextmanager
async def _dispatcher(stack: Stack, watch: Watch) -> AsyncIterator[Dispatcher]:
    nats_url = stack.setting("gateway", "PENSTOCK_NATS_URL")
    database_url = stack.setting("gateway", "PENSTOCK_DATABASE_URL")
    signer = TaskSigner.load(Path(stack.setting("gateway", "PENSTOCK_PKI_DIR")))
    async with bus.connect(nats_url, name="bench") as hints, db.connect(database_url, hints.hint) as database:
        yield Dispatcher(database, signer, watch)


async def _measure(stack: Stack, identities: list[Identity]) -> list[Figure]:
    watch, fleets, runs = Watch(), list[Fleet](), list[asyncio.Task[None]]()
    wanted = Wanted(nodes=SIZES[-1], gpus=GPUS, task_s=0.01, tunnels=True)
    figures: list[Figure] = []
    try:
        async with _dispatcher(stack, watch) as dispatcher:
            idle = await _footprint(stack)
            for size in SIZES:
                fleets.append(Fleet(identities[sum(len(fleet.nodes) for fleet in fleets) : size], wanted, watch.arrive))
                runs.append(asyncio.create_task(fleets[-1].run()))
                await _connected(fleets, timeout_s=CONNECT_S)
                await asyncio.sleep(SETTLE_S)
                figures += _costs(size, idle, await _footprint(stack))
                figures += await _latency(dispatcher, watch, fleets, size)
            figures += await _killed(stack, dispatcher, fleets)
    finally:
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    return figures


async def _footprint(stack: Stack) -> tuple[float, float]:
    """Cores and megabytes of the gateway."""
    pid = _gateway_pid(stack)
    return await _cores(pid), _usage(pid).rss_mb


def _costs(size: int, idle: tuple[float, float], now: tuple[float, float]) -> list[Figure]:
    (idle_cores, idle_mb), (cores, rss_mb) = idle, now
    return [
        bound(f"nodes.gateway_cpu_at_{size}", cores, "cores", CORES_MAX),
        bound(f"nodes.gateway_memory_at_{size}", rss_mb, "MB", MEMORY_MB_MAX),
        bound(f"nodes.cpu_per_agent_at_{size}", (cores - idle_cores) / size * 1e6, "µs/s", CORES_MAX / SIZES[-1] * 1e6),
        bound(f"nodes.memory_per_agent_at_{size}", (rss_mb - idle_mb) / size * 1024, "kB", MEMORY_MB_MAX * 1.024),
    ]


def _node_ids(fleets: list[Fleet]) -> list[str]:
    return [node.who.node_id for fleet in fleets for node in fleet.nodes]


async def _latency(dispatcher: Dispatcher, watch: Watch, fleets: list[Fleet], size: int) -> list[Figure]:
    task_ids = await dispatcher.many(_node_ids(fleets), TASKS)
    await dispatcher.until_ended(task_ids, timeout_s=BACK_S)
    samples = watch.latencies_ms(task_ids)
    return [
        bound(f"nodes.task_p50_at_{size}", percentile(samples, 0.5), "ms", TASK_P99_MS_MAX),
        bound(f"nodes.task_p99_at_{size}", percentile(samples, 0.99), "ms", TASK_P99_MS_MAX),
        none(f"nodes.tasks_not_arrived_at_{size}", TASKS - len(samples), f"of {TASKS}"),
    ]


async def _killed(stack: Stack, dispatcher: Dispatcher, fleets: list[Fleet]) -> list[Figure]:
    """Tasks are dispatched before, while and after the gateway is away."""
    done_before = fleets[0].summary().tasks
    dispatching = asyncio.create_task(dispatcher.many(_node_ids(fleets), TASKS))
    await asyncio.sleep(TASKS / TASKS_PER_S / 4)
    os.kill(_gateway_pid(stack), signal.SIGKILL)
    killed_at = time.monotonic()
    while any(node.link.standing for fleet in fleets for node in fleet.nodes):
        await asyncio.sleep(0.01)
    await _connected(fleets, timeout_s=2 * BACK_S)
    back_s = time.monotonic() - killed_at
    lost = await dispatcher.until_ended(await dispatching, timeout_s=TASK_EXPIRES_S)
    done = fleets[0].summary().tasks - done_before
    return [
        bound(f"nodes.all_back_after_kill_at_{SIZES[-1]}", back_s, "s", BACK_S),
        none("nodes.tasks_lost_by_kill", len(lost), f"of {TASKS}"),
        none("nodes.tasks_done_twice", max(0, done - TASKS), f"of {TASKS}"),
    ]


async def run() -> list[Figure]:
    """The gateway's cost, tasks' latency, and the return after a kill."""
    telemetry.configure("bench", level="error", log_format="text")
    process.allow_many_files()
    with running() as stack, tempfile.TemporaryDirectory(prefix="penstock-bench-sim-") as folder:
        async with AsyncClient(stack.api, stack.key) as client:
            enroller = Enroller(client, api_url=stack.api, folder=Path(folder), gpus=GPUS)
            identities = await enroller.all(SIZES[-1], lambda line: print(f"# {line}", file=sys.stderr, flush=True))
        return await _measure(stack, identities)
