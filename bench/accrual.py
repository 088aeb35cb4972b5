"""Charging one window to everybody: a hundred thousand, three hundred thousand and a million active allocations."""

import statistics
import sys
import time
from datetime import UTC, datetime, timedelta

from bench.database import migrated
from bench.figures import REPETITIONS, Figure, bound, latency
from penstock.billing.service.accrue import Accrue
from penstock.billing.store import accrual
from penstock.compute.settlement import Settlement
from penstock.kit.db import Database

SIZES = (100_000, 300_000, 1_000_000)
LIMITS_S = {100_000: 10.0, 1_000_000: 120.0}
#: A hundred allocations for each organisation.
PER_ORGANISATION = 100
WINDOW = timedelta(seconds=60)
T0 = datetime(2026, 1, 5, 10, tzinfo=UTC)
_COMMAND_S = 900.0
#: Ids sort by time of making, as the product's do.
_FILL = """
    insert into compute.allocations (id, project_id, organisation_id, purpose, sku, gpus, image, labels, env, command,
        ports, state, reason, unit_id, price_microusd_per_hour, memory_bytes, cpus, processes_max, scratch_bytes,
        wait_s, correlation_id, active_at, timeline)
    select id, 'prj_' || n / $3, 'org_' || n / $3, 'interactive', 'g1.1', 1, 'python:3', '{"team": "bench"}', '{}',
        '[]', '{}', 'active', '', id, 3490000, 0, 1, 1, 0, 0, '', $4::timestamptz - random() * interval '1 minute', '[]'
    from (select n, 'alc_' || lpad(to_hex(n), 10, '0') || substr(md5(n::text), 1, 16) as id
        from generate_series($1::bigint, $2::bigint) n) made
"""
_SUM = "select count(*), count(distinct series_id), sum(amount_microusd) from billing.usage"


async def _grow(database: Database, before: int, size: int, at: datetime) -> None:
    """More of them become active in the minute before `at`."""
    for first in range(before + 1, size + 1, 100_000):
        async with database.transaction() as tx:
            await tx.execute(_FILL, first, min(first + 99_999, size), PER_ORGANISATION, at)
    async with database.read() as conn:
        await conn.execute("vacuum analyze")


async def _window_s(database: Database, at: datetime, size: int) -> float:
    """How long one run takes, with its commit; every allocation must have been charged by it."""
    began = time.perf_counter()
    async with database.transaction() as tx:
        progress = await accrual.lock_progress(tx)
        assert progress is not None
        charged = await Accrue(Settlement(), WINDOW).until(tx, progress.accrued_until, at)
    took = time.perf_counter() - began
    assert charged is not None
    assert charged.windows >= size, charged
    return took


async def _measure(database: Database, before: int, size: int, at: datetime) -> tuple[float, datetime]:
    """The median of three windows. The one before them also opens what has just begun, and is told apart."""
    await _grow(database, before, size, at)
    first = await _window_s(database, at + WINDOW, size)
    runs = [await _window_s(database, at + (number + 2) * WINDOW, size) for number in range(REPETITIONS)]
    print(f"{size}: first {first:.2f} s, then {', '.join(f'{run:.2f}' for run in runs)} s", file=sys.stderr, flush=True)
    return statistics.median(runs), at + (REPETITIONS + 1) * WINDOW


async def run() -> list[Figure]:
    """The two bars, and that it grows no faster than the number of allocations."""
    took: dict[int, float] = {}
    async with migrated(command_timeout_s=_COMMAND_S) as database:
        async with database.transaction() as tx:
            await accrual.advance(tx, T0)
        at, before = T0 + WINDOW, 0
        for size in SIZES:
            took[size], at = await _measure(database, before, size, at)
            before = size
        async with database.read() as conn:
            windows, series, _ = await conn.fetchrow(_SUM) or (0, 0, 0)
        assert windows >= sum(SIZES) * (REPETITIONS + 1)
        assert series == SIZES[-1]
    small, large = SIZES[0], SIZES[-1]
    each_us = {size: took[size] / size * 1e6 for size in SIZES}
    return [
        *(bound(f"accrual.{size}", took[size], "s", limit) for size, limit in LIMITS_S.items()),
        *(latency(f"accrual.each_at_{size}", each_us[size], "us", each_us[small], 1.5) for size in (300_000, large)),
    ]
