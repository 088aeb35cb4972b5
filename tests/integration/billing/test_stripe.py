"""Stripe's client against a server that plays the few endpoints of its API that are used, with its shapes.

Stripe itself was never called.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from penstock.billing.errors import BadWebhook, ProviderAway
from penstock.billing.paymentmodel import Payment
from penstock.billing.providers import events, signature
from penstock.billing.providers import stripe as module
from penstock.billing.providers.port import RefundAnswer, RefundOrder, RefundStatus, ReturnUrls
from penstock.billing.providers.signature import Secrets
from penstock.billing.providers.stripe import API_VERSION, Stripe

from .till import Till

SECRETS = Secrets(current="whsec_0123456789abcdef")
URLS = ReturnUrls(success="https://cloud.example/pay/done", cancel="https://cloud.example/pay/cancelled")


@dataclass
class FakeStripe:
    """Remembers by idempotency key, as Stripe does, and what it was asked."""

    requests: list[tuple[str, dict[str, str], dict[str, str]]] = field(default_factory=list[Any])
    by_key: dict[str, dict[str, Any]] = field(default_factory=dict[str, Any])
    refunds: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    failures: list[tuple[int, dict[str, Any]]] = field(default_factory=list[Any])
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        form = {name: str(value) for name, value in (await request.post()).items()} or dict(request.query)
        self.requests.append((f"{request.method} {request.path}", form, dict(request.headers)))
        if self.failures:
            status, body = self.failures.pop(0)
            return web.json_response(body, status=status)
        key = request.headers.get("Idempotency-Key", "")
        if key in self.by_key:
            return web.json_response(self.by_key[key])
        answer = self._answer(request.method, request.path, form)
        if key:
            self.by_key[key] = answer
        return web.json_response(answer)

    def _answer(self, method: str, path: str, form: dict[str, str]) -> dict[str, Any]:
        if path == "/v1/checkout/sessions":
            number = len(self.by_key)
            url = f"https://checkout.stripe.com/c/pay/cs_test_{number}"
            return {"id": f"cs_test_{number}", "object": "checkout.session", "url": url, "payment_intent": None}
        if method == "POST":
            self.refunds.append(
                {
                    "id": f"re_{len(self.refunds)}",
                    "object": "refund",
                    "amount": int(form["amount"]),
                    "currency": "usd",
                    "status": "pending",
                    "payment_intent": form["payment_intent"],
                    "metadata": {"refund_id": form["metadata[refund_id]"]},
                }
            )
            return self.refunds[-1]
        if path == "/v1/refunds":
            return {"object": "list", "data": self.refunds, "has_more": False, "url": "/v1/refunds"}
        return next(refund for refund in self.refunds if path == f"/v1/refunds/{refund['id']}")


@pytest.fixture
async def fake() -> AsyncIterator[FakeStripe]:
    served = FakeStripe()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", served.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


@pytest.fixture
async def stripe(fake: FakeStripe, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stripe]:
    monkeypatch.setattr("stripe.HTTPClient.INITIAL_DELAY", 0.001)
    monkeypatch.setattr("stripe.HTTPClient.MAX_DELAY", 0.001)
    made = Stripe("sk_test_4eC39HqLyjWDarjtT1zdp7dc", SECRETS, api_base=fake.url)
    yield made
    await made.close()


@pytest.fixture
async def payment(till: Till) -> Payment:
    return await till.topup(20_500_000)


def order(payment: Payment, *, repeated: bool = False) -> RefundOrder:
    return RefundOrder(
        refund_id="rfd_1", payment_id=payment.id, intent_id="pi_1", amount_microusd=5_000_000, repeated=repeated
    )


async def test_a_checkout_page_is_asked_for_exactly(stripe: Stripe, fake: FakeStripe, payment: Payment) -> None:
    made = await stripe.checkout(payment, URLS)
    assert (made.session_id, made.url) == ("cs_test_0", "https://checkout.stripe.com/c/pay/cs_test_0")
    assert await stripe.checkout(payment, URLS) == made
    [(line, form, headers), _] = fake.requests
    assert line == "POST /v1/checkout/sessions"
    assert form == {
        "mode": "payment",
        "client_reference_id": payment.id,
        "metadata[payment_id]": payment.id,
        "payment_intent_data[metadata][payment_id]": payment.id,
        "line_items[0][quantity]": "1",
        "line_items[0][price_data][currency]": "usd",
        "line_items[0][price_data][unit_amount]": "2050",
        "line_items[0][price_data][product_data][name]": "Top-up",
        "adaptive_pricing[enabled]": "false",
        "success_url": URLS.success,
        "cancel_url": URLS.cancel,
    }
    assert headers["Idempotency-Key"] == payment.id
    assert headers["Stripe-Version"] == API_VERSION
    assert headers["Authorization"] == "Bearer sk_test_4eC39HqLyjWDarjtT1zdp7dc"


async def test_a_refund_is_made_once(stripe: Stripe, fake: FakeStripe, payment: Payment) -> None:
    expected = RefundAnswer(id="re_0", status=RefundStatus.PENDING)
    assert await stripe.refund(order(payment)) == expected
    assert await stripe.refund(order(payment)) == expected
    line, form, headers = fake.requests[0]
    assert line == "POST /v1/refunds"
    assert form == {
        "payment_intent": "pi_1",
        "amount": "500",
        "metadata[refund_id]": "rfd_1",
        "metadata[payment_id]": payment.id,
    }
    assert headers["Idempotency-Key"] == "rfd_1"


async def test_a_refund_is_found_again_after_its_key_was_forgotten(
    stripe: Stripe, fake: FakeStripe, payment: Payment
) -> None:
    await stripe.refund(order(payment))
    fake.by_key.clear()
    fake.refunds[0]["status"] = "succeeded"
    assert await stripe.refund(order(payment, repeated=True)) == RefundAnswer(id="re_0", status=RefundStatus.SUCCEEDED)
    assert len(fake.refunds) == 1
    assert fake.requests[-1][:2] == ("GET /v1/refunds", {"payment_intent": "pi_1", "limit": "100"})
    assert (await stripe.refund_status("re_0")).status is RefundStatus.SUCCEEDED


async def test_what_passes_is_tried_again_a_few_times(stripe: Stripe, fake: FakeStripe, payment: Payment) -> None:
    fake.failures = [(500, {"error": {"type": "api_error"}}), (409, {"error": {"type": "invalid_request_error"}})]
    assert (await stripe.checkout(payment, URLS)).session_id
    assert {headers["Idempotency-Key"] for _, _, headers in fake.requests} == {payment.id}
    fake.failures = [(503, {"error": {"type": "api_error", "message": "down"}})] * 9
    asked = len(fake.requests)
    with pytest.raises(ProviderAway):
        await stripe.refund(order(payment))
    assert len(fake.requests) == asked + 1 + module.RETRIES_MAX


@pytest.mark.parametrize(
    ("status", "kind"), [(401, "invalid_request_error"), (429, "invalid_request_error"), (403, "invalid_request_error")]
)
async def test_our_own_troubles_with_stripe_are_not_the_customers(
    stripe: Stripe, fake: FakeStripe, payment: Payment, status: int, kind: str
) -> None:
    fake.failures = [(status, {"error": {"type": kind, "message": "no"}})] * 3
    with pytest.raises(ProviderAway):
        await stripe.refund(order(payment))


async def test_a_refund_that_stripe_refuses_has_failed(stripe: Stripe, fake: FakeStripe, payment: Payment) -> None:
    message = "Charge ch_1 has already been refunded."
    refusal = {"error": {"type": "invalid_request_error", "code": "charge_already_refunded", "message": message}}
    fake.failures = [(400, refusal)]
    answer = await stripe.refund(order(payment))
    assert (answer.id, answer.status) == (None, RefundStatus.FAILED)
    assert message in answer.failure
    fake.failures = [(400, refusal)]
    with pytest.raises(ProviderAway):
        await stripe.checkout(payment, URLS)


async def test_no_answer_is_no_answer(payment: Payment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stripe.HTTPClient.INITIAL_DELAY", 0.001)
    monkeypatch.setattr("stripe.HTTPClient.MAX_DELAY", 0.001)
    nobody = Stripe("sk_test_1", SECRETS, api_base="http://127.0.0.1:9")
    with pytest.raises(ProviderAway):
        await nobody.checkout(payment, URLS)
    await nobody.close()


async def test_events_are_believed_by_signature_and_mode(stripe: Stripe) -> None:
    body = events.encode(event_id="evt_1", kind="a.b", created=1, api_version=API_VERSION, thing={"id": "x"})
    header = signature.sign(body, SECRETS.current, at=time.time())
    assert stripe.parse(body, header).id == "evt_1"
    live = Stripe("sk_live_1", SECRETS)
    with pytest.raises(BadWebhook, match="wrong mode"):
        live.parse(body, header)
