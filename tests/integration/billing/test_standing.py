"""Balance states: each fall is told once, depletion releases what runs, and money that comes brings nothing back."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from integration.billing.stage import Stage
from penstock.billing.model import Kind, State, Terms
from penstock.billing.service.standing import DEPLETED, Standings
from penstock.compute.model import Limits
from penstock.compute.service.release import Release
from penstock.flows.releases import Releases

TERMS = Terms(low_balance_microusd=5_000_000, release_within_s=900)


@pytest.fixture
async def now(stage: Stage) -> datetime:
    """The database's clock, until which everything is charged."""
    at = datetime.now(UTC)
    await stage.begin(at)
    return at


def _standings(stage: Stage) -> Standings:
    return Standings(stage.db, TERMS)


async def _facts(stage: Stage) -> list[str]:
    rows = await stage.rows("select type from kit.outbox order by seq")
    return [row["type"] for row in rows]


async def _state(stage: Stage, organisation_id: str = "org_a") -> Any:
    return await stage.value("select state from billing.customers where organisation_id = $1", organisation_id)


async def _sweep_releases(stage: Stage) -> None:
    await Releases(stage.db, Release(Limits())).sweep()


async def test_money_makes_a_new_customer_healthy(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=10_000_000)
    await _standings(stage).sweep()
    await _standings(stage).sweep()
    assert (await _state(stage), await _facts(stage)) == (State.HEALTHY, ["billing.balance_recovered"])


async def test_depletion_with_three_allocations_is_one_event_and_three_releases(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=10_000_000)
    await stage.customer("org_b", paid=10_000_000)
    await _standings(stage).sweep()
    mine = [await stage.start(now - timedelta(minutes=3), price=100_000_000) for _ in range(3)]
    other = await stage.start(now, org="org_b", price=3_490_000)
    # In the middle of a window: nothing is charged yet, and three allocations have used up more than there is.
    await stage.begin(now - timedelta(minutes=3))
    await asyncio.gather(*(_standings(stage).sweep_burning() for _ in range(4)))
    await _standings(stage).sweep()
    assert (await _facts(stage))[2:] == [
        "billing.low_balance_warning",
        "billing.auto_release_pending",
        "billing.balance_depleted",
        "provisioning.force_release_requested",
    ]
    await asyncio.gather(*(_sweep_releases(stage) for _ in range(3)))
    states = await stage.rows("select id, state, reason from compute.allocations order by id")
    assert {row["id"]: (row["state"], row["reason"]) for row in states} == {
        **{run.id: ("releasing", DEPLETED) for run in mine},
        other.id: ("active", ""),
    }
    assert (await _facts(stage)).count("provisioning.releasing.requested") == 3


async def test_a_top_up_makes_healthy_again_and_resurrects_nothing(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=1_000_000)
    standings = _standings(stage)
    await standings.sweep()
    run = await stage.start(now - timedelta(minutes=1), price=100_000_000)
    await stage.begin(now - timedelta(minutes=1))
    await standings.sweep()
    assert await _state(stage) == State.DEPLETED
    # It comes before anybody has released anything.
    await stage.post(Kind.PAYMENT, "org_a", 500_000_000)
    await standings.sweep()
    assert await _state(stage) == State.HEALTHY
    await _sweep_releases(stage)
    await standings.sweep()
    assert await stage.value("select state from compute.allocations where id = $1", run.id) == "releasing"
    assert (await _facts(stage)).count("billing.balance_recovered") == 2


async def test_time_before_an_activation_costs_nothing_however_long_no_biller_ran(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=10_000_000)
    await _standings(stage).sweep()
    await stage.start(now, price=20_000_000)
    await stage.begin(now - timedelta(hours=10))
    await _standings(stage).sweep_burning()
    assert await _state(stage) == State.HEALTHY
    assert await stage.value("select count(*) from billing.release_requests") == 0


