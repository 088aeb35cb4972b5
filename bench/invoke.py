"""A warm sync invocation end to end, against a bare chain of the same steps and against those who do the same; then a
long queue, and a flood by one project beside a quiet one."""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg

from bench import peers
from bench.chain import Chain
from bench.figures import REPETITIONS, Figure, bound, fact, latency, median_of_three, percentile, rate, unmeasured
from bench.peers import http_load
from bench.peers.http_load import Connection
from bench.stack import Stack, running
from penstock import AsyncClient
from penstock.embedded.child import free_port
from penstock.sdk.packing import pack
from penstock.wire.rest import CodeUse, FunctionPut

_SLOTS = 32
_QUEUE = 100_000
_QUEUE_AT_ONCE = 64
_MEMORY_MAX = 512 << 20
_QUIET = 400
_PAUSE_S = 0.02
_FLOOD = 200
_NAP_S = 0.2
_SLEEPER = "import time\n\n\ndef nap(seconds: float) -> None:\n    time.sleep(seconds)\n"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


async def run() -> list[Figure]:
    """All figures; the peers first, while nothing else runs."""
    celery = await asyncio.to_thread(peers.run, "celery")
    ray = await asyncio.to_thread(peers.run, "ray", str(free_port()))
    bento = await asyncio.to_thread(peers.run, "bentoml", str(free_port()))
    with running() as stack:
        async with AsyncClient(stack.api, stack.key) as client:
            figures = await _warm(stack, client, celery)
            figures += await _flood(stack, client)
            figures += await _queue(stack, client)
    return figures + _told("ray_serve", ray) + _told("bentoml", bento)


def _told(name: str, told: dict[str, float]) -> list[Figure]:
    """A peer's own figures, or one that is missed when it could not be measured."""
    if not told:
        return [unmeasured(f"invoke_{name}_per_s", "per s", 0.0)]
    return [fact(f"invoke_{name}_{key}", value, "ms" if key == "p50_ms" else "per s") for key, value in told.items()]


async def deploy(client: AsyncClient, name: str, **definition: Any) -> None:
    """A function that answers with what it is given, ready to be called."""
    await client.functions.put(name, FunctionPut(sku="g1.1", **definition))
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if (await client.functions.get(name)).workers_ready:
            return
        await asyncio.sleep(0.05)
    raise TimeoutError(f"{name} has no worker")


async def _warm(stack: Stack, client: AsyncClient, celery: dict[str, float]) -> list[Figure]:
    await deploy(client, "noop", concurrency=_SLOTS, workers_min=1, workers_max=1)
    headers = {"Authorization": f"Bearer {stack.key}"}
    before, began = _processor_s(stack), time.perf_counter()
    count = await _done(stack)
    ours = await http_load.measure(f"{stack.gateway}/f/noop", headers)
    after, done = _processor_s(stack), await _done(stack) - count
    _print_processors(before, after, done, time.perf_counter() - began)
    chain = Chain(stack.setting("api", "PENSTOCK_DATABASE_URL"), stack.setting("api", "PENSTOCK_NATS_URL"))
    async with chain:
        bare_ms = await median_of_three(chain.single_ms)
        bare = await median_of_three(chain.per_s)
    figures = [
        bound("invoke_warm_p50", ours["p50_ms"], "ms", 8.0),
        fact("invoke_bare_chain_p50", bare_ms, "ms"),
        rate("invoke_throughput_16_vs_chain", ours["per_s"], "per s", bare, 0.4),
    ]
    if celery:
        figures.append(rate("invoke_throughput_16_vs_celery", ours["per_s"], "per s", celery["per_s"], 1.0))
        figures.append(fact("invoke_celery_p50", celery["p50_ms"], "ms"))
    else:
        figures.append(unmeasured("invoke_throughput_16_vs_celery", "per s", 1.0))
    cost = sum(after.get(name, 0) - before.get(name, 0) for name in after) / max(done, 1)
    figures.append(fact("invoke_processor_ms", cost * 1000, "ms per invocation"))
    return figures


