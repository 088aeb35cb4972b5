"""Top-ups, refunds and the inbox of the payment provider's events."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body
from penstock.wire.rest.states import PaymentState, ProviderEventState, RefundState
from penstock.wire.times import Time

#: Whole cents, up to a million dollars.
Cents = Annotated[int, Meta(ge=10_000, le=1_000_000_000_000, multiple_of=10_000)]
Reason = Annotated[str, Meta(min_length=1, max_length=500)]


class TopupCreate(Body, frozen=True):
    """Pay in: at least one dollar, in whole cents."""

    amount_microusd: Annotated[int, Meta(ge=1_000_000, le=1_000_000_000_000, multiple_of=10_000)]


class RefundCreate(Body, frozen=True):
    """Pay back a part of a payment, in whole cents."""

    payment_id: str
    amount_microusd: Cents
    reason: Reason


class Refund(msgspec.Struct, frozen=True, kw_only=True):
    """A refund. `state`: requested, pending, succeeded, failed. `failure` says why it failed, or why the provider could
    not be asked yet."""

    id: str
    payment_id: str
    state: RefundState
    amount_microusd: int
    reason: str
    failure: str
    provider_refund_id: str | None
    created_by: str
    created_at: Time
    completed_at: Time | None


class Payment(msgspec.Struct, frozen=True, kw_only=True):
    """A top-up. `state`: open, succeeded, failed, expired. `checkout_url` is where it can be paid while it is open.
    `refunded_microusd` counts refunds that are under way. `refunds` are shown for one payment only."""

    id: str
    state: PaymentState
    provider: str
    amount_microusd: int
    currency: str
    refunded_microusd: int
    checkout_url: str
    reason: str
    created_by: str
    created_at: Time
    completed_at: Time | None
    refunds: list[Refund] = []


class ProviderEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the payment provider's. `state`: received, waiting, applied, ignored, unmatched, rejected, held,
    discarded. `body` is shown for one event only, as it came."""

    event_id: str
    provider: str
    type: str
    state: ProviderEventState
    reason: str
    payment_id: str | None
    attempts: int
    received_at: Time
    handled_at: Time | None
    body: str = ""


class ProviderEventAccept(Body, frozen=True):
    """Credit what was paid, or the amount that is named here."""

    reason: Reason
    amount_microusd: Cents | None = None


class ProviderEventDiscard(Body, frozen=True):
    """Put it aside."""

    reason: Reason


class WebhookTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The event is stored. `new` is false when it had come before."""

    received: bool
    new: bool
