"""Budgets and the meter: what counts where, what is told once, what is refused, and what goes before it overspends."""

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from integration.billing.stage import HOUR, MINUTE, PRICE, T0, Run, Stage, turn
from integration.billing.treasury import KEY, OTHER_KEY, PROJECT, Treasury
from penstock.billing.budgetmodel import Action, BudgetTerms, Period
from penstock.billing.errors import BudgetExhausted
from penstock.billing.service.overspending import BudgetWatch
from penstock.billing.store import budgets as store
from penstock.kit.errors import Unavailable

SECOND = timedelta(seconds=1)
_CHARGED = """
    select coalesce(sum(u.amount_microusd), 0)::bigint from billing.usage u join billing.series s on s.id = u.series_id
    where u.window_start >= $1 and u.window_start < $2 and ($3::text is null or s.key_id = $3)
"""
_REQUESTS = "select project_id, key_id, reason, done_at from billing.release_requests order by id"


@pytest.fixture
def treasury(stage: Stage) -> Treasury:
    return Treasury(stage.db)


@pytest.fixture
def watch(stage: Stage) -> BudgetWatch:
    return BudgetWatch(stage.db, BudgetTerms(release_lead_s=150))


async def started(stage: Stage, at: datetime, *, key: str | None = None, price: int = PRICE) -> Run:
    """An allocation of a key."""
    run = await stage.start(at, price=price)
    async with stage.db.transaction() as tx:
        await tx.execute("update compute.allocations set key_id = $2 where id = $1", run.id, key)
    return run


async def carried_out(stage: Stage) -> None:
    """Release requests are done."""
    async with stage.db.transaction() as tx:
        await tx.execute("update billing.release_requests set done_at = clock_timestamp() where done_at is null")


async def test_a_new_budget_counts_its_period_so_far_and_goes_on_from_there(stage: Stage, treasury: Treasury) -> None:
    begun = T0 - 26 * HOUR
    await stage.begin(begun)
    await started(stage, begun + 7 * SECOND, key=KEY)
    ending = await started(stage, begun + 11 * HOUR, key=OTHER_KEY, price=7_777_777)
    await stage.catch_up(T0 + 20 * MINUTE)
    now = T0 + 20.5 * MINUTE
    subjects: list[str | None] = [None, KEY, OTHER_KEY]
    made = {
        (key, period): await treasury.set(10**9, period=period, key=key, at=now)
        for key in subjects
        for period in Period
    }

    async def agrees(until: datetime) -> None:
        starts = {Period.HOURLY: T0, Period.DAILY: T0.replace(hour=0), Period.MONTHLY: T0.replace(day=1, hour=0)}
        for (key, period), budget in made.items():
            end = T0 + HOUR if period is Period.HOURLY else until
            charged = await stage.value(_CHARGED, starts[period], end, key)
            assert await treasury.figures(budget, at=now) == (charged, 0), (key, period, until)

    await agrees(now)
    assert (await treasury.look(made[None, Period.HOURLY], at=now)).spent_microusd > 0
    # It ended earlier than it was charged for, and that is given back to the budgets too.
    await stage.end(ending, T0 + 15 * MINUTE)
    await stage.catch_up(T0 + 40 * MINUTE)
    await agrees(T0 + 40 * MINUTE)
    await stage.catch_up(T0 + HOUR + 5 * MINUTE)
    later = T0 + HOUR + 5 * MINUTE
    await agrees(later)
    charged = await stage.value(_CHARGED, T0 + HOUR, later, None)
    assert await treasury.figures(made[None, Period.HOURLY], at=later) == (charged, 0)


