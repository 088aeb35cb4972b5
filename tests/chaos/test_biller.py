"""kill -9 of billers in the middle of their runs, while allocations come and go: every second is charged, once."""

import asyncio
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from conftest import Servers
from penstock.billing.store import ledger
from penstock.embedded.child import free_port
from penstock.kit.db import Database

ALLOCATIONS = 3000
ORGANISATIONS = 20
BILLERS = 2
_DEADLINE_S = 90

#: $1 how many, $2 a seed for prices. They begin now.
_START = """
    insert into compute.allocations (id, project_id, organisation_id, purpose, sku, gpus, image, labels, env, command,
        ports, state, reason, unit_id, price_microusd_per_hour, memory_bytes, cpus, processes_max, scratch_bytes,
        wait_s, correlation_id, active_at, timeline)
    select id, 'prj_' || n % $3, 'org_' || n % $3, 'interactive', 'g1.1', 1, 'python:3', '{}', '{}', '[]', '{}',
        'active', '', id, 1 + (n * 7919 + $2) % 9999991, 0, 1, 1, 0, 0, '', clock_timestamp(), '[]'
    from (select n, 'alc_' || gen_random_uuid() as id from generate_series(1, $1) n) made
"""
#: $1 how many, $2 the longest time, in seconds, that an end lies back. Never before the beginning.
_END = """
    update compute.allocations a set state = 'released', ended_at = clock_timestamp(),
        billing_ended_at = greatest(active_at, clock_timestamp() - random() * make_interval(secs => $2))
    from (select id from compute.allocations where ended_at is null order by random() limit $1) picked
    where a.id = picked.id
"""
#: A run that is under way: which transaction, and whose.
_UNDER_WAY = """
    select backend_xid::text as xid, client_port from pg_stat_activity
    where application_name = 'biller' and datname = current_database() and backend_xid is not null
        and (query like '%billing.usage%' or query like '%set settled%' or query like '%accrued_until = $1%')
"""
#: Allocations whose windows are not exactly the time between beginning and end, at exactly its price.
_WRONG = """
    select a.id, a.active_at, a.billing_ended_at, u.* from compute.allocations a left join (
        select series_id, sum(amount_microusd) as amount, sum(quantity) as quantity, min(from_at) as first,
            count(*) filter (where nth = 0) as windows, count(distinct from_at) filter (where nth = 0) as begun
        from billing.usage group by 1) u on u.series_id = a.id
    cross join lateral (select (extract(epoch from a.billing_ended_at - a.active_at) * 1000000)::numeric as us) t
    where not a.settled or coalesce(u.quantity, 0) <> us or u.windows <> u.begun or u.first <> a.active_at
        or coalesce(u.amount, 0) <> div(us * a.price_microusd_per_hour, 3600000000)
"""
#: Organisations whose balance is not what their allocations cost by the closed form.
_DRIFT = """
    select organisation_id, billing.balance_of(organisation_id || '/balance') as balance, sum(cost) as cost
    from (select organisation_id, div((extract(epoch from billing_ended_at - active_at) * 1000000)::numeric
            * price_microusd_per_hour, 3600000000) as cost from compute.allocations) each
    group by 1 having billing.balance_of(organisation_id || '/balance') <> -sum(cost)
"""
_UNBALANCED = """
    select transfer_id from billing.entries group by 1 having sum(amount_microusd) <> 0
"""


@dataclass
class Billers:
    """Two of them on one database; whoever is killed is started again."""

    environ: dict[str, str]
    log: Path
    running: list[asyncio.subprocess.Process] = field(default_factory=list[asyncio.subprocess.Process])

    async def start(self) -> None:
        """One more."""
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "penstock.command", "serve", "biller"),
                env=self.environ | {"PENSTOCK_BILLER_OPS_PORT": str(free_port())},
                stdout=log,
                stderr=log,
            )
        self.running.append(process)

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        """Without a word."""
        process.send_signal(signal.SIGKILL)
        await process.wait()
        self.running.remove(process)

    def owner(self, port: int) -> asyncio.subprocess.Process | None:
        """Whose connection begins at this port."""
        return next((each for each in self.running if port in _ports(each.pid)), None)

    async def stop(self) -> None:
        """All of them."""
        for process in list(self.running):
            with suppress(ProcessLookupError):
                await self.kill(process)


def _ports(pid: int) -> set[int]:
    """The local ports of a process."""
    inodes: set[str] = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(line[1].rsplit(":", 1)[1], 16) for line in lines if line[9] in inodes}


async def _rows(database: Database, query: str, *args: object) -> list[Any]:
    async with database.read() as conn:
        return await conn.fetch(query, *args)


