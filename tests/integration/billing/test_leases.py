"""Tranches of budgets: how they shrink, where they count, how they end, and that no race gets more than the limit."""

import asyncio
import random
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest

from integration.billing.treasury import KEY, MISCOUNTED, OTHER_KEY, OVERDRAWN, PROJECT, Treasury
from penstock.billing.budgetmodel import Action, Period
from penstock.billing.errors import BudgetExhausted, LeaseOver
from penstock.kit import db
from penstock.kit.db import Database
from penstock.kit.errors import Invalid

T = datetime(2026, 1, 5, 10, 30, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def unheard(_subject: str, _payload: bytes) -> None:
    """Hints that nobody needs."""


@pytest.fixture
def treasury(database: Database) -> Treasury:
    return Treasury(database)


async def test_without_a_budget_nothing_is_leased_and_nothing_refused(treasury: Treasury) -> None:
    await treasury.set(5, project="prj_other")
    assert await treasury.lease(10**6) is None
    assert await treasury.rows("select * from billing.leases") == []


async def test_what_is_spent_counts_and_the_rest_comes_back(treasury: Treasury) -> None:
    budget = await treasury.set(1000)
    lease = await treasury.lease(100)
    assert lease is not None
    assert lease.amount_microusd == 100
    assert await treasury.figures(budget) == (0, 100)
    await treasury.settle(lease, 30)
    assert await treasury.figures(budget) == (30, 0)
    with pytest.raises(LeaseOver):
        await treasury.settle(lease, 30)
    assert await treasury.figures(budget) == (30, 0)


async def test_tranches_shrink_near_the_limit_and_the_last_is_all_that_is_left(treasury: Treasury) -> None:
    budget = await treasury.set(1000)
    granted: list[int] = []
    while sum(granted) < 1000:
        lease = await treasury.lease(400)
        assert lease is not None
        granted.append(lease.amount_microusd)
    with pytest.raises(BudgetExhausted) as refused:
        await treasury.lease(1)
    assert granted[:4] == [250, 187, 140, 105]
    assert granted == sorted(granted, reverse=True)
    assert min(granted[:-1]) == 10
    assert refused.value.kind == "exhausted"
    assert budget in refused.value.detail
    assert "$0.00 of $0.001 is spent, and what runs needs $0.001 more" in refused.value.detail
    assert "resets at" in refused.value.detail


async def test_a_need_is_met_in_full_or_not_at_all(treasury: Treasury) -> None:
    """A dollar, and twenty calls of at most twenty cents at once: five are let in."""
    await treasury.set(1_000_000)
    answers = await asyncio.gather(
        *(treasury.lease(200_000, needed=200_000) for _ in range(20)), return_exceptions=True
    )
    assert sum(not isinstance(answer, BaseException) for answer in answers) == 5
    assert sum(isinstance(answer, BudgetExhausted) for answer in answers) == 15


async def test_the_tightest_of_several_budgets_decides_and_all_count(treasury: Treasury) -> None:
    monthly = await treasury.set(10_000)
    hourly = await treasury.set(400, period=Period.HOURLY, key=KEY)
    warned = await treasury.set(1, period=Period.DAILY, action=Action.WARN)
    lease = await treasury.lease(1000, key=KEY)
    assert lease is not None
    assert lease.amount_microusd == 100
    free = await treasury.lease(1000, key=OTHER_KEY)
    assert free is not None
    assert free.amount_microusd == 1000
    await treasury.settle(lease, 60)
    assert await treasury.figures(monthly) == (60, 1000)
    assert await treasury.figures(hourly) == (60, 0)
    assert await treasury.figures(warned) == (60, 1000)
    await treasury.settle(free, 1000)
    assert await treasury.figures(hourly) == (60, 0)


async def test_a_budget_that_warns_never_refuses(treasury: Treasury) -> None:
    budget = await treasury.set(10, action=Action.WARN)
    for _ in range(3):
        await treasury.settle(await treasury.lease(1000), 1000)
    assert await treasury.figures(budget) == (3000, 0)


async def test_the_lease_of_a_dead_holder_comes_back_swept_or_not(treasury: Treasury) -> None:
    budget = await treasury.set(100, period=Period.DAILY, at=T)
    dead = await treasury.lease(100, needed=100, ttl_s=5, at=T)
    with pytest.raises(BudgetExhausted):
        await treasury.lease(1, at=T + 4.999 * SECOND)
    late = T + 5 * SECOND
    assert await treasury.figures(budget, at=late) == (0, 0)
    taken = await treasury.lease(100, needed=100, at=late)
    with pytest.raises(LeaseOver):
        await treasury.settle(dead, 100, at=late)
    # Not even where the clock was set back after its money was given away.
    with pytest.raises(LeaseOver):
        await treasury.settle(dead, 100, at=T)
    assert await treasury.expire(at=late) == 1
    assert await treasury.expire(at=late) == 0
    await treasury.settle(taken, 100, at=late)
    assert await treasury.figures(budget, at=late) == (100, 0)
    assert await treasury.rows(MISCOUNTED) == []


async def test_a_lease_counts_in_the_period_that_it_was_reserved_in(treasury: Treasury) -> None:
    before, after = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)
    budgets = [await treasury.set(100, period=period, at=before) for period in Period]
    lease = await treasury.lease(100, needed=100, at=before)
    assert [await treasury.figures(budget, at=after) for budget in budgets] == [(0, 0)] * 3
    fresh = await treasury.lease(100, needed=100, at=after)
    await treasury.settle(lease, 80, at=after + SECOND)
    assert [await treasury.figures(budget, at=before) for budget in budgets] == [(80, 0)] * 3
    await treasury.settle(fresh, 90, at=after + SECOND)
    assert [await treasury.figures(budget, at=after) for budget in budgets] == [(90, 0)] * 3
    assert (await treasury.look(budgets[2], at=after)).ends_at == datetime(2026, 3, 1, tzinfo=UTC)


