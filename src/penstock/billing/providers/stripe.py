"""Stripe, by its own library: hosted checkout pages and refunds.

The ids of our payment and refund are the idempotency keys, and stand in the metadata of what Stripe makes of them.
Stripe forgets such a key after a day, so a refund that is asked for again is looked for first.
"""

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, TypeVar

import aiohttp
import stripe
from stripe import StripeClient

from penstock.billing.errors import ProviderAway
from penstock.billing.paymentmodel import CENT_MICROUSD, Payment
from penstock.billing.providers import events, signature
from penstock.billing.providers.events import Notice
from penstock.billing.providers.port import Checkout, RefundAnswer, RefundOrder, RefundStatus, ReturnUrls
from penstock.billing.providers.signature import Secrets
from penstock.kit.telemetry import logger

if TYPE_CHECKING:
    from stripe.params.checkout import SessionCreateParams

T = TypeVar("T")

NAME: Final = "stripe"
#: The shapes of requests and answers that this module was written for.
API_VERSION: Final = "2026-10-28.endive"
TIMEOUT_S: Final = 15.0
RETRIES_MAX: Final = 2
_LIVE: Final = ("sk_live_", "rk_live_")
_REFUNDS_MAX: Final = 100
#: What people read on the page and on their card's statement.
_PRODUCT: Final = "Top-up"
_STATUS: Final = {
    "succeeded": RefundStatus.SUCCEEDED,
    "failed": RefundStatus.FAILED,
    "canceled": RefundStatus.FAILED,
}

_log = logger(__name__)


class Stripe:
    """The account that an API key belongs to."""

    name: str = NAME

    def __init__(self, api_key: str, secrets: Secrets, *, api_base: str = "") -> None:
        self._secrets = secrets
        self._livemode = api_key.startswith(_LIVE)
        self._http = stripe.AIOHTTPClient(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        self._client = StripeClient(
            api_key,
            stripe_version=API_VERSION,
            base_addresses={"api": api_base} if api_base else {},
            max_network_retries=RETRIES_MAX,
            http_client=self._http,
        )

    def parse(self, body: bytes, signed: str) -> Notice:
        """The event that Stripe signed."""
        signature.verify(body, signed, self._secrets)
        return events.decode(body, livemode=self._livemode)

    async def checkout(self, payment: Payment, urls: ReturnUrls) -> Checkout:
        """A hosted page."""
        try:
            made = await _asked(
                self._client.v1.checkout.sessions.create_async(
                    params=_session(payment, urls), options={"idempotency_key": payment.id}
                )
            )
        except (stripe.InvalidRequestError, stripe.CardError) as error:
            raise _away(error) from error
        return Checkout(session_id=made.id, url=made.url or "")

    async def refund(self, order: RefundOrder) -> RefundAnswer:
        """Pay back to where it came from."""
        if order.repeated and (found := await self._find(order)) is not None:
            return found
        try:
            made = await _asked(
                self._client.v1.refunds.create_async(
                    params={
                        "payment_intent": order.intent_id,
                        "amount": order.amount_microusd // CENT_MICROUSD,
                        "metadata": {"refund_id": order.refund_id, "payment_id": order.payment_id},
                    },
                    options={"idempotency_key": order.refund_id},
                )
            )
        except (stripe.InvalidRequestError, stripe.CardError) as error:
            return RefundAnswer(id=None, status=RefundStatus.FAILED, failure=str(error.user_message or error)[:500])
        return _answer(made)

    async def refund_status(self, provider_refund_id: str) -> RefundAnswer:
        """Ask again."""
        try:
            return _answer(await _asked(self._client.v1.refunds.retrieve_async(provider_refund_id)))
        except stripe.InvalidRequestError as error:
            raise _away(error) from error

    async def close(self) -> None:
        """Give up connections."""
        await self._http.close_async()

    async def _find(self, order: RefundOrder) -> RefundAnswer | None:
        try:
            listed = await _asked(
                self._client.v1.refunds.list_async(params={"payment_intent": order.intent_id, "limit": _REFUNDS_MAX})
            )
        except stripe.InvalidRequestError:
            return None
        for refund in listed.data:
            if refund.metadata is not None and refund.metadata.to_dict().get("refund_id") == order.refund_id:
                return _answer(refund)
        return None


def _session(payment: Payment, urls: ReturnUrls) -> "SessionCreateParams":
    return {
        "mode": "payment",
        "client_reference_id": payment.id,
        "metadata": {"payment_id": payment.id},
        "payment_intent_data": {"metadata": {"payment_id": payment.id}},
        "line_items": [
            {
                "quantity": 1,
                "price_data": {
                    "currency": payment.currency.lower(),
                    "unit_amount": payment.amount_microusd // CENT_MICROUSD,
                    "product_data": {"name": _PRODUCT},
                },
            }
        ],
        # What is paid must be what was asked for.
        "adaptive_pricing": {"enabled": False},
        "success_url": urls.success,
        "cancel_url": urls.cancel,
    }


def _answer(refund: stripe.Refund) -> RefundAnswer:
    status = _STATUS.get(refund.status or "", RefundStatus.PENDING)
    return RefundAnswer(id=refund.id, status=status, failure=getattr(refund, "failure_reason", None) or "")


async def _asked(call: Awaitable[T]) -> T:
    """What Stripe answers. Requests that it refuses stay its own errors; everything else is ProviderAway."""
    try:
        return await call
    except (stripe.InvalidRequestError, stripe.CardError):
        raise
    except (stripe.StripeError, aiohttp.ClientError, TimeoutError) as error:
        raise _away(error) from error


def _away(error: Exception) -> ProviderAway:
    _log.warning("stripe_away", error=type(error).__name__, detail=str(error)[:500])
    return ProviderAway("the payment provider cannot answer now; try again", retry_after_s=5)
