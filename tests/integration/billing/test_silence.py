"""A node that is silent: nobody pays, or is stopped, for time that nobody knows to have been used."""

from datetime import UTC, datetime, timedelta

import pytest

from integration.billing.stage import HOUR, MINUTE, T0, Run, Stage
from integration.billing.treasury import Treasury
from penstock.billing.budgetmodel import BudgetTerms
from penstock.billing.model import State, Terms
from penstock.billing.service.overspending import BudgetWatch
from penstock.billing.service.standing import Standings
from penstock.billing.store import standing

PRICE = 60_000_000
PER_MINUTE = 1_000_000


async def _stands(stage: Stage) -> tuple[str, int]:
    """The state after a look, and the requests to release something."""
    await Standings(stage.db, Terms(low_balance_microusd=1, release_within_s=1)).sweep()
    state = await stage.value("select state from billing.customers where organisation_id = 'org_a'")
    return state, await stage.value("select count(*) from billing.release_requests")


async def _funds(stage: Stage) -> int:
    async with stage.db.transaction() as tx:
        purse = await standing.lock_purse(tx, "org_a", "prj_org_a")
    assert purse is not None
    return purse.funds_microusd


async def _silent(stage: Stage, now: datetime, *, for_: timedelta) -> Run:
    """Funds for ten minutes, and an allocation that ran for five before its node fell silent."""
    await stage.customer(paid=10 * PER_MINUTE)
    run = await stage.start(now - for_ - 5 * MINUTE, price=PRICE)
    await stage.begin(run.active_at)
    [run] = await stage.hear([run], now - for_)
    return run


@pytest.mark.parametrize("survives", [False, True])
async def test_nobody_is_stopped_for_silence_that_is_given_back(stage: Stage, *, survives: bool) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    run = await _silent(stage, now, for_=9 * MINUTE)
    assert await _stands(stage) == (State.HEALTHY, 0)
    await stage.catch_up(now)
    assert await _stands(stage) == (State.HEALTHY, 0)
    assert await stage.charged(run.id) == 5 * PER_MINUTE
    assert await _funds(stage) == 5 * PER_MINUTE
    [run] = await stage.hear([run], None)
    if not survives:
        await stage.end(run, now - 9 * MINUTE)
    await stage.catch_up(now + MINUTE)
    await stage.holds(await stage.value("select accrued_until from billing.progress"))
    assert await _stands(stage) == ((State.DEPLETED, 1) if survives else (State.HEALTHY, 0))


async def test_a_unit_that_is_gone_costs_nothing_before_its_end_is_noted(stage: Stage) -> None:
    """Its node is back and lists it no more; the loop that ends the allocation has not run yet."""
    now = datetime.now(UTC).replace(microsecond=0)
    run = await _silent(stage, now, for_=9 * MINUTE)
    async with stage.db.transaction() as tx:
        await tx.execute("update fleet.heartbeats set listed_at = $1", now)
        await tx.execute(
            "insert into fleet.unit_reports (node_id, unit_id, state, exit_class, seen_at, unheard)"
            " values ('nod_off', $1, 'gone', '', $2, true)",
            run.id,
            now - 9 * MINUTE,
        )
    await stage.catch_up(now)
    assert await stage.charged(run.id) == 5 * PER_MINUTE
    assert await _stands(stage) == (State.HEALTHY, 0)


async def test_a_budget_releases_nothing_for_silence(stage: Stage, database: object) -> None:
    treasury = Treasury(stage.db)
    watch = BudgetWatch(stage.db, BudgetTerms(tranche_min_microusd=10))
    await treasury.set(10 * PER_MINUTE, at=T0)
    run = await stage.start(T0, price=PRICE)
    await stage.hear([run], T0 + 5 * MINUTE)
    await stage.catch_up(T0 + 20 * MINUTE)
    await watch.evaluate(T0 + 20 * MINUTE)
    assert await stage.rows("select 1 from billing.release_requests") == []
    await stage.hear([run], None)
    await stage.catch_up(T0 + 21 * MINUTE)
    await watch.evaluate(T0 + 21 * MINUTE)
    assert len(await stage.rows("select 1 from billing.release_requests")) == 1


async def test_a_long_silence_is_charged_step_by_step_and_to_the_end(stage: Stage) -> None:
    run = await stage.start(T0, price=PRICE)
    [run] = await stage.hear([run], T0 + MINUTE)
    await stage.catch_up(T0 + 10 * HOUR)
    assert await stage.charged(run.id) == PER_MINUTE
    [run] = await stage.hear([run], None)
    run = await stage.end(run, T0 + 9 * HOUR)
    runs: list[int] = []
    for minute in range(1, 15):
        done = await stage.accrue(T0 + 10 * HOUR + minute * MINUTE)
        assert done is not None
        runs.append(done.windows)
    assert max(runs) <= 360  # ADR 39
    assert sum(1 for windows in runs if windows) > 1, "nine hours of silence are more than one run's work"
    assert await stage.value("select settled from compute.allocations where id = $1", run.id)
    await stage.holds(T0 + 10 * HOUR)


async def _on_a_node_of_its_own(stage: Stage, run: Run, *, listed_at: datetime) -> None:
    node = f"nod_{run.id}"
    async with stage.db.transaction() as tx:
        await tx.execute(
            "insert into fleet.nodes (id, name, state, gpus_approved) values ($1, $1, 'ready', 8)"
            " on conflict do nothing",
            node,
        )
        await tx.execute(
            "insert into fleet.heartbeats (node_id, at, listed_at) values ($1, $2, $2)"
            " on conflict (node_id) do update set listed_at = excluded.listed_at",
            node,
            listed_at,
        )
        await tx.execute("update compute.allocations set node_id = $1 where id = $2", node, run.id)


async def test_nodes_that_fall_silent_within_one_second_are_charged_when_they_are_back(stage: Stage) -> None:
    runs = [await stage.start(T0), await stage.start(T0)]
    other = await stage.start(T0, org="org_b")
    for run, ms in zip(runs, (300, 700), strict=True):
        await _on_a_node_of_its_own(stage, run, listed_at=T0 + 5 * MINUTE + timedelta(seconds=20, milliseconds=ms))
    await stage.catch_up(T0 + 8 * MINUTE)
    assert await stage.charged(runs[0].id) < await stage.charged(other.id)
    for run in runs:
        await _on_a_node_of_its_own(stage, run, listed_at=T0 + HOUR)
    await stage.catch_up(T0 + 10 * MINUTE)
    await stage.holds(T0 + 10 * MINUTE)


async def test_a_silence_counts_against_funds_as_soon_as_the_node_is_back(stage: Stage) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    await stage.customer(paid=20 * PER_MINUTE)
    run = await stage.start(now - 14 * MINUTE, price=PRICE)
    await stage.begin(run.active_at)
    [run] = await stage.hear([run], now - 9 * MINUTE)
    await stage.catch_up(now)
    assert await _funds(stage) >= 15 * PER_MINUTE
    await stage.hear([run], None)
    assert await _funds(stage) <= 6 * PER_MINUTE