async def test_a_budget_waits_for_the_run_of_the_meter_that_does_not_know_it(stage: Stage, treasury: Treasury) -> None:
    await started(stage, T0)
    async with stage.db.transaction() as tx:
        assert await turn(tx, T0 + 10 * MINUTE, MINUTE)
        making = asyncio.create_task(treasury.set(10**9, period=Period.DAILY, at=T0 + 10 * MINUTE))
        async with asyncio.timeout(30):
            while not await treasury.rows("select 1 from pg_stat_activity where wait_event_type = 'Lock'"):
                await asyncio.sleep(0.01)
        assert not making.done()
    budget = await making
    assert await treasury.figures(budget, at=T0 + 10 * MINUTE) == (PRICE // 6, 0)
    await stage.accrue(T0 + 30 * MINUTE)
    assert await treasury.figures(budget, at=T0 + 30 * MINUTE) == (PRICE // 2, 0)


async def test_the_meter_lets_a_budget_pass_that_is_being_made(stage: Stage, treasury: Treasury) -> None:
    await started(stage, T0)
    async with stage.db.transaction() as tx:
        await store.await_meter(tx)
        assert await stage.accrue(T0 + 10 * MINUTE) is None
    budget = await treasury.set(10**9, period=Period.DAILY, at=T0)
    await stage.accrue(T0 + 10 * MINUTE)
    assert await treasury.figures(budget, at=T0 + 10 * MINUTE) == (PRICE // 6, 0)


async def test_no_lease_waits_for_the_meter(stage: Stage, treasury: Treasury, watch: BudgetWatch) -> None:
    await started(stage, T0)
    budget = await treasury.set(10**9, at=T0)
    async with stage.db.transaction() as tx:
        assert await turn(tx, T0 + 10 * MINUTE, MINUTE)
        async with asyncio.timeout(30):
            lease = await treasury.lease(100, at=T0)
            await treasury.settle(lease, 40, at=T0)
            await watch.evaluate(T0 + 10 * MINUTE)
            await treasury.delete(await treasury.set(5 * 10**8, at=T0))
    assert await stage.value("select spent_microusd from billing.spending where budget_id = $1", budget) == PRICE // 6


async def test_a_meter_that_runs_for_long_is_not_waited_for(
    stage: Stage, treasury: Treasury, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_WAIT", "50ms")
    async with stage.db.transaction() as tx:
        await store.await_meter(tx)
        with pytest.raises(Unavailable):
            await treasury.set(5)
    assert await treasury.set(5)


async def test_the_meter_runs_on_over_deleted_budgets_until_they_are_forgotten(
    stage: Stage, treasury: Treasury, watch: BudgetWatch
) -> None:
    await started(stage, T0)
    budget = await treasury.set(10**9, at=T0)
    lease = await treasury.lease(5, ttl_s=600)
    await treasury.delete(budget)
    await watch.prune()
    await stage.accrue(T0 + MINUTE)
    assert await stage.value("select count(*) from billing.budgets") == 1
    await treasury.settle(lease, 5)
    await watch.prune()
    await stage.accrue(T0 + 2 * MINUTE)
    assert await stage.value("select count(*) from billing.budgets") == 0
    assert await stage.value("select count(*) from billing.spending") == 0


async def test_four_fifths_and_all_are_told_once_in_each_period(
    stage: Stage, treasury: Treasury, watch: BudgetWatch
) -> None:
    """By however many billers; and of the last minutes of a period after it is over."""
    await started(stage, T0, price=3_600_000)
    told = ["billing.budget_warning", "billing.budget_exhausted"]
    budget = await treasury.set(1_800_000, period=Period.HOURLY, action=Action.WARN, at=T0)
    late = await treasury.set(3_599_999, period=Period.HOURLY, action=Action.WARN, key=None, at=T0, project=PROJECT)
    assert late == budget
    await treasury.set(1_800_000, period=Period.HOURLY, action=Action.WARN, at=T0)
    whole = await treasury.set(3_600_000, period=Period.DAILY, action=Action.WARN, at=T0)
    for minute, facts in ((23, []), (24, told[:1]), (25, told[:1]), (30, told), (31, told)):
        await stage.catch_up(T0 + minute * MINUTE)
        await asyncio.gather(*(watch.evaluate(T0 + minute * MINUTE) for _ in range(4)))
        assert await treasury.facts(budget) == facts, minute
    assert await treasury.facts(whole) == []
    await stage.catch_up(T0 + 60 * MINUTE)
    await watch.evaluate(T0 + 60 * MINUTE)
    assert await treasury.facts(whole) == told
    assert await treasury.facts(budget) == told
    await stage.catch_up(T0 + 100 * MINUTE)
    await watch.evaluate(T0 + 100 * MINUTE)
    assert await treasury.facts(budget) == told * 2
    assert await treasury.rows(_REQUESTS) == []


async def test_the_last_minute_of_a_period_is_told_of_in_the_next(
    stage: Stage, treasury: Treasury, watch: BudgetWatch
) -> None:
    await started(stage, T0, price=3_600_000)
    budget = await treasury.set(3_600_000, period=Period.HOURLY, action=Action.WARN, at=T0)
    await stage.catch_up(T0 + 59 * MINUTE)
    await watch.evaluate(T0 + 59 * MINUTE)
    await stage.catch_up(T0 + HOUR)
    await watch.evaluate(T0 + HOUR + 2 * SECOND)
    assert await treasury.facts(budget) == ["billing.budget_warning", "billing.budget_exhausted"]
    payload: Any = (
        await treasury.rows("select payload from kit.outbox where aggregate_id = $1 and version = 2", budget)
    )[0]
    assert payload["payload"]["spent_microusd"] == 3_600_000
    assert payload["payload"]["period_start"] == T0.isoformat().replace("+00:00", "Z")


async def test_a_higher_limit_is_warned_of_anew(stage: Stage, treasury: Treasury, watch: BudgetWatch) -> None:
    budget = await treasury.set(100, at=T0)
    await treasury.settle(await treasury.lease(100, needed=100, at=T0), 100, at=T0)
    await watch.evaluate(T0)
    await treasury.set(1000, at=T0)
    await watch.evaluate(T0)
    assert await treasury.facts(budget) == ["billing.budget_warning", "billing.budget_exhausted"]
    await treasury.settle(await treasury.lease(700, needed=700, at=T0), 700, at=T0)
    await watch.evaluate(T0)
    assert (await treasury.facts(budget))[2:] == ["billing.budget_warning"]


async def test_what_runs_is_released_before_it_overspends(stage: Stage, treasury: Treasury, watch: BudgetWatch) -> None:
    """Three allocations, a look every ten seconds and a release that takes twenty more: the limit is not reached, and
    no more is left of it than the lead and a step cost."""
    limit = 5_000_000
    runs = [await started(stage, T0 + number * SECOND, price=7_000_000) for number in range(3)]
    budget = await treasury.set(limit, at=T0)
    stop: datetime | None = None
    for look in range(1, 6 * 60):
        now = T0 + look * 10 * SECOND
        await stage.catch_up(now)
        await watch.evaluate(now)
        if stop is None and await treasury.rows(_REQUESTS):
            stop = now + 20 * SECOND
        if stop is not None and now >= stop:
            break
    assert stop is not None
    for run in runs:
        await stage.end(run, stop)
    await carried_out(stage)
    await stage.catch_up(stop + 5 * MINUTE)
    await watch.evaluate(stop + 5 * MINUTE)
    spent = (await treasury.look(budget, at=stop)).spent_microusd
    assert limit - 21_000_000 * 200 // 3600 < spent <= limit
    [request] = await treasury.rows(_REQUESTS)
    assert (request["project_id"], request["key_id"]) == (PROJECT, None)
    assert budget in request["reason"]
    assert sorted(await treasury.facts(budget)) == [
        "billing.budget_exhausted",
        "billing.budget_warning",
        "provisioning.force_release_requested",
    ]


async def test_release_is_asked_for_once_and_again_only_for_what_came_after(
    stage: Stage, treasury: Treasury, watch: BudgetWatch
) -> None:
    await started(stage, T0, key=OTHER_KEY)
    first = await started(stage, T0, key=KEY)
    budgets = [await treasury.set(PRICE // 6, key=KEY, period=period, at=T0) for period in Period]
    now = T0 + 9 * MINUTE
    await stage.catch_up(now)
    await asyncio.gather(*(watch.evaluate(now) for _ in range(4)))
    assert [row["key_id"] for row in await treasury.rows(_REQUESTS)] == [KEY]
    assert sum([len(await treasury.facts(budget)) for budget in budgets]) == 7
    await watch.evaluate(now + 40 * SECOND)
    await carried_out(stage)
    await watch.evaluate(now + 80 * SECOND)
    await stage.end(first, now + 80 * SECOND)
    await watch.evaluate(now + 90 * SECOND)
    assert len(await treasury.rows(_REQUESTS)) == 1
    # One that was on its way when the others were released.
    await started(stage, now + 100 * SECOND, key=KEY)
    await watch.evaluate(now + 110 * SECOND)
    await watch.evaluate(now + 111 * SECOND)
    assert len(await treasury.rows(_REQUESTS)) == 2


async def test_money_that_running_allocations_need_is_not_leased(
    stage: Stage, treasury: Treasury, watch: BudgetWatch
) -> None:
    await started(stage, T0, price=3_600_000)
    budget = await treasury.set(1_000_000, at=T0)
    await watch.evaluate(T0 + SECOND)
    held = (await treasury.look(budget, at=T0 + SECOND)).held_microusd
    assert 151_000 <= held <= 190_000
    lease = await treasury.lease(1_000_000 - held, needed=1_000_000 - held, at=T0 + SECOND)
    assert lease is not None
    with pytest.raises(BudgetExhausted, match="what runs needs"):
        await treasury.lease(1, at=T0 + SECOND)
    await treasury.settle(lease, 0, at=T0 + SECOND)
    await stage.end(next(iter(stage.runs.values())), T0 + 10 * SECOND)
    await stage.catch_up(T0 + 2 * MINUTE)
    await watch.evaluate(T0 + 2 * MINUTE)
    assert await treasury.figures(budget, at=T0 + 2 * MINUTE) == (10_000, 0)
    assert (await treasury.look(budget, at=T0 + 2 * MINUTE)).held_microusd == 0


@pytest.mark.parametrize(
    ("key", "price", "fits"),
    [(KEY, 3_600_000, True), (KEY, 3_600_001, False), (OTHER_KEY, 9_000_000, True), (None, 99_000_000, False)],
)
async def test_a_create_needs_room_for_the_minimum_of_all_that_was_asked_for(
    stage: Stage, treasury: Treasury, *, key: str | None, price: int, fits: bool
) -> None:
    """At ten minutes past, six dollars an hour run under the key: a dollar is spent and a dollar more is needed."""
    await started(stage, T0, key=KEY, price=6_000_000)
    await treasury.set(2_600_000, key=KEY, period=Period.HOURLY, at=T0)
    await treasury.set(10_000_000, period=Period.DAILY, at=T0)
    await treasury.set(1, action=Action.WARN, at=T0)
    await stage.catch_up(T0 + 8 * MINUTE)

    async def check() -> None:
        async with stage.db.transaction() as tx:
            await treasury.budgets.check(
                tx,
                project_id=PROJECT,
                key_id=key,
                price_microusd_per_hour=price,
                minimum_s=600,
                at=T0 + 10 * MINUTE,
            )

    if fits:
        await check()
    else:
        with pytest.raises(BudgetExhausted, match="too little for 10 minutes"):
            await check()


async def test_the_biller_sweeps_and_looks_by_the_clock_of_the_database(treasury: Treasury, watch: BudgetWatch) -> None:
    budget = await treasury.set(100)
    await treasury.settle(await treasury.lease(100, needed=90, ttl_s=600), 90)
    await treasury.lease(5, ttl_s=0.001)
    async with asyncio.timeout(30):
        while await treasury.rows("select 1 from billing.leases"):
            await watch.sweep()
    await watch.evaluate()
    await watch.evaluate()
    assert await treasury.facts(budget) == ["billing.budget_warning"]
    assert await treasury.figures(budget) == (90, 0)