async def _done(stack: Stack) -> int:
    conn = await asyncpg.connect(stack.setting("api", "PENSTOCK_DATABASE_URL"))
    try:
        return await conn.fetchval("select count(*) from serverless.invocations where finished_at is not null")
    finally:
        await conn.close()


def _groups(stack: Stack) -> dict[str, list[int]]:
    """The processes of the install by name; what they started counts as theirs, units as `unit`."""
    status = json.loads((stack.data / "status.json").read_text())
    named = {entry["pid"]: entry["name"] for entry in status["processes"]}
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    groups: dict[str, list[int]] = {}
    for pid in parents:
        at, name = pid, None
        while at and name is None:
            name, at = named.get(at), parents.get(at, 0)
        if name is not None:
            groups.setdefault("unit" if name == "agent" and pid not in named else name, []).append(pid)
    return groups


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _processor_s(stack: Stack) -> dict[str, float]:
    used: dict[str, float] = {}
    for name, pids in _groups(stack).items():
        for pid in pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            used[name] = used.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return used


def _print_processors(before: dict[str, float], after: dict[str, float], done: int, seconds: float) -> None:
    print(f"# {done} invocations in {seconds:.1f} s; processor time of each, in ms per invocation:", file=sys.stderr)
    for name in sorted(after, key=lambda name: before.get(name, 0) - after[name]):
        print(f"#   {name:10} {(after[name] - before.get(name, 0)) / max(done, 1) * 1000:8.3f}", file=sys.stderr)


@asynccontextmanager
async def _connections(
    stack: Stack, function: str, body: bytes = b"{}", *, project: str = "", mode: str = "sync", number: int = 1
) -> AsyncIterator[list[Connection]]:
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    headers |= {"Penstock-Project": project} if project else {}
    made = [Connection(f"{stack.gateway}/f/{function}?mode={mode}", headers, body) for _ in range(number)]
    for connection in made:
        await connection.open()
    try:
        yield made
    finally:
        for connection in made:
            connection.close()


async def _flood(stack: Stack, client: AsyncClient) -> list[Figure]:
    """A quiet project calls now and then, and another time without a pause; alone, and while another project's handlers
    sleep and its queue is long. In turn."""
    other = await client.projects.create("flood")
    async with AsyncClient(stack.api, stack.key, project=other.id) as noisy:
        await deploy_code(noisy, "nap", _SLEEPER, handler="main:nap", concurrency=4, workers_min=2, workers_max=4)
    quiet: list[tuple[float, float]] = []
    steady: list[tuple[float, float]] = []
    async with _connections(stack, "noop") as (connection,):
        for _ in range(REPETITIONS):
            alone = await _p99(connection, _PAUSE_S), await _p99(connection, 0)
            async with _flooding(stack, other.id):
                beside = await _p99(connection, _PAUSE_S), await _p99(connection, 0)
            await _drained(stack)
            quiet.append((alone[0], beside[0]))
            steady.append((alone[1], beside[1]))
    print(f"# p99 in ms, alone and beside the flood: quiet {quiet}, steady {steady}", file=sys.stderr)
    return [_beside("quiet", quiet), _beside("steady", steady)]


def _beside(name: str, pairs: list[tuple[float, float]]) -> Figure:
    alone, beside = (statistics.median(column) for column in zip(*pairs, strict=True))
    return latency(f"invoke_{name}_p99_beside_a_flood", beside, "ms", alone, 2.0)


@asynccontextmanager
async def _flooding(stack: Stack, project_id: str) -> AsyncIterator[None]:
    """Some calls wait at once, and more come than can be made."""
    body = json.dumps({"seconds": _NAP_S}).encode()
    async with _connections(stack, "nap", body, project=project_id, mode="async") as (noisy,):

        async def go_on() -> None:
            while True:
                await noisy.ask()
                await asyncio.sleep(0.005)

        for _ in range(_FLOOD):
            await noisy.ask()
        more = asyncio.create_task(go_on())
        try:
            yield
        finally:
            more.cancel()
            with suppress(asyncio.CancelledError):
                await more