async def _come_and_go(database: Database, dice: random.Random, stop: asyncio.Event) -> int:
    """Some start and some end all the time, a third of them in the past."""
    ended = 0
    while not stop.is_set():
        async with database.transaction() as tx:
            await tx.execute(_START, dice.randint(1, 40), dice.randrange(10**6), ORGANISATIONS)
        async with database.transaction() as tx:
            ended += int((await tx.execute(_END, dice.randint(1, 40), dice.choice((0.0, 0.0, 5.0)))).split()[1])
        await asyncio.sleep(dice.uniform(0, 0.1))
    return ended


async def _hit(database: Database, billers: Billers, dice: random.Random) -> bool:
    """Wait for a run, kill its biller within it, and start another; whether the run was lost."""
    await asyncio.sleep(dice.uniform(0, 0.5))
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        for row in await _rows(database, _UNDER_WAY):
            process = billers.owner(row["client_port"])
            if process is not None:
                await asyncio.sleep(dice.uniform(0, 0.04))
                await billers.kill(process)
                await billers.start()
                return await _ended_as(database, row["xid"]) == "aborted"
        await asyncio.sleep(0.002)
    raise AssertionError(f"no run was seen\n{billers.log.read_text()[-4000:]}")


async def _ended_as(database: Database, xid: str) -> str:
    """What became of a transaction, once its session has noticed."""
    full = "(select pg_snapshot_xmax(pg_current_snapshot())::text::bigint / 4294967296 * 4294967296 + $1::bigint)"
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            state = (await _rows(database, f"select pg_xact_status({full}::text::xid8)", int(xid)))[0][0]
            if state != "in progress":
                return state
            await asyncio.sleep(0.01)


async def _settled(database: Database, billers: Billers) -> None:
    """The billers catch up; then everything ends, some of it before what is charged, and they settle it."""
    await _until(
        database, billers, "select accrued_until > clock_timestamp() - interval '5 seconds' from billing.progress"
    )
    await _rows(database, _END, 10**9, 20.0)
    await _until(database, billers, "select not exists (select 1 from compute.allocations where not settled)")


async def _until(database: Database, billers: Billers, condition: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not (await _rows(database, condition))[0][0]:
        assert time.monotonic() < deadline, billers.log.read_text()[-4000:]
        await asyncio.sleep(0.1)


async def _storm(servers: Servers, database_url: str, database: Database, folder: Path, kills: int) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"seed {seed} (PENSTOCK_CHAOS_SEED={seed} runs it again)")
    dice = random.Random(seed)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")} | {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_NATS_URL": servers.nats_url,
        "PENSTOCK_BILLER_WINDOW_SECONDS": "1",
    }
    billers = Billers(environ, folder / "biller.log")
    await _rows(database, _START, ALLOCATIONS, dice.randrange(10**6), ORGANISATIONS)
    stop = asyncio.Event()
    churn = asyncio.create_task(_come_and_go(database, dice, stop))
    try:
        for _ in range(BILLERS):
            await billers.start()
        hits, attempts = 0, 0
        while hits < kills and attempts < 5 * kills:
            hits += await _hit(database, billers, dice)
            attempts += 1
        stop.set()
        ended = await churn
        await _settled(database, billers)
    finally:
        stop.set()
        await billers.stop()
        await asyncio.gather(churn, return_exceptions=True)
    print(f"{attempts} kills, {hits} of them lost a run; {ended} ended meanwhile")
    assert hits == kills, f"only {hits} of {attempts} kills hit a run under way"
    assert ended > kills
    await _everything_is_charged_once(database)


async def _everything_is_charged_once(database: Database) -> None:
    assert await _rows(database, _WRONG) == []
    assert await _rows(database, _DRIFT) == []
    assert await _rows(database, _UNBALANCED) == []
    windows = await _rows(database, "select count(*) from billing.usage")
    assert windows[0][0] > ALLOCATIONS
    async with database.read() as conn:
        earned = await ledger.balance(conn, "platform/revenue")
    assert earned == (await _rows(database, "select sum(amount_microusd) from billing.usage"))[0][0]
    assert await _rows(database, "select 1 from billing.transfers where kind = 'correction' limit 1")


@pytest.mark.timeout(300)
async def test_five_kills_in_the_middle_of_a_run_lose_and_repeat_nothing(
    servers: Servers, database_url: str, database: Database, tmp_path: Path
) -> None:
    await _storm(servers, database_url, database, tmp_path, 5)


@pytest.mark.soak
@pytest.mark.timeout(7000)
async def test_a_hundred_kills_in_the_middle_of_a_run_lose_and_repeat_nothing(
    servers: Servers, database_url: str, database: Database, tmp_path: Path
) -> None:
    await _storm(servers, database_url, database, tmp_path, 100)
