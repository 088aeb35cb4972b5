"""A provider for development that behaves like the real one, but for the money.

Its checkout page is one of our own (`paypage.py`). Whoever presses Pay makes it send the same signed events over real
HTTP to the same webhook. All its ids follow from ours and the secret: they cannot be guessed, and asking twice makes no
second.
"""

import hmac
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

from penstock.billing.errors import ProviderAway
from penstock.billing.paymentmodel import CENT_MICROUSD, Payment
from penstock.billing.providers import events, signature
from penstock.billing.providers.events import Notice
from penstock.billing.providers.port import Checkout, RefundAnswer, RefundOrder, RefundStatus, ReturnUrls
from penstock.billing.providers.signature import Secrets

NAME: Final = "local"
API_VERSION: Final = "2026-10-28.endive"
TIMEOUT_S: Final = 10.0


class Local:
    """Plays a provider whose page is at `pay_url`, and tells `webhook_url` what happens."""

    name: str = NAME

    def __init__(self, secrets: Secrets, *, pay_url: str, webhook_url: str) -> None:
        self._secrets = secrets
        self._pay_url = pay_url
        self._webhook_url = webhook_url
        self._http: aiohttp.ClientSession | None = None

    def parse(self, body: bytes, signed: str) -> Notice:
        """The event that somebody signed who knows the secret."""
        signature.verify(body, signed, self._secrets)
        return events.decode(body, livemode=False)

    async def checkout(self, payment: Payment, urls: ReturnUrls) -> Checkout:  # noqa: ARG002 - people stay on the page
        """The page of this payment."""
        session_id = self._id("cs", payment.id)
        return Checkout(session_id=session_id, url=f"{self._pay_url}/{session_id}")

    async def refund(self, order: RefundOrder) -> RefundAnswer:
        """Accepted at once, and confirmed by an event."""
        refund = {
            "id": self._id("re", order.refund_id),
            "object": "refund",
            "amount": order.amount_microusd // CENT_MICROUSD,
            "currency": "usd",
            "payment_intent": order.intent_id,
            "metadata": {"refund_id": order.refund_id, "payment_id": order.payment_id},
        }
        await self._tell("refund.created", {**refund, "status": "pending"})
        await self._tell("refund.updated", {**refund, "status": "succeeded"})
        return RefundAnswer(id=str(refund["id"]), status=RefundStatus.PENDING)

    async def refund_status(self, provider_refund_id: str) -> RefundAnswer:
        """Nothing fails here."""
        return RefundAnswer(id=provider_refund_id, status=RefundStatus.SUCCEEDED)

    async def pay(self, payment: Payment) -> None:
        """Somebody pressed Pay."""
        await self._tell("checkout.session.completed", self._session(payment, status="complete", paid=True))

    async def cancel(self, payment: Payment) -> None:
        """Somebody pressed Cancel."""
        await self._tell("checkout.session.expired", self._session(payment, status="expired", paid=False))

    async def close(self) -> None:
        """Give up connections."""
        if self._http is not None:
            await self._http.close()

    def _session(self, payment: Payment, *, status: str, paid: bool) -> Mapping[str, Any]:
        return {
            "id": payment.session_id,
            "object": "checkout.session",
            "amount_total": payment.amount_microusd // CENT_MICROUSD,
            "currency": payment.currency.lower(),
            "client_reference_id": payment.id,
            "livemode": False,
            "metadata": {"payment_id": payment.id},
            "mode": "payment",
            "payment_intent": self._id("pi", payment.id) if paid else None,
            "payment_status": "paid" if paid else "unpaid",
            "status": status,
        }

    def _id(self, prefix: str, of: str) -> str:
        digest = hmac.digest(self._secrets.current.encode(), f"{prefix}/{of}".encode(), "sha256").hex()
        return f"{prefix}_local_{digest[:40]}"

    async def _tell(self, kind: str, thing: Mapping[str, Any]) -> None:
        """One event, as a provider delivers it."""
        now = time.time()
        event_id = self._id("evt", f"{kind}/{thing['id']}")
        body = events.encode(event_id=event_id, kind=kind, created=int(now), api_version=API_VERSION, thing=thing)
        headers = {
            "Content-Type": "application/json",
            signature.HEADER: signature.sign(body, self._secrets.current, at=now),
        }
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        try:
            async with self._http.post(self._webhook_url, data=body, headers=headers) as response:
                if response.status != 200:
                    raise ProviderAway(f"the webhook answered {response.status}; try again")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ProviderAway("the webhook could not be reached; try again") from error