async def _drained(stack: Stack) -> None:
    conn = await asyncpg.connect(stack.setting("api", "PENSTOCK_DATABASE_URL"))
    try:
        while await conn.fetchval("select exists (select 1 from serverless.invocations where finished_at is null)"):
            await asyncio.sleep(0.2)
    finally:
        await conn.close()


async def deploy_code(client: AsyncClient, name: str, text: str, *, handler: str, **definition: Any) -> None:
    """A function of one file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "main.py").write_text(text)
        archive = pack(Path(folder))
    key = f"functions/bench/{archive.sha256}.tar.gz"
    await client.objects.put(key, archive.content)
    code = CodeUse(object=key, sha256=archive.sha256, bytes=len(archive.content))
    await deploy(client, name, code=code, handler=handler, **definition)


async def _p99(connection: Connection, pause_s: float) -> float:
    samples: list[float] = []
    for _ in range(_QUIET):
        samples += await http_load.singles(connection, 1)
        await asyncio.sleep(pause_s)
    return percentile(samples, 0.99)


async def _queue(stack: Stack, client: AsyncClient) -> list[Figure]:
    """A hundred thousand invocations behind one that takes for ever; three projects do so one after the other."""
    firsts: list[float] = []
    lasts: list[float] = []
    peak: dict[str, int] = {}
    for turn in range(REPETITIONS):
        project = (await client.projects.create(f"queue{turn}")).id
        async with AsyncClient(stack.api, stack.key, project=project) as own:
            await deploy_code(own, "parked", _SLEEPER, handler="main:nap", workers_min=1, workers_max=1, timeout_s=3600)
        parts = await _fill(stack, project, peak)
        firsts.append(parts[0])
        lasts.append(parts[-1])
    for name, used in sorted(peak.items(), key=lambda item: -item[1]):
        print(f"#   {name:10} {used >> 20:6} MB", file=sys.stderr)
    ours = {name: used for name, used in peak.items() if name not in ("postgres", "temporal")}
    largest = max(ours.values()) / _MEMORY_MAX
    first, last = statistics.median(firsts), statistics.median(lasts)
    return [
        rate("invoke_enqueue_last_tenth", last, "per s", first, 0.75),
        bound("invoke_queue_memory", largest * (_MEMORY_MAX >> 20), "MB", _MEMORY_MAX >> 20),
    ]


async def _fill(stack: Stack, project: str, peak: dict[str, int]) -> list[float]:
    """The rate of each tenth; the largest memory of each process goes to `peak`."""
    parts: list[float] = []
    body = json.dumps({"seconds": 3600}).encode()
    async with _connections(stack, "parked", body, project=project, mode="async", number=_QUEUE_AT_ONCE) as connections:
        for _ in range(10):
            parts.append(await _enqueue(connections, _QUEUE // 10))
            for name, used in _memory(stack).items():
                peak[name] = max(peak.get(name, 0), used)
    print(f"# enqueued a second, by tenth: {[round(part) for part in parts]}", file=sys.stderr)
    return parts


async def _enqueue(connections: list[Connection], number: int) -> float:
    left = number

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await connection.ask()

    began = time.perf_counter()
    await asyncio.gather(*map(work, connections))
    return number / (time.perf_counter() - began)


def _memory(stack: Stack) -> dict[str, int]:
    """The largest resident size of one process of each name."""
    sizes: dict[str, int] = {}
    for name, pids in _groups(stack).items():
        for pid in pids:
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, ValueError, IndexError):
                continue
            sizes[name] = max(sizes.get(name, 0), pages * os.sysconf("SC_PAGE_SIZE"))
    return sizes
