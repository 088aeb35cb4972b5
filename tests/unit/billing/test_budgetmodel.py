"""How much of a budget is leased at a time, and how a refusal reads."""

from dataclasses import replace
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.billing.budgetmodel import (
    Action,
    Budget,
    BudgetTerms,
    Period,
    budget_payload,
    refusal,
    tightest,
    tranche,
)
from penstock.wire.catalogue import BudgetFact

MOMENT = datetime(2026, 1, 5, 10, tzinfo=UTC)
BUDGET = Budget(
    id="bdg_1",
    organisation_id="org_a",
    project_id="prj_a",
    key_id=None,
    period=Period.MONTHLY,
    limit_microusd=20_000_000,
    action=Action.REJECT,
    created_at=MOMENT,
    updated_at=MOMENT,
    starts_at=MOMENT,
    ends_at=datetime(2026, 2, 1, tzinfo=UTC),
    spent_microusd=19_000_000,
    reserved_microusd=0,
    held_microusd=0,
)
TERMS = BudgetTerms(tranche_min_microusd=10_000)


@pytest.mark.parametrize(
    ("asked", "needed", "granted"),
    [
        (100_000, 1, 100_000),
        (1_000_000, 1, 250_000),
        (1_000_000, 600_000, 600_000),
        (1_000_000, 1_000_000, 1_000_000),
        (1_000_001, 1_000_001, 0),
    ],
)
def test_a_tranche_is_a_quarter_of_what_is_left_or_what_is_needed(asked: int, needed: int, granted: int) -> None:
    assert tranche([BUDGET], asked=asked, needed=needed, terms=TERMS) == granted


@given(
    asked=st.integers(1, 10**12),
    rooms=st.lists(st.integers(-(10**6), 10**12), min_size=1),
    needed=st.integers(1, 10**6),
)
def test_no_tranche_is_more_than_any_budget_has(asked: int, rooms: list[int], needed: int) -> None:
    budgets = [replace(BUDGET, limit_microusd=room, spent_microusd=0) for room in rooms]
    needed = min(asked, needed)
    granted = tranche(budgets, asked=asked, needed=needed, terms=TERMS)
    assert granted == 0 if min(rooms) < needed else needed <= granted <= min(asked, *rooms)


def test_budgets_that_warn_refuse_nothing() -> None:
    warning = replace(BUDGET, action=Action.WARN, spent_microusd=99_000_000)
    assert tightest([warning]) is None
    assert tranche([warning], asked=5, needed=5, terms=TERMS) == 5
    assert tightest([warning, BUDGET]) is BUDGET


def test_a_refusal_names_budget_limit_spent_and_reset() -> None:
    assert refusal(BUDGET) == (
        "the monthly budget of the project (bdg_1) has $1.00 left: $19.00 of $20.00 is spent;"
        " it resets at 2026-02-01 00:00 UTC; raise it with `penstock billing budget set`"
    )
    of_key = replace(BUDGET, key_id="key_1", period=Period.HOURLY, reserved_microusd=1, held_microusd=1_000_002)
    assert refusal(of_key).startswith("the hourly budget of key key_1 (bdg_1) is used up: $19.00 of $20.00 is spent")
    assert ", and what runs needs $1.000003 more;" in refusal(of_key)
    assert "is $0.00: nothing may be spent" in refusal(replace(BUDGET, limit_microusd=0))


def test_facts_are_as_the_catalogue_says() -> None:
    fact = msgspec.convert(msgspec.to_builtins(budget_payload(BUDGET)), BudgetFact)
    assert (fact.budget_id, fact.spent_microusd, fact.period_start) == ("bdg_1", 19_000_000, MOMENT)
