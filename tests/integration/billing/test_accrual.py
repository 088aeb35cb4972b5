"""The meter at times of our choice: what each allocation is charged, to the micro-dollar, and what is not."""

import asyncio
from datetime import timedelta
from fractions import Fraction

import asyncpg
import pytest

from integration.billing.stage import HOUR, MINUTE, PRICE, T0, Stage, turn
from penstock.billing.model import REVENUE, Account, Kind
from penstock.billing.service.accrue import WINDOWS_MAX, Accrue
from penstock.billing.store import accrual
from penstock.compute.settlement import Settlement
from penstock.kit.db import Tx

SECOND = timedelta(seconds=1)
_WINDOWS = "select count(*) from billing.usage where series_id = $1 and nth = 0"
_ON_THE_METER = "select count(*) from compute.billable"


async def test_an_hour_costs_exactly_its_price(stage: Stage) -> None:
    run = await stage.start(T0, end=T0 + HOUR)
    for minute in range(1, 61):
        await stage.accrue(T0 + minute * MINUTE)
    assert await stage.charged(run.id) == PRICE == 3_490_000
    assert await stage.value(_WINDOWS, run.id) == 60
    # No window alone costs a sixtieth, which is no whole number.
    assert Fraction(PRICE, 60).denominator != 1
    await stage.holds(T0 + HOUR)


async def test_first_and_last_window_are_charged_in_part(stage: Stage) -> None:
    run = await stage.start(T0 + 13.7 * SECOND, end=T0 + 2 * MINUTE + timedelta(microseconds=1))
    await stage.catch_up(T0 + 5 * MINUTE)
    rows = await stage.rows(
        "select window_start, from_at, until_at from billing.usage where series_id = $1 order by window_start", run.id
    )
    assert [tuple(row) for row in rows] == [
        (T0, run.active_at, T0 + MINUTE),
        (T0 + MINUTE, T0 + MINUTE, T0 + 2 * MINUTE),
        (T0 + 2 * MINUTE, T0 + 2 * MINUTE, run.ended_at),
    ]
    await stage.holds(T0 + 5 * MINUTE)


async def test_one_that_lived_between_two_runs_is_charged(stage: Stage) -> None:
    run = await stage.start(T0 + 10 * SECOND, end=T0 + 11 * SECOND, price=3600 * 7)
    await stage.accrue(T0 + MINUTE)
    assert await stage.charged(run.id) == 7
    assert await stage.value(_ON_THE_METER) == 0


@pytest.mark.parametrize("state", ["released", "release_failed"])
async def test_nothing_is_charged_after_the_end(stage: Stage, state: str) -> None:
    run = await stage.start(T0)
    await stage.accrue(T0 + MINUTE)
    await stage.end(run, T0 + 90 * SECOND, state=state)
    await stage.catch_up(T0 + 30 * MINUTE)
    assert await stage.charged(run.id) == PRICE * 90 // 3600
    await stage.holds(T0 + 30 * MINUTE)


async def test_an_end_on_the_edge_of_a_window_is_charged_and_settled(stage: Stage) -> None:
    run = await stage.start(T0, end=T0 + MINUTE)
    accrued = await stage.accrue(T0 + MINUTE)
    assert accrued is not None
    assert (accrued.windows, accrued.settled) == (1, 1)
    assert await stage.value("select settled from compute.allocations where id = $1", run.id)
    assert await stage.value(_ON_THE_METER) == 0


async def test_an_end_in_the_open_window_waits_for_its_end(stage: Stage) -> None:
    await stage.start(T0, end=T0 + 90 * SECOND)
    accrued = await stage.accrue(T0 + 100 * SECOND)
    assert accrued is not None
    assert (accrued.until, accrued.settled) == (T0 + MINUTE, 0)
    await stage.holds(T0 + MINUTE)
    await stage.catch_up(T0 + 2 * MINUTE)
    await stage.holds(T0 + 2 * MINUTE)


async def test_an_end_before_what_was_charged_is_corrected(stage: Stage) -> None:
    org = await stage.customer(paid=1_000_000)
    run = await stage.start(T0 + 5 * SECOND)
    other = await stage.start(T0)
    await stage.catch_up(T0 + 10 * MINUTE)
    run = await stage.end(run, T0 + 3 * MINUTE + 20 * SECOND)
    await stage.accrue(T0 + 11 * MINUTE)
    await stage.holds(T0 + 11 * MINUTE)
    corrections = await stage.rows("select corrects from billing.transfers where kind = 'correction' order by 1")
    assert [row["corrects"] for row in corrections] == [
        f"usage/{org}/2026-01-05T10:{minute:02}:00Z" for minute in range(3, 10)
    ]
    spent = run.cost(T0 + HOUR) + other.cost(T0 + 11 * MINUTE)
    assert await stage.balance() == 1_000_000 - spent
    assert await stage.balance(account=Account.CREDIT) == 0
    assert await stage.value("select billing.balance_of($1)", REVENUE) == spent


