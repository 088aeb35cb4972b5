"""The lives of payments and refunds, and what is asked of amounts."""

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest

from penstock.billing import paymentmodel as model
from penstock.billing.paymentmodel import (
    FACTS,
    PAYMENT_FINAL,
    PAYMENT_INITIAL,
    PAYMENT_MOVES,
    REFUND_FINAL,
    REFUND_INITIAL,
    REFUND_MOVES,
    Payment,
    PaymentEvent,
    PaymentState,
    RefundEvent,
    RefundState,
)
from penstock.kit.errors import Invalid
from penstock.wire.catalogue import CATALOGUE


def payment(**changes: Any) -> Payment:
    values: dict[str, Any] = {
        "id": "pay_1",
        "organisation_id": "org_a",
        "project_id": "prj_a",
        "provider": "local",
        "state": PaymentState.OPEN,
        "version": 0,
        "amount_microusd": 20_000_000,
        "currency": "USD",
        "refunded_microusd": 0,
        "session_id": None,
        "intent_id": None,
        "checkout_url": "",
        "reason": "",
        "created_by": "usr_a",
        "correlation_id": "cor",
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "completed_at": None,
    }
    return Payment(**{**values, **changes})


def reached(moves: Mapping[tuple[Any, Any], Any], initial: Any) -> set[Any]:
    found = {initial}
    while new := {target for (source, _), target in moves.items() if source in found} - found:
        found |= new
    return found


def test_every_state_of_a_payment_can_be_reached_and_money_that_came_is_final() -> None:
    assert reached(PAYMENT_MOVES, PAYMENT_INITIAL) == set(PaymentState)
    assert frozenset({PaymentState.SUCCEEDED}) == PAYMENT_FINAL


@pytest.mark.parametrize(("state", "event"), [*product(PaymentState, PaymentEvent)])
def test_money_that_came_is_credited_from_every_other_state_and_nothing_takes_it_back(
    state: PaymentState, event: PaymentEvent
) -> None:
    target = PAYMENT_MOVES.get((state, event))
    if event is PaymentEvent.PAID and state is not PaymentState.SUCCEEDED:
        assert target is PaymentState.SUCCEEDED
    elif state is PaymentState.OPEN:
        assert target in (PaymentState.FAILED, PaymentState.EXPIRED)
    else:
        assert target is None


def test_every_state_of_a_refund_can_be_reached_and_failure_is_final() -> None:
    assert reached(REFUND_MOVES, REFUND_INITIAL) == set(RefundState)
    assert frozenset({RefundState.FAILED}) == REFUND_FINAL


@pytest.mark.parametrize(("state", "event"), [*product(RefundState, RefundEvent)])
def test_a_refund_never_goes_back(state: RefundState, event: RefundEvent) -> None:
    order = [RefundState.REQUESTED, RefundState.PENDING, RefundState.SUCCEEDED, RefundState.FAILED]
    target = REFUND_MOVES.get((state, event))
    assert target is None or order.index(target) > order.index(state)
    assert (event is RefundEvent.REFUSED and state is not RefundState.FAILED) <= (target is RefundState.FAILED)


def test_every_move_of_a_payment_writes_a_fact_of_the_catalogue() -> None:
    assert set(FACTS) == set(PaymentEvent)
    assert set(FACTS.values()) <= set(CATALOGUE)


@pytest.mark.parametrize("amount", [-10_000, 0, 9_999, 15_000, 1_000_000_010_000])
def test_amounts_are_whole_cents_within_bounds(amount: int) -> None:
    with pytest.raises(Invalid) as caught:
        model.check_amount(amount)
    assert caught.value.field == "amount_microusd"


def test_bounds_are_amounts_themselves() -> None:
    assert model.check_amount(10_000) == 10_000
    assert model.check_amount(1_000_000_000_000) == 1_000_000_000_000
    with pytest.raises(Invalid):
        model.check_amount(990_000, at_least=model.TOPUP_MIN_MICROUSD)


def test_only_what_was_asked_for_is_beyond_doubt() -> None:
    assert model.doubt(payment(), amount_minor=2000, currency="usd") == ""
    assert "EUR" in model.doubt(payment(), amount_minor=2000, currency="eur")
    assert "1999 cents" in model.doubt(payment(), amount_minor=1999, currency="usd")
    assert model.doubt(payment(), amount_minor=10**18, currency="usd")


@pytest.mark.parametrize(
    ("minor", "currency", "expected"), [(1, "usd", 10_000), (0, "usd", None), (10**18, "usd", None), (1, "jpy", None)]
)
def test_only_dollars_of_a_sane_amount_can_be_credited_unseen(minor: int, currency: str, expected: int | None) -> None:
    assert model.creditable(amount_minor=minor, currency=currency) == expected
