"""The shapes of a provider's events, as far as billing reads them. The local provider writes the same ones."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from penstock.billing.errors import BadWebhook
from penstock.wire.unreadable import UNREADABLE

_Id = Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[A-Za-z0-9_.:-]+$")]
_Type = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.]+$")]
_NO_METADATA: Final[Mapping[str, str]] = {}


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Around the object that an event is about."""

    object: msgspec.Raw


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Any event."""

    id: _Id
    type: _Type
    livemode: bool
    data: Data


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A checkout session."""

    id: _Id
    amount_total: int | None = None
    currency: str | None = None
    payment_status: str = "unpaid"
    client_reference_id: str | None = None
    payment_intent: str | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def payment_id(self) -> str:
        """Of ours, if it says."""
        return (self.metadata or _NO_METADATA).get("payment_id") or self.client_reference_id or ""


class Refund(msgspec.Struct, frozen=True, kw_only=True):
    """A refund."""

    id: _Id
    amount: int
    currency: str
    status: str | None = None
    payment_intent: str | None = None
    failure_reason: str | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def refund_id(self) -> str:
        """Of ours, if it says."""
        return (self.metadata or _NO_METADATA).get("refund_id", "")


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """A charge, with the sum of all its refunds."""

    id: _Id
    amount_refunded: int
    currency: str
    payment_intent: str | None = None
    metadata: Mapping[str, str] | None = None

    @property
    def payment_id(self) -> str:
        """Of ours, if it says."""
        return (self.metadata or _NO_METADATA).get("payment_id", "")


class Dispute(msgspec.Struct, frozen=True, kw_only=True):
    """A dispute."""

    id: _Id
    amount: int
    currency: str
    status: str
    payment_intent: str | None = None


_notice: Final = msgspec.json.Decoder(Notice)


def decode(body: bytes, *, livemode: bool) -> Notice:
    """The event in a body whose signature was checked, or BadWebhook."""
    try:
        notice = _notice.decode(body)
    except UNREADABLE as error:
        raise BadWebhook(f"the body is not an event: {str(error)[:200]}", field="$") from error
    if notice.livemode is not livemode:
        expected = "live" if livemode else "test"
        raise BadWebhook(f"wrong mode: livemode must be {str(livemode).lower()} here, this is a {expected} endpoint")
    return notice


def encode(*, event_id: str, kind: str, created: int, api_version: str, thing: Mapping[str, Any]) -> bytes:
    """An event of the test mode, as a provider sends it."""
    event = {
        "id": event_id,
        "object": "event",
        "api_version": api_version,
        "created": created,
        "data": {"object": thing},
        "livemode": False,
        "pending_webhooks": 1,
        "request": {"id": None, "idempotency_key": None},
        "type": kind,
    }
    return msgspec.json.encode(event)
