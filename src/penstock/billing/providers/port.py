"""What billing asks of a payment provider. None of it happens inside a transaction.

Every call may be made again with the same ids and has one effect.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from penstock.billing.paymentmodel import Payment
from penstock.billing.providers.events import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """Where a person pays."""

    session_id: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnUrls:
    """Where a person comes back to afterwards."""

    success: str
    cancel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RefundOrder:
    """What to pay back of which payment. `repeated` says that an earlier call may have had its effect."""

    refund_id: str
    payment_id: str
    intent_id: str
    amount_microusd: int
    repeated: bool


class RefundStatus(StrEnum):
    """How a refund stands with the provider."""

    PENDING = "pending"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RefundAnswer:
    """What the provider says of a refund. One that failed from the start may have no id."""

    id: str | None
    status: RefundStatus
    failure: str = ""


class Provider(Protocol):
    """A payment provider."""

    #: As in the path of its webhook.
    name: str

    async def checkout(self, payment: Payment, urls: ReturnUrls) -> Checkout:
        """A page where this payment can be paid; the same one each time. ProviderAway when it does not answer."""
        ...

    async def refund(self, order: RefundOrder) -> RefundAnswer:
        """Pay back. ProviderAway when it is not known whether it did."""
        ...

    async def refund_status(self, provider_refund_id: str) -> RefundAnswer:
        """How a refund stands that was accepted before."""
        ...

    def parse(self, body: bytes, signed: str) -> Notice:
        """The event in a webhook's body, as it came; an error unless the provider signed these very bytes just now."""
        ...

    async def close(self) -> None:
        """Give up connections."""
        ...