async def test_what_ended_and_is_not_charged_yet_is_spent(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=10_000_000)
    await _standings(stage).sweep()
    await stage.start(now - timedelta(hours=1), price=11_000_000, end=now)
    await stage.begin(now - timedelta(hours=1))
    await _standings(stage).sweep()
    assert await _state(stage) == State.DEPLETED


async def test_what_is_created_after_a_top_up_is_spared_by_the_request_from_before_it(
    stage: Stage, now: datetime
) -> None:
    await stage.customer(paid=1_000_000)
    await _standings(stage).sweep()
    old = await stage.start(now - timedelta(minutes=1), price=100_000_000)
    await stage.begin(now - timedelta(minutes=1))
    await _standings(stage).sweep()
    await stage.post(Kind.PAYMENT, "org_a", 500_000_000)
    new = await stage.start(datetime.now(UTC), price=3_490_000)
    await _sweep_releases(stage)
    states = await stage.rows("select id, state from compute.allocations")
    assert {row["id"]: row["state"] for row in states} == {old.id: "releasing", new.id: "active"}


async def test_a_request_for_more_than_one_batch_is_carried_out_completely(
    stage: Stage, now: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.flows.releases.BATCH", 2)
    await stage.customer(paid=1)
    for _ in range(5):
        await stage.start(now, price=100_000_000)
    await _standings(stage).sweep_burning()
    await asyncio.gather(*(_sweep_releases(stage) for _ in range(3)))
    assert await stage.value("select count(*) from compute.allocations where state = 'releasing'") == 5
    assert await stage.value("select count(*) from billing.release_requests where done_at is null") == 0
    assert (await _facts(stage)).count("provisioning.releasing.requested") == 5


async def test_what_runs_on_a_balance_that_was_never_there_is_released_too(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=1)
    run = await stage.start(now, price=100_000_000)
    await stage.begin(now - timedelta(minutes=1))
    for _ in range(2):
        await asyncio.gather(*(_standings(stage).sweep_burning() for _ in range(3)))
        assert await _facts(stage) == ["provisioning.force_release_requested"]
    await _sweep_releases(stage)
    assert await stage.value("select state from compute.allocations where id = $1", run.id) == "releasing"


async def test_each_warning_is_told_once_until_the_balance_recovers(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=6_000_000)
    standings = _standings(stage)
    await standings.sweep()
    for refunded in (2_000_000, 1_000_000, 1_000_000):
        await stage.post(Kind.REFUND, "org_a", refunded)
        await standings.sweep()
    assert (await _facts(stage)).count("billing.low_balance_warning") == 1
    await stage.post(Kind.PAYMENT, "org_a", 10_000_000)
    await standings.sweep()
    await stage.post(Kind.REFUND, "org_a", 10_000_000)
    await standings.sweep()
    assert (await _facts(stage)).count("billing.low_balance_warning") == 2


async def test_release_is_pending_before_the_balance_ends(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=10_000_000)
    await _standings(stage).sweep()
    await stage.start(now, price=50_000_000)
    await _standings(stage).sweep_burning()
    assert await _state(stage) == State.AUTO_RELEASE_PENDING
    assert await stage.value("select count(*) from billing.release_requests") == 0


async def test_a_credit_limit_is_spent_before_anything_is_released(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=1_000_000)
    async with stage.db.transaction() as tx:
        await tx.execute("update billing.customers set credit_limit_microusd = 100000000")
    await stage.post(Kind.REFUND, "org_a", 1_000_000)
    await _standings(stage).sweep()
    assert await _state(stage) == State.HEALTHY


async def test_versions_of_a_balance_have_no_gap(stage: Stage, now: datetime) -> None:
    await stage.customer(paid=10_000_000)
    standings = _standings(stage)
    await standings.sweep()
    await stage.post(Kind.REFUND, "org_a", 10_000_000)
    await standings.sweep()
    versions = await stage.rows("select version from kit.outbox where aggregate_id = 'org_a/balance' order by seq")
    assert [row["version"] for row in versions] == list(range(1, len(versions) + 1))