async def test_a_lowered_limit_leases_nothing_more_and_takes_nothing_back(treasury: Treasury) -> None:
    budget = await treasury.set(1000)
    lease = await treasury.lease(250)
    assert await treasury.set(100) == budget
    with pytest.raises(BudgetExhausted):
        await treasury.lease(1)
    await treasury.settle(lease, 250)
    assert (await treasury.look(budget)).room_microusd == -150
    await treasury.set(1000)
    assert await treasury.lease(1)


async def test_a_deleted_budget_lets_its_leases_run_out(treasury: Treasury) -> None:
    budget = await treasury.set(1000)
    running, dead = await treasury.lease(100), await treasury.lease(100, ttl_s=0.001)
    assert await treasury.delete(budget)
    assert not await treasury.delete(budget)
    assert await treasury.lease(10**6) is None
    anew = await treasury.set(500)
    assert anew != budget
    # What ran under the one before counts under the new one.
    assert (await treasury.look(anew)).reserved_microusd == 100
    await treasury.settle(running, 70)
    await treasury.expire()
    assert await treasury.figures(anew) == (70, 0)
    with pytest.raises(LeaseOver):
        await treasury.settle(dead, 1)


async def test_a_new_budget_counts_what_leases_spent_before_it(treasury: Treasury) -> None:
    await treasury.set(10_000, key=KEY, at=T)
    await treasury.settle(await treasury.lease(100, key=KEY, at=T - timedelta(hours=2)), 100, at=T - timedelta(hours=2))
    await treasury.settle(await treasury.lease(100, key=KEY, at=T), 40, at=T)
    await treasury.lease(100, key=KEY, ttl_s=900, at=T)
    hourly = await treasury.set(10_000, period=Period.HOURLY, at=T + SECOND)
    daily = await treasury.set(10_000, period=Period.DAILY, at=T + SECOND)
    others = await treasury.set(10_000, period=Period.DAILY, key=OTHER_KEY, at=T + SECOND)
    assert await treasury.figures(hourly, at=T + SECOND) == (40, 100)
    assert await treasury.figures(daily, at=T + SECOND) == (140, 100)
    assert await treasury.figures(others, at=T + SECOND) == (0, 0)


