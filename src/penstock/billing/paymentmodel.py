"""Payments, refunds and disputes: what they are and how they may change. Pure.

`PAYMENT_MOVES` and `REFUND_MOVES` are the whole lifecycles: a pair that is absent is illegal. A provider's events come
late, twice and in any order, so whoever applies one asks the table first and takes an absent pair for old news. Money
that came is credited whatever was heard before, and a refund that failed is failed for good.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from penstock.billing.model import AMOUNT_MAX_MICROUSD, CURRENCY, MICROUSD
from penstock.kit.errors import Invalid
from penstock.kit.text import dollars

#: Providers count in cents.
CENT_MICROUSD: Final = 10_000
TOPUP_MIN_MICROUSD: Final = MICROUSD


class PaymentState(StrEnum):
    """Where a payment is."""

    OPEN = "open"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"


class PaymentEvent(StrEnum):
    """What can happen to it."""

    PAID = "paid"
    REFUSED = "refused"
    LAPSED = "lapsed"


PAYMENT_MOVES: Final[Mapping[tuple[PaymentState, PaymentEvent], PaymentState]] = {
    (PaymentState.OPEN, PaymentEvent.PAID): PaymentState.SUCCEEDED,
    (PaymentState.OPEN, PaymentEvent.REFUSED): PaymentState.FAILED,
    (PaymentState.OPEN, PaymentEvent.LAPSED): PaymentState.EXPIRED,
    (PaymentState.FAILED, PaymentEvent.PAID): PaymentState.SUCCEEDED,
    (PaymentState.EXPIRED, PaymentEvent.PAID): PaymentState.SUCCEEDED,
}
PAYMENT_INITIAL: Final = PaymentState.OPEN
PAYMENT_FINAL: Final = frozenset(PaymentState) - {source for source, _ in PAYMENT_MOVES}


#: The fact that each move writes.
FACTS: Final[Mapping[PaymentEvent, str]] = {
    PaymentEvent.PAID: "payments.balance_credited",
    PaymentEvent.REFUSED: "payments.failed",
    PaymentEvent.LAPSED: "payments.failed",
}


class RefundState(StrEnum):
    """Where a refund is."""

    REQUESTED = "requested"
    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class RefundEvent(StrEnum):
    """What can happen to it."""

    ACCEPTED = "accepted"
    CONFIRMED = "confirmed"
    REFUSED = "refused"


#: A bank may send back what was confirmed: a refund can fail after it succeeded.
REFUND_MOVES: Final[Mapping[tuple[RefundState, RefundEvent], RefundState]] = {
    (RefundState.REQUESTED, RefundEvent.ACCEPTED): RefundState.PENDING,
    (RefundState.REQUESTED, RefundEvent.CONFIRMED): RefundState.SUCCEEDED,
    (RefundState.REQUESTED, RefundEvent.REFUSED): RefundState.FAILED,
    (RefundState.PENDING, RefundEvent.CONFIRMED): RefundState.SUCCEEDED,
    (RefundState.PENDING, RefundEvent.REFUSED): RefundState.FAILED,
    (RefundState.SUCCEEDED, RefundEvent.REFUSED): RefundState.FAILED,
}
REFUND_INITIAL: Final = RefundState.REQUESTED
REFUND_FINAL: Final = frozenset(RefundState) - {source for source, _ in REFUND_MOVES}


class DisputeState(StrEnum):
    """Where a dispute is: while it is open, its amount is on hold."""

    OPEN = "open"
    WON = "won"
    LOST = "lost"


class InboxState(StrEnum):
    """What became of a provider's event."""

    RECEIVED = "received"
    #: It belongs to something that has not come yet.
    WAITING = "waiting"
    APPLIED = "applied"
    #: Of a type that is not for us.
    IGNORED = "ignored"
    #: For no payment of ours.
    UNMATCHED = "unmatched"
    #: It cannot be true.
    REJECTED = "rejected"
    #: An operator has to look.
    HELD = "held"
    DISCARDED = "discarded"


#: What an operator may discard.
DISCARDABLE: Final = frozenset({InboxState.HELD, InboxState.UNMATCHED, InboxState.REJECTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Payment:
    """A top-up. Once it succeeded, `amount_microusd` is what was credited. `refunded_microusd` counts refunds that are
    under way as well."""

    id: str
    organisation_id: str
    project_id: str
    provider: str
    state: PaymentState
    version: int
    amount_microusd: int
    currency: str
    refunded_microusd: int
    session_id: str | None
    intent_id: str | None
    checkout_url: str
    reason: str
    created_by: str
    correlation_id: str
    created_at: datetime
    completed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refund:
    """Money on its way back to who paid."""

    id: str
    payment_id: str
    organisation_id: str
    state: RefundState
    version: int
    amount_microusd: int
    provider_refund_id: str | None
    reason: str
    failure: str
    attempts: int
    due_at: datetime | None
    created_by: str
    correlation_id: str
    created_at: datetime
    completed_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """Somebody's bank wants a payment back."""

    id: str
    payment_id: str
    state: DisputeState
    amount_microusd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A provider's event in the inbox."""

    provider: str
    event_id: str
    type: str
    body: bytes
    state: InboxState
    reason: str
    payment_id: str | None
    attempts: int
    received_at: datetime
    handled_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of an event. One that waits becomes `then` when nothing changed `wait_s` after it came."""

    state: InboxState
    reason: str = ""
    payment_id: str | None = None
    wait_s: float = 0.0
    then: InboxState = InboxState.HELD


@dataclass(frozen=True, slots=True, kw_only=True)
class PaymentTerms:
    """What an installation sets for payments."""

    #: Providers pay back within a time; what is older stays as credit.
    refund_window_s: float = 180 * 86400
    #: An event whose payment or refund does not come in this time never gets one.
    wait_s: float = 3 * 86400
    #: What the provider says and the ledger does not know yet is explained by another event, or by a person.
    explain_s: float = 3600
    #: A payment that never got a checkout page was shown to nobody.
    abandoned_s: float = 3600


def check_amount(amount_microusd: int, *, at_least: int = CENT_MICROUSD) -> int:
    """The amount, or Invalid: whole cents, within bounds."""
    if not at_least <= amount_microusd <= AMOUNT_MAX_MICROUSD:
        bounds = f"{at_least} to {AMOUNT_MAX_MICROUSD} ({dollars(at_least)} to {dollars(AMOUNT_MAX_MICROUSD)})"
        raise Invalid(f"amount_microusd must be {bounds}", field="amount_microusd")
    if amount_microusd % CENT_MICROUSD:
        raise Invalid(f"amount_microusd must be whole cents: a multiple of {CENT_MICROUSD}", field="amount_microusd")
    return amount_microusd


def doubt(payment: Payment, *, amount_minor: int, currency: str) -> str:
    """Why what was paid is not simply what was asked for; empty when it is."""
    if currency.upper() != payment.currency:
        return f"paid in {currency.upper()[:8]}, not in {payment.currency}"
    if amount_minor * CENT_MICROUSD != payment.amount_microusd:
        return f"paid {amount_minor} cents, not {payment.amount_microusd // CENT_MICROUSD}"
    return ""


def creditable(*, amount_minor: int, currency: str) -> int | None:
    """What an amount of the provider's is in micro-dollars; none for what cannot be credited by itself."""
    amount_microusd = amount_minor * CENT_MICROUSD
    return amount_microusd if currency.upper() == CURRENCY and 0 < amount_microusd <= AMOUNT_MAX_MICROUSD else None
