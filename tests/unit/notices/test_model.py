"""The lifecycle of webhooks, and which events they can ask for."""

from itertools import product

import pytest

from penstock.notices.model import (
    FACTS,
    FINAL,
    MOVES,
    Patience,
    WebhookEvent,
    WebhookState,
    asks_for_billing,
    unknown_type,
)
from penstock.wire.catalogue import CATALOGUE


def test_every_pair_is_a_move_or_illegal() -> None:
    legal = {
        (WebhookState.ACTIVE, WebhookEvent.PAUSE),
        (WebhookState.PAUSED, WebhookEvent.RESUME),
        (WebhookState.ACTIVE, WebhookEvent.DELETE),
        (WebhookState.PAUSED, WebhookEvent.DELETE),
    }
    assert {pair for pair in product(WebhookState, WebhookEvent) if pair in MOVES} == legal


def test_every_state_can_be_reached_and_only_deleted_is_final() -> None:
    assert {WebhookState.ACTIVE, *MOVES.values()} == set(WebhookState)
    assert {WebhookState.DELETED} == FINAL


def test_every_move_leaves_a_fact_that_is_in_the_catalogue() -> None:
    assert set(FACTS) == set(WebhookEvent)
    assert set(FACTS.values()) <= set(CATALOGUE)


@pytest.mark.parametrize("known", ["*", "provisioning.*", "provisioning.releasing.*", "provisioning.active", "a.b_c.*"])
def test_a_type_or_a_beginning_can_be_asked_for(known: str) -> None:
    assert unknown_type([known]) is None


@pytest.mark.parametrize("unknown", ["provisioning.actve", "provisioning", "provisioning*", "*.*", "", "a..*", ".*"])
def test_what_no_event_is_called_is_found(unknown: str) -> None:
    assert unknown_type(["*", unknown]) == unknown


def test_bills_must_be_named() -> None:
    assert not asks_for_billing(["*", "billings.x", "provisioning.*"])
    assert asks_for_billing(["billing.*"])
    assert asks_for_billing(["*", "payments.failed"])


def test_a_lease_outlives_every_exchange() -> None:
    from penstock.kit.outward import TIMEOUT_S

    assert Patience().lease_s > 2 * TIMEOUT_S