async def test_a_new_budget_waits_for_leases_that_are_being_made_and_settled(treasury: Treasury) -> None:
    await treasury.set(10_000, key=KEY)
    settling = await treasury.lease(100, key=KEY)
    assert settling is not None
    async with treasury.db.transaction() as tx:
        made = await treasury.budgets.reserve(
            tx, project_id=PROJECT, key_id=KEY, amount_microusd=70, holder="gateway-2", ttl_s=60
        )
        await treasury.budgets.settle(tx, settling.id, 30)
        making = asyncio.create_task(treasury.set(10_000))
        async with asyncio.timeout(30):
            while not await treasury.rows("select 1 from pg_stat_activity where wait_event_type = 'Lock'"):
                await asyncio.sleep(0.01)
        assert not making.done()
    budget = await making
    assert await treasury.figures(budget) == (30, 70)
    await treasury.settle(made, 70)
    assert await treasury.figures(budget) == (100, 0)


@pytest.mark.parametrize(
    ("amount", "needed", "ttl_s", "field"),
    [(0, 1, 5, "amount_microusd"), (5, 0, 5, "needed_microusd"), (5, 6, 5, "needed_microusd"), (5, 1, 0, "ttl_s")],
)
async def test_bad_wishes_are_refused(treasury: Treasury, amount: int, needed: int, ttl_s: float, field: str) -> None:
    await treasury.set(100)
    with pytest.raises(Invalid) as refused:
        await treasury.lease(amount, needed=needed, ttl_s=ttl_s)
    assert refused.value.field == field


async def test_no_more_is_settled_than_was_leased(treasury: Treasury) -> None:
    budget = await treasury.set(1000)
    lease = await treasury.lease(100)
    for spent in (101, -1):
        with pytest.raises(Invalid) as refused:
            await treasury.settle(lease, spent)
        assert refused.value.field == "spent_microusd"
    assert await treasury.figures(budget) == (0, 100)
    await treasury.settle(lease, 0)
    assert await treasury.figures(budget) == (0, 0)


async def test_a_hundred_racers_never_take_more_than_there_is(treasury: Treasury, database_url: str) -> None:
    """Under three budgets at once, over connections of their own, while others watch, sweep and change budgets."""
    monthly = await treasury.set(100_000)
    hourly = await treasury.set(40_000, period=Period.DAILY, key=KEY)
    settled = {KEY: 0, OTHER_KEY: 0}
    seen = 0
    done = asyncio.Event()

    async with db.connect(database_url, unheard, connections_max=20) as pool:
        racers = Treasury(pool, treasury.budgets)

        async def race(number: int) -> None:
            dice = random.Random(number)
            key = KEY if number % 2 else OTHER_KEY
            for _ in range(4):
                try:
                    lease = await racers.lease(dice.randint(1, 20_000), key=key, ttl_s=0.02 if number % 10 == 0 else 60)
                except BudgetExhausted:
                    continue
                assert lease is not None
                spent = dice.randint(0, lease.amount_microusd)
                try:
                    await racers.settle(lease, spent)
                    settled[key] += spent
                except LeaseOver:
                    assert number % 10 == 0

        async def watch() -> None:
            nonlocal seen
            conn = await asyncpg.connect(database_url)
            try:
                while not done.is_set():
                    assert await conn.fetch(OVERDRAWN) == []
                    seen += 1
            finally:
                await conn.close()

        async def meddle() -> None:
            while not done.is_set():
                other = await racers.set(50, period=Period.HOURLY, action=Action.WARN)
                await racers.expire()
                await racers.delete(other)

        others = [asyncio.create_task(watch()), asyncio.create_task(meddle())]
        try:
            await asyncio.gather(*(race(number) for number in range(100)))
        finally:
            done.set()
            await asyncio.gather(*others)
    await asyncio.sleep(0.02)
    await treasury.expire()
    assert seen > 5
    assert await treasury.rows(OVERDRAWN) == await treasury.rows(MISCOUNTED) == []
    assert await treasury.figures(monthly) == (sum(settled.values()), 0)
    assert await treasury.figures(hourly) == (settled[KEY], 0)
    assert sum(settled.values()) > 50_000
    assert await treasury.rows("select * from billing.leases where project_id = $1", PROJECT) == []
