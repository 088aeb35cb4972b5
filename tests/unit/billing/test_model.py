"""What a balance means, and that it falls one step at a time."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise, product

import pytest

from penstock.billing.model import (
    INITIAL,
    MOVES,
    SEVERITY,
    US_PER_HOUR,
    WARNINGS,
    Standing,
    State,
    Terms,
    judge,
    path,
    rated,
)

NOW = datetime(2026, 1, 5, 10, tzinfo=UTC)
TERMS = Terms(low_balance_microusd=5_000_000, release_within_s=900, recovered_from_microusd=10_000)
STANDING = Standing(
    organisation_id="org_a",
    state=State.HEALTHY,
    version=1,
    balance_microusd=100_000_000,
    credit_microusd=0,
    holds_microusd=0,
    credit_limit_microusd=0,
    burn_microusd_per_hour=0,
    unbilled_microusd=0,
    accrued_until=NOW,
    now=NOW,
)


@pytest.mark.parametrize(("current", "target"), list(product(State, State)))
def test_every_step_on_the_way_is_a_move_of_the_table(current: State, target: State) -> None:
    steps = [current, *path(current, target)]
    for one, next_one in pairwise(steps):
        assert any(source is one and to is next_one for (source, _), to in MOVES.items())
    if SEVERITY[target] >= SEVERITY[current]:
        assert steps[-1] is target


def test_falling_passes_through_every_warning_once() -> None:
    assert path(State.HEALTHY, State.DEPLETED) == tuple(WARNINGS)


def test_every_state_can_be_reached() -> None:
    reached = {INITIAL}
    while more := {target for (source, _), target in MOVES.items() if source in reached} - reached:
        reached |= more
    assert reached == set(State)


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, State.HEALTHY),
        ({"balance_microusd": 4_999_999}, State.LOW_BALANCE),
        ({"balance_microusd": 5_000_000}, State.HEALTHY),
        ({"balance_microusd": 0, "credit_microusd": 6_000_000}, State.HEALTHY),
        ({"balance_microusd": -5_000_000, "credit_limit_microusd": 11_000_000}, State.HEALTHY),
        ({"balance_microusd": 0}, State.DEPLETED),
        ({"balance_microusd": 1}, State.LOW_BALANCE),
        ({"holds_microusd": 50, "balance_microusd": 0}, State.DEPLETED),
        ({"burn_microusd_per_hour": 400_000_000}, State.AUTO_RELEASE_PENDING),
        ({"burn_microusd_per_hour": 399_000_000}, State.HEALTHY),
        ({"state": State.DEPLETED, "balance_microusd": 9_999}, State.DEPLETED),
        ({"state": State.DEPLETED, "balance_microusd": 10_000}, State.LOW_BALANCE),
    ],
)
def test_the_state_follows_from_what_is_there_and_how_long_it_lasts(change: dict[str, int], state: State) -> None:
    assert judge(replace(STANDING, **change), TERMS) is state


def test_time_that_is_not_charged_yet_counts_as_spent() -> None:
    spending = replace(STANDING, burn_microusd_per_hour=200_000_000, unbilled_microusd=100_000_000)
    assert spending.available_microusd == 0
    assert judge(spending, TERMS) is State.DEPLETED


def test_totals_lose_nothing_to_rounding() -> None:
    minutes = [rated(n * 60_000_000, price_microusd=3_490_000, per=US_PER_HOUR) for n in range(61)]
    assert sum(after - before for before, after in pairwise(minutes)) == 3_490_000
