"""The words of the contract are those of the domains."""

from enum import StrEnum
from typing import Any, get_args

import pytest

from penstock.billing import budgetmodel, paymentmodel
from penstock.billing import model as billing
from penstock.compute import model as compute
from penstock.fleet import model as fleet
from penstock.identity import model as identity
from penstock.notices import model as notices
from penstock.serverless import model as serverless
from penstock.wire import serverless as wire_serverless
from penstock.wire.rest import states

PAIRS: list[tuple[Any, type[StrEnum]]] = [
    (states.AllocationState, compute.State),
    (states.AllocationPurpose, compute.Purpose),
    (states.NodeState, fleet.NodeState),
    (states.SlotHealth, fleet.SlotHealth),
    (states.TaskState, fleet.TaskState),
    (states.InvocationState, wire_serverless.State),
    (states.InvocationMode, wire_serverless.Mode),
    (states.WorkerState, serverless.WorkerState),
    (states.BalanceState, billing.State),
    (states.PaymentState, paymentmodel.PaymentState),
    (states.RefundState, paymentmodel.RefundState),
    (states.ProviderEventState, paymentmodel.InboxState),
    (states.WebhookState, notices.WebhookState),
    (states.DeliveryState, notices.DeliveryState),
    (states.BudgetPeriod, budgetmodel.Period),
    (states.BudgetAction, budgetmodel.Action),
    (states.ProjectRole, identity.Role),
    (states.PrincipalKind, identity.PrincipalKind),
]


@pytest.mark.parametrize(("words", "owner"), PAIRS, ids=[owner.__qualname__ for _, owner in PAIRS])
def test_a_set_of_words_is_its_owners(words: Any, owner: type[StrEnum]) -> None:
    _, meta = get_args(words)
    assert set(meta.extra_json_schema["enum"]) == set(owner)


def test_every_set_of_words_has_an_owner() -> None:
    declared = {name for name, value in vars(states).items() if get_args(value)}
    assert len(declared) == len(PAIRS)