async def test_an_end_before_the_activation_gives_everything_back(stage: Stage) -> None:
    await stage.customer(paid=500, granted=500)
    run = await stage.start(T0 + 90 * SECOND)
    await stage.catch_up(T0 + 5 * MINUTE)
    await stage.end(run, T0 + 10 * SECOND)
    untouched = await stage.start(T0 + 5 * MINUTE, end=T0 + 4 * MINUTE)
    await stage.accrue(T0 + 6 * MINUTE)
    assert await stage.charged(run.id, untouched.id) == 0
    assert (await stage.balance(), await stage.balance(account=Account.CREDIT)) == (500, 500)
    assert await stage.value(_ON_THE_METER) == 0
    await stage.holds(T0 + 6 * MINUTE)


async def test_corrections_give_credit_and_balance_back_where_they_came_from(stage: Stage) -> None:
    price = 3_600_000  # 60,000 a minute
    await stage.customer(paid=1_000_000, granted=150_000)
    run = await stage.start(T0, price=price)
    await stage.catch_up(T0 + 5 * MINUTE)
    assert (await stage.balance(), await stage.balance(account=Account.CREDIT)) == (850_000, 0)
    await stage.end(run, T0 + 90 * SECOND)
    await stage.accrue(T0 + 6 * MINUTE)
    assert (await stage.balance(), await stage.balance(account=Account.CREDIT)) == (1_000_000, 60_000)
    # Of no charge did more come back to an account than it had given.
    overpaid = """
        select e.account_id from billing.transfers t join billing.entries e on e.transfer_id = t.id
        where t.kind in ('usage', 'correction') and e.account_id like 'org_%'
        group by coalesce(t.corrects, t.id), e.account_id having sum(e.amount_microusd) > 0
    """
    assert await stage.rows(overpaid) == []


async def test_an_activation_that_commits_late_is_charged_from_its_beginning(stage: Stage) -> None:
    prompt = await stage.start(T0)
    async with stage.db.transaction() as slow:
        late = await stage.start(T0 + 10 * SECOND, tx=slow)
        await stage.accrue(T0 + MINUTE)
        await stage.accrue(T0 + 2 * MINUTE)
        assert await stage.charged(late.id) == 0
    await stage.accrue(T0 + 3 * MINUTE)
    await stage.holds(T0 + 3 * MINUTE)
    assert await stage.charged(prompt.id, late.id) == -await stage.balance()


async def test_an_end_that_commits_late_is_corrected(stage: Stage) -> None:
    run = await stage.start(T0)
    async with stage.db.transaction() as slow:
        await stage.end(run, T0 + 30 * SECOND, tx=slow)
        await stage.accrue(T0 + MINUTE)
        assert await stage.charged(run.id) == PRICE // 60
    await stage.accrue(T0 + 2 * MINUTE)
    await stage.holds(T0 + 2 * MINUTE)
    assert await stage.value(_ON_THE_METER) == 0


async def test_an_end_that_commits_within_a_run_is_not_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await stage.start(T0)
    await stage.accrue(T0 + MINUTE)
    real = accrual.accrue

    async def ended_just_before(tx: Tx, **how: object) -> object:
        await stage.end(run, T0 + 30 * SECOND)
        return await real(tx, **how)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(accrual, "accrue", ended_just_before)
        await stage.accrue(T0 + 2 * MINUTE)
    await stage.accrue(T0 + 3 * MINUTE)
    await stage.holds(T0 + 3 * MINUTE)
    assert await stage.value(_ON_THE_METER) == 0


async def test_a_payer_that_appears_within_a_run_does_not_fail_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = accrual.accrue

    async def started_just_before(tx: Tx, **how: object) -> object:
        await stage.start(T0, org="org_new")
        return await real(tx, **how)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(accrual, "accrue", started_just_before)
        await stage.accrue(T0 + MINUTE)
    await stage.accrue(T0 + 2 * MINUTE)
    await stage.holds(T0 + 2 * MINUTE)


