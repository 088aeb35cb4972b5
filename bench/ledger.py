"""Transfers a second from one process against bare inserts, and reading a balance with a long history and a short."""

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from bench.database import migrated
from bench.figures import REPETITIONS, Figure, latency, rate
from penstock.billing.model import CLEARING, Account, Kind, Transfer
from penstock.billing.service import checkpoints
from penstock.billing.store import ledger
from penstock.kit.db import Database

CONNECTIONS = 16
SECONDS = 5.0
LONG, SHORT = 1_000_000, 1_000
#: Entries since the last checkpoint; the biller takes one as soon as there are a hundred.
TAIL = 50
READS = 2000
_HISTORY = """
    with made as (
        insert into billing.transfers (id, kind, organisation_id)
        select $1 || '/' || n, 'payment', $1 from generate_series($2::bigint, $3::bigint) n returning id
    )
    insert into billing.entries (transfer_id, account_id, amount_microusd)
    select id, account_id, amount
    from made cross join (values ($1 || '/balance', 7), ('platform/clearing', -7)) e (account_id, amount)
"""


async def _prepare(database: Database) -> None:
    async with database.transaction() as tx:
        await tx.execute("create table bare (id text primary key, amount bigint not null)")
        for organisation in ("org_long", "org_short", *_payers()):
            await ledger.open_customer(tx, organisation)


def _payers() -> list[str]:
    return [f"org_{number}" for number in range(CONNECTIONS)]


def _payment(organisation: str, number: int) -> Transfer:
    return Transfer(
        id=f"payment/{organisation}/{number}",
        kind=Kind.PAYMENT,
        organisation_id=organisation,
        entries={Account.BALANCE.of(organisation): 7, CLEARING: -7},
    )


async def _per_s(once: Callable[[str, int], Awaitable[None]], numbers: "itertools.count[int]") -> float:
    """How many a second, so many at a time."""
    until = time.perf_counter() + SECONDS
    done = 0

    async def repeat(organisation: str) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await once(organisation, next(numbers))
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(repeat(organisation) for organisation in _payers()))
    return done / (time.perf_counter() - began)


async def _rates(database: Database) -> tuple[float, float, float]:
    """Transfers alone, transfers in a transaction with more to come, and bare transactions, in turn; the medians."""

    async def post(organisation: str, number: int) -> None:
        async with database.read() as conn:
            assert await ledger.post(conn, _payment(organisation, number))

    async def post_within(organisation: str, number: int) -> None:
        async with database.transaction() as tx:
            assert await ledger.post(tx, _payment(organisation, number))

    async def insert(organisation: str, number: int) -> None:
        key = f"payment/{organisation}/{number}"
        async with database.transaction() as tx:
            await tx.execute("insert into bare values ($1, $3), ($2, $4)", f"{key}/1", f"{key}/2", 7, -7)

    numbers = itertools.count()
    measured: list[list[float]] = [[], [], []]
    for _ in range(REPETITIONS):
        for once, rates in zip((post, post_within, insert), measured, strict=True):
            rates.append(await _per_s(once, numbers))
    alone, within, bare = map(statistics.median, measured)
    return alone, within, bare


async def _fill(database: Database) -> None:
    """Two histories, the biller's checkpoints over both, and the entries since."""
    for organisation, entries in (("org_long", LONG), ("org_short", SHORT)):
        for first in range(1, entries + 1, 50_000):
            async with database.transaction() as tx:
                await tx.execute(_HISTORY, organisation, first, min(first + 49_999, entries))
    await checkpoints.take(database)
    for organisation in ("org_long", "org_short"):
        for number in range(TAIL):
            async with database.transaction() as tx:
                await ledger.post(tx, _payment(organisation, number))
    async with database.read() as conn:
        await conn.execute("vacuum analyze")


async def _read_us(database: Database) -> tuple[float, float]:
    """One balance and the other, in turn; the medians."""
    samples: dict[str, list[float]] = {"org_long": [], "org_short": []}
    async with database.read() as conn:
        for _ in range(READS):
            for organisation, taken in samples.items():
                began = time.perf_counter()
                await ledger.balance(conn, Account.BALANCE.of(organisation))
                taken.append((time.perf_counter() - began) * 1e6)
        for organisation, entries in (("org_long", LONG), ("org_short", SHORT)):
            assert await ledger.balance(conn, Account.BALANCE.of(organisation)) == 7 * (entries + TAIL)
    return statistics.median(samples["org_long"]), statistics.median(samples["org_short"])


async def run() -> list[Figure]:
    """Writing and reading."""
    async with migrated(connections_max=CONNECTIONS, command_timeout_s=300) as database:
        await _prepare(database)
        alone, within, bare = await _rates(database)
        print(f"# within a transaction of more statements {within:.0f}/s, {within / bare:.2f} of bare", file=sys.stderr)
        await _fill(database)
        long, short = await _read_us(database)
    return [
        rate("ledger.transfers", alone, "transfers/s", bare, 0.5),
        latency("ledger.balance_of_a_million", long, "us", short, 2.0),
    ]
