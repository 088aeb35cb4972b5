"""Paying in, and paying back."""

import time
from collections.abc import Callable
from typing import Final
from urllib.parse import quote, urlsplit

from penstock.sdk.errors import InvalidArgument, WaitTimeout
from penstock.sdk.protocol import Listing, Request, Steps, attempts, call, identifier
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page

_POLL_FIRST_S: Final = 0.1
_POLL_MAX_S: Final = 2.0
_POLL_GROWTH: Final = 1.3
_PAY: Final = "/pay/"


class ProviderEvents(Resource[X]):
    """What the payment provider told; operators only."""

    @listing
    def list(self, *, state: str | None = None, limit: int | None = None) -> Listing[rest.ProviderEvent]:
        """All of them, newest first."""
        return Listing(
            path="/billing/provider-events", answer=Page[rest.ProviderEvent], query={"state": state}, limit=limit
        )

    @operation
    def get(self, event_id: str) -> Steps[rest.ProviderEvent]:
        """One event with its body."""
        return call("GET", _event(event_id), rest.ProviderEvent)

    @operation
    def accept(self, event_id: str, *, reason: str, amount_microusd: int | None = None) -> Steps[rest.ProviderEvent]:
        """Credit a payment that is held for review: what was paid, or this amount."""
        body = rest.ProviderEventAccept(reason=reason, amount_microusd=amount_microusd)
        return call("POST", f"{_event(event_id)}/accept", rest.ProviderEvent, body=body, create=True)

    @operation
    def discard(self, event_id: str, *, reason: str) -> Steps[rest.ProviderEvent]:
        """Put it aside; it credits nothing."""
        body = rest.ProviderEventDiscard(reason=reason)
        return call("POST", f"{_event(event_id)}/discard", rest.ProviderEvent, body=body, create=True)


class Payments(Resource[X]):
    """The organisation's payments."""

    def __init__(self, executor: X) -> None:
        super().__init__(executor)
        self.provider_events = ProviderEvents(executor)

    @operation
    def topup(self, amount_microusd: int) -> Steps[rest.Payment]:
        """Begin a payment; a person pays at its `checkout_url`."""
        body = rest.TopupCreate(amount_microusd=amount_microusd)
        return call("POST", "/billing/topups", rest.Payment, body=body, create=True)

    @operation
    def pay(self, payment: rest.Payment) -> Steps[None]:
        """Pay without a browser; with the local provider of a development install only."""
        path = urlsplit(payment.checkout_url).path
        if payment.provider != "local" or not path.startswith(_PAY):
            raise InvalidArgument("only payments of the local provider can be paid this way", field="payment")
        return attempts(Request(method="POST", path=f"{path}/pay"), type(None), repeatable=True)

    @operation
    def wait(
        self,
        payment_id: str,
        *,
        timeout_s: float = 900.0,
        on_change: Callable[[rest.Payment], None] | None = None,
    ) -> Steps[rest.Payment]:
        """The payment as soon as it is not open any more; WaitTimeout after `timeout_s`."""
        return _wait(_payment(payment_id), timeout_s, on_change)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Payment]:
        """All payments, newest first."""
        return Listing(path="/billing/payments", answer=Page[rest.Payment], limit=limit)

    @operation
    def get(self, payment_id: str) -> Steps[rest.Payment]:
        """One payment with its refunds."""
        return call("GET", _payment(payment_id), rest.Payment)

    @operation
    def refund(self, payment_id: str, amount_microusd: int, *, reason: str) -> Steps[rest.Refund]:
        """Pay back a part of a payment; operators only."""
        identifier("pay", payment_id, name="payment_id")
        body = rest.RefundCreate(payment_id=payment_id, amount_microusd=amount_microusd, reason=reason)
        return call("POST", "/billing/refunds", rest.Refund, body=body, create=True)

    @operation
    def retry_refund(self, refund_id: str) -> Steps[rest.Refund]:
        """Ask the provider once more about a refund; operators only."""
        path = f"/billing/refunds/{identifier('rfd', refund_id, name='refund_id')}/retry"
        return call("POST", path, rest.Refund, create=True)


def _payment(payment_id: str) -> str:
    return f"/billing/payments/{identifier('pay', payment_id, name='payment_id')}"


def _event(event_id: str) -> str:
    return f"/billing/provider-events/{quote(event_id, safe='')}"


def _wait(path: str, timeout_s: float, on_change: Callable[[rest.Payment], None] | None) -> Steps[rest.Payment]:
    ends_at = time.monotonic() + timeout_s
    pause_s, seen = 0.0, ""
    while True:
        payment = yield from call("GET", path, rest.Payment, delay_s=pause_s)
        if on_change is not None and payment.state != seen:
            on_change(payment)
        seen = payment.state
        if payment.state != "open":
            return payment
        pause_s = min(_POLL_MAX_S, max(_POLL_FIRST_S, pause_s * _POLL_GROWTH))
        if time.monotonic() + pause_s > ends_at:
            raise WaitTimeout(f"{payment.id} is still {payment.state} after {timeout_s:g} s")