async def test_each_organisation_pays_its_own_by_one_transfer_a_window(stage: Stage) -> None:
    for number in range(12):
        await stage.start(T0 + number * SECOND, org=f"org_{number % 3}", price=1_000_000 + number)
    await stage.catch_up(T0 + 4 * MINUTE)
    await stage.holds(T0 + 4 * MINUTE)
    for number in range(3):
        mine = [run for run in stage.runs.values() if run.organisation_id == f"org_{number}"]
        assert await stage.balance(f"org_{number}") == -sum(run.cost(T0 + 4 * MINUTE) for run in mine)
    transfers = await stage.rows(
        "select organisation_id, count(*), count(distinct window_start) as windows"
        " from billing.transfers group by 1 order by 1"
    )
    assert [tuple(row) for row in transfers] == [(f"org_{number}", 4, 4) for number in range(3)]


async def test_stock_is_never_billed(stage: Stage) -> None:
    stock = await stage.start(T0, purpose="stock")
    await stage.catch_up(T0 + 5 * MINUTE)
    assert await stage.charged(stock.id) == 0
    assert await stage.value("select count(*) from billing.usage") == 0


async def test_a_new_price_is_for_new_allocations(stage: Stage) -> None:
    before = await stage.start(T0)
    await stage.accrue(T0 + MINUTE)
    async with stage.db.transaction() as tx:
        await tx.execute("update compute.skus set price_microusd_per_gpu_hour = 9_999_999")
    after = await stage.start(T0 + MINUTE)
    await stage.catch_up(T0 + HOUR)
    assert (before.price_microusd, after.price_microusd) == (PRICE, 9_999_999)
    await stage.holds(T0 + HOUR)


async def test_windows_missed_while_no_biller_ran_are_charged_each(stage: Stage) -> None:
    run = await stage.start(T0)
    accrued = await stage.accrue(T0 + 10 * MINUTE + 5 * SECOND)
    assert accrued is not None
    assert (accrued.windows, accrued.transfers, accrued.behind) == (10, 10, False)
    assert await stage.value(_WINDOWS, run.id) == 10
    await stage.holds(T0 + 10 * MINUTE)


async def test_a_long_absence_is_caught_up_in_steps(stage: Stage) -> None:
    run = await stage.start(T0, end=T0 + (2 * WINDOWS_MAX + 5) * MINUTE)
    done = await stage.catch_up(T0 + 3 * WINDOWS_MAX * MINUTE)
    assert [accrued.windows for accrued in done] == [WINDOWS_MAX, WINDOWS_MAX, 5]
    assert [accrued.behind for accrued in done] == [True, True, False]
    assert await stage.value(_WINDOWS, run.id) == 2 * WINDOWS_MAX + 5
    await stage.holds(T0 + 3 * WINDOWS_MAX * MINUTE)


async def test_a_changed_length_of_windows_neither_repeats_nor_skips(stage: Stage) -> None:
    first = await stage.start(T0 - 7 * SECOND)
    series = await stage.record(5, T0 + SECOND, price=1, per=1)
    at = T0
    for seconds in (60, 60, 30, 30, 30, 60, 60, 7, 7, 60, 3600, 60):
        window = timedelta(seconds=seconds)
        await stage.start(at + SECOND)
        at += 2 * window
        await stage.record(5, at - 2 * window + SECOND, price=1, per=1)
        await stage.accrue(at, window=window)
        await stage.holds(await stage.value("select accrued_until from billing.progress"))
    await stage.end(first, at - 3 * MINUTE)
    await stage.accrue(at + 2 * MINUTE)
    await stage.holds(await stage.value("select accrued_until from billing.progress"))
    assert await stage.charged(series) == 65


async def test_an_end_in_a_longer_window_than_today_s_is_corrected(stage: Stage) -> None:
    run = await stage.start(T0)
    await stage.accrue(T0 + MINUTE)
    await stage.end(run, T0 + 10 * SECOND)
    await stage.accrue(T0 + 70 * SECOND, window=10 * SECOND)
    await stage.holds(T0 + 70 * SECOND)


async def test_a_clock_that_steps_back_charges_nothing_twice(stage: Stage) -> None:
    await stage.start(T0)
    await stage.catch_up(T0 + 10 * MINUTE)
    assert await stage.accrue(T0 + 3 * MINUTE) is None
    await stage.start(T0 + 3 * MINUTE)  # by the clock that went back
    for minute in range(4, 14):
        await stage.accrue(T0 + minute * MINUTE)
    await stage.holds(T0 + 13 * MINUTE)


