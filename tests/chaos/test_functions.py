"""Functions are called while processes of every kind are killed or stand still, and NATS loses its store: every
invocation ends, once, and its caller is told that end; no worker, unit or second is left over."""

import asyncio
import os
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from chaos import faults, functions, invariants
from chaos.callers import POISON, Callers
from chaos.functions import Watch
from e2e.cloud import Cloud
from penstock import AsyncClient

APP = Path(__file__).parent / "apps" / "storm.py"
#: The first are hit by every run; NATS is when its store goes.
KILLED = (
    "activator",
    "sidecar",
    "unit",
    "unit",
    "gateway",
    "agent",
    "postgres",
    "api",
    "worker",
    "relay",
    "temporal",
    "nats",
)
FROZEN = ("sidecar", "activator", "unit", "postgres", "nats", "agent", "gateway", "api", "relay", "worker", "temporal")
LEASE_S = 4
CALLERS = 8


@dataclass(frozen=True)
class Storm:
    """How much of everything; `pause_s` is the longest between two calls of a caller, `calm_s` between two kills."""

    invocations: int
    kills: int
    freezes: int
    losses: int
    poisons: int
    pause_s: float
    calm_s: float


async def _break(cloud: Cloud, storm: Storm, watch: Watch, dice: random.Random) -> Counter[str]:
    """All the faults: kills and losses one after the other, and beside them what stands still."""
    kills = [KILLED[number % len(KILLED)] for number in range(storm.kills)] + ["store"] * (storm.losses - 1)
    dice.shuffle(kills)
    # Nothing that breaks later makes up for what this one left.
    kills.append("store")
    freezes = [FROZEN[number % len(FROZEN)] for number in range(storm.freezes)]
    dice.shuffle(freezes)
    hit: Counter[str] = Counter()

    async def one_after_the_other() -> None:
        for kind in kills:
            await asyncio.sleep(dice.uniform(0, storm.calm_s))
            if kind == "store":
                await faults.lose_store(cloud, watch.bus)
            elif kind == "unit":
                await faults.kill_unit(await watch.busy_unit())
            else:
                await faults.kill(cloud, kind)
            hit[f"kill {kind}"] += 1

    async def beside_them() -> None:
        for kind in freezes:
            await asyncio.sleep(dice.uniform(0, storm.calm_s * len(kills) / len(freezes)))
            # Some are longer than a lease.
            seconds = LEASE_S + 2 if kind == "sidecar" else dice.uniform(1, LEASE_S + 1)
            if kind == "unit":
                await faults.freeze_all(list(invariants.sandboxes({await watch.busy_unit()})), seconds)
            else:
                await faults.freeze(cloud, kind, seconds)
            hit[f"freeze {kind}"] += 1

    await asyncio.gather(one_after_the_other(), beside_them())
    return hit


async def _call_and_break(
    cloud: Cloud, storm: Storm, watch: Watch, dice: random.Random
) -> tuple[Callers, Counter[str]]:
    stop = asyncio.Event()
    async with AsyncClient(cloud.api, cloud.key, timeout_s=10) as client, aiohttp.ClientSession() as http:
        callers = Callers(cloud, client, http, dice)
        calling = [asyncio.create_task(callers.call(stop, storm.invocations, storm.pause_s)) for _ in range(CALLERS)]
        calling += [asyncio.create_task(_poison(callers, storm, dice)) for _ in range(storm.poisons)]
        try:
            hit = await _break(cloud, storm, watch, dice)
            stop.set()
            await asyncio.gather(*calling)
        finally:
            for task in calling:
                task.cancel()
            await asyncio.gather(*calling, return_exceptions=True)
    return callers, hit


async def _poison(callers: Callers, storm: Storm, dice: random.Random) -> None:
    """Some time in the storm: each ends several workers before it is given up."""
    await asyncio.sleep(dice.uniform(0, storm.calm_s * storm.kills / 2))
    await callers.sync(POISON, {})


async def _storm(cloud: Cloud, storm: Storm) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"seed {seed} (PENSTOCK_CHAOS_SEED={seed} runs it again)")
    dice = random.Random(seed)
    quick = {"BILLER_WINDOW_SECONDS": "1", "ACTIVATOR_LEASE_S": str(LEASE_S), "SIDECAR_REPORT_S": "1"}
    cloud = replace(cloud, env={**cloud.env, **{f"PENSTOCK_{name}": value for name, value in quick.items()}})
    began = time.monotonic()
    await asyncio.to_thread(cloud.up)
    await asyncio.to_thread(cloud.ok, "fn", "deploy", str(APP), timeout_s=120)
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(functions.watch(cloud))
        callers, hit = await _call_and_break(cloud, storm, watch, dice)
        quiet = time.monotonic()
        await watch.until_rest()
        rows = await watch.rows()
        print(f"faults: {dict(hit)}")
        print(
            f"{functions.described(rows, watch)}; {quiet - began:.0f} s, at rest {time.monotonic() - quiet:.0f} s later"
        )
        assert sum(hit.values()) == storm.kills + storm.freezes + storm.losses
        assert callers.refused == []
        await _holds(watch, callers, rows)
    await invariants.everything_ended(cloud)
    await invariants.no_unit_is_left(cloud)
    assert await invariants.every_second_is_charged_once(cloud) > 0
    print(f"{time.monotonic() - began:.0f} s in all")


async def _holds(watch: Watch, callers: Callers, rows: dict[str, Any]) -> None:
    functions.nothing_was_lost(rows, callers.asked)
    functions.ends_are_as_the_work_was(rows, callers.asked)
    functions.callers_were_told_the_rows(rows, callers.asked)
    functions.one_result_counted(rows, watch.results)
    await watch.each_ended_once()
    await watch.nothing_was_seen_amiss()
    await watch.poison_is_buried()
    await watch.every_run_is_metered()
    await watch.workers_are_gone()


@pytest.mark.timeout(300)
async def test_a_storm_of_faults_loses_and_repeats_no_invocation(cloud: Cloud) -> None:
    await _storm(cloud, Storm(invocations=300, kills=8, freezes=3, losses=1, poisons=2, pause_s=0.8, calm_s=1))


@pytest.mark.soak
@pytest.mark.timeout(7000)
async def test_a_long_storm_of_faults_loses_and_repeats_no_invocation(cloud: Cloud) -> None:
    storm = Storm(invocations=20_000, kills=100, freezes=30, losses=6, poisons=20, pause_s=0.4, calm_s=12)
    await _storm(cloud, storm)