async def test_a_clock_that_steps_forth_and_back_charges_what_it_said(stage: Stage) -> None:
    run = await stage.start(T0)
    await stage.catch_up(T0 + 2 * HOUR)
    await stage.end(run, T0 + HOUR)
    await stage.catch_up(T0 + HOUR + MINUTE)
    await stage.catch_up(T0 + 2 * HOUR + MINUTE)
    assert await stage.charged(run.id) == PRICE
    await stage.holds(T0 + 2 * HOUR + MINUTE)


async def test_credit_is_spent_first_and_never_below_zero(stage: Stage) -> None:
    await stage.customer(paid=1_000_000, granted=130_000)
    await stage.start(T0, price=3_600_000)
    seen: list[tuple[int, int]] = []
    for minutes in (1, 3, 4):
        await stage.accrue(T0 + minutes * MINUTE)
        seen.append((await stage.balance(account=Account.CREDIT), await stage.balance()))
    assert seen == [(70_000, 1_000_000), (0, 950_000), (0, 890_000)]
    await stage.post(Kind.GRANT, "org_a", 10_000)
    await stage.accrue(T0 + 5 * MINUTE)
    assert (await stage.balance(account=Account.CREDIT), await stage.balance()) == (0, 840_000)
    await stage.holds(T0 + 5 * MINUTE)


async def test_recorded_usage_below_a_micro_dollar_a_unit_adds_up(stage: Stage) -> None:
    quantities = (1, 2, 999, 1, 1, 17, 3, 500_000)
    for minute, quantity in enumerate(quantities):
        series = await stage.record(quantity, T0 + minute * MINUTE, price=7, per=1000)
        await stage.accrue(T0 + (minute + 1) * MINUTE)
        assert await stage.charged(series) == sum(quantities[: minute + 1]) * 7 // 1000
    assert await stage.balance() == -(sum(quantities) * 7 // 1000)
    await stage.holds(T0 + len(quantities) * MINUTE)


async def test_recorded_usage_waits_for_its_window_and_is_rated_once(stage: Stage) -> None:
    early = await stage.record(10, T0 + 59 * SECOND, price=3, per=1)
    late = await stage.record(10, T0 + MINUTE, price=3, per=1, resource="late")
    await stage.accrue(T0 + MINUTE)
    assert (await stage.charged(early), await stage.charged(late)) == (30, 0)
    await stage.catch_up(T0 + 3 * MINUTE)
    assert (await stage.charged(early), await stage.charged(late)) == (30, 30)
    assert await stage.value("select count(*) from billing.recorded where state = 'rated'") == 2
    await stage.holds(T0 + 3 * MINUTE)


async def test_two_billers_at_once_charge_once(stage: Stage) -> None:
    for _ in range(20):
        await stage.start(T0)
    for minute in range(1, 6):
        done = await asyncio.gather(*(stage.accrue(T0 + minute * MINUTE) for _ in range(4)))
        assert sum(accrued is not None for accrued in done) == 1
    assert await stage.value("select count(*) from billing.usage") == 100
    await stage.holds(T0 + 5 * MINUTE)


async def test_the_second_biller_does_not_wait_for_the_first(stage: Stage) -> None:
    await stage.start(T0)
    async with stage.db.transaction() as first:
        await turn(first, T0 + MINUTE, MINUTE)
        async with asyncio.timeout(30):
            assert await stage.accrue(T0 + MINUTE) is None
    await stage.holds(T0 + MINUTE)


async def test_a_run_that_dies_has_done_nothing(stage: Stage) -> None:
    run = await stage.start(T0)

    async def die() -> None:
        async with stage.db.transaction() as tx:
            await turn(tx, T0 + MINUTE, MINUTE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await die()
    assert await stage.charged(run.id) == 0
    await stage.accrue(T0 + MINUTE)
    await stage.holds(T0 + MINUTE)


async def test_the_database_s_clock_decides(stage: Stage) -> None:
    now = await stage.value("select clock_timestamp()")
    await stage.begin(now - 5 * MINUTE)
    run = await stage.start(now - 3 * MINUTE)
    accrued = await Accrue(Settlement())(stage.db)
    assert accrued is not None
    assert timedelta() <= now - accrued.until < 2 * MINUTE
    await stage.holds(accrued.until)
    assert await stage.charged(run.id) > 0
    while await Accrue(Settlement())(stage.db) is not None:
        pass


async def test_the_database_refuses_a_window_twice(stage: Stage) -> None:
    await stage.start(T0)
    await stage.accrue(T0 + MINUTE)
    with pytest.raises(asyncpg.UniqueViolationError):
        await stage.rows("insert into billing.usage select * from billing.usage")
