"""Payments through the running api: the provider's webhook with every bad input of the list, the page of the local
provider, and refunds. The biller's part is run by the tests, on the same database."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from bad_inputs import Checks, rows
from penstock.billing.providers import events, signature
from penstock.billing.providers.port import Provider
from penstock.billing.providers.settings import PaymentSettings, make
from penstock.billing.service.payments import Payments
from penstock.kit import db
from penstock.kit.db import Database
from penstock.kit.ids import new_id

from .conftest import PAYMENTS_SECRET, PAYMENTS_SECRET_BEFORE, Answer, Api, People

#: From webhook-26 on, the rows are about webhooks that we send.
ROWS = [row_id for row_id in rows("webhook") if row_id < "webhook-26"]


class Desk:
    """What a test of payments needs: the api, its database, and a biller."""

    def __init__(self, api: Api, people: People, database: Database, provider: Provider) -> None:
        self.api = api
        self.people = people
        self.db = database
        self.payments = Payments(database, provider)

    async def topup(self, amount: int = 20_000_000, **headers: str) -> dict[str, Any]:
        answer = await self.api.call(
            "POST",
            "/billing/topups",
            key=self.people.stranger.key,
            json={"amount_microusd": amount},
            headers=headers,
        )
        assert answer.status == 201, answer.content
        return answer.json

    async def post(self, body: bytes, header: str | None = None, *, path: str = "/webhooks/local") -> Answer:
        header = signature.sign(body, PAYMENTS_SECRET, at=time.time()) if header is None else header
        return await self.api.call("POST", path, key="", body=body, headers={signature.HEADER: header})

    async def refused(self, body: bytes, header: str | None = None, *, says: str = "") -> None:
        """400 in the envelope, and nothing stored."""
        answer = await self.post(body, header)
        assert answer.status == 400, answer.content
        assert answer.error["code"] in ("billing.bad_signature", "billing.bad_webhook")
        assert says in answer.error["message"]
        assert await self.stored(body) == []

    async def taken(self, body: bytes) -> tuple[str, str]:
        """200, and what became of it."""
        answer = await self.post(body)
        assert answer.status == 200, answer.content
        await self.payments.sweep_events()
        [found] = await self.stored(body)
        return found

    async def stored(self, body: bytes) -> list[tuple[str, str]]:
        event_id = json.loads(body.removeprefix(b"\xef\xbb\xbf"))["id"]
        async with self.db.read() as conn:
            rows = await conn.fetch("select state, reason from billing.provider_events where event_id = $1", event_id)
        return [(row["state"], row["reason"]) for row in rows]

    async def credited(self, payment: dict[str, Any]) -> int:
        """How many ledger entries a payment has."""
        async with self.db.read() as conn:
            return await conn.fetchval(
                "select count(*) from billing.entries where transfer_id = $1", f"payment/{payment['id']}"
            )

    async def look(self, payment: dict[str, Any]) -> dict[str, Any]:
        answer = await self.api.call("GET", f"/billing/payments/{payment['id']}", key=self.people.stranger.key)
        assert answer.status == 200, answer.content
        return answer.json

    def event(self, payment: dict[str, Any], **changes: Any) -> bytes:
        kind = changes.pop("kind", "checkout.session.completed")
        session = {
            "id": payment["checkout_url"].rpartition("/")[2],
            "object": "checkout.session",
            "amount_total": payment["amount_microusd"] // 10_000,
            "currency": "usd",
            "payment_status": "paid",
            "client_reference_id": payment["id"],
            "payment_intent": f"pi_{payment['id']}",
            **changes,
        }
        return events.encode(event_id=new_id("evt"), kind=kind, created=1, api_version="", thing=session)


@pytest.fixture(scope="module")
async def desk(api: Api, people: People) -> AsyncIterator[Desk]:
    settings = PaymentSettings(
        payments_provider="local", payments_webhook_secret=PAYMENTS_SECRET, api_url=f"http://127.0.0.1:{api.port}"
    )
    provider = make(settings)
    assert provider is not None
    async with db.connect(api.database_url, lambda *_: None, name="test") as database:
        yield Desk(api, people, database, provider)
    await provider.close()


CHECKS = Checks()
row = CHECKS.row


@pytest.mark.parametrize("row_id", ROWS)
async def test_bad_webhooks_are_answered_as_listed(row_id: str, desk: Desk) -> None:
    payment = await desk.topup()
    await CHECKS[row_id](desk, payment)
    if row_id not in ("webhook-14", "webhook-16"):
        assert await desk.credited(payment) == 0
        assert (await desk.look(payment))["state"] == "open"
    assert "Traceback" not in desk.api.log.read_text()


def test_every_row_has_a_check() -> None:
    assert set(CHECKS) == set(ROWS)


@row("webhook-02")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    await desk.refused(desk.event(payment), "", says="missing")


@row("webhook-03")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    header = signature.sign(body, PAYMENTS_SECRET, at=time.time())
    for mac in (header[:-1], header + "0", f"t={int(time.time())},v1="):
        await desk.refused(body, mac, says="does not match")


@row("webhook-04")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    await desk.refused(body, signature.sign(body, PAYMENTS_SECRET_BEFORE, at=time.time()), says="does not match")


@row("webhook-06")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    header = signature.sign(body, PAYMENTS_SECRET, at=time.time() - 302)
    await desk.refused(body, header, says="timestamp outside the tolerance")


@row("webhook-07")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    header = signature.sign(body, PAYMENTS_SECRET, at=time.time() + 310)
    await desk.refused(body, header, says="timestamp outside the tolerance")


@row("webhook-08")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    await desk.refused(desk.event(payment), f"t=abc,v1={'0' * 64}", says="number of seconds")


@row("webhook-09")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    await desk.refused(body, signature.sign(body, PAYMENTS_SECRET, at=-time.time()), says="number of seconds")


@row("webhook-10")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    header = signature.sign(body, PAYMENTS_SECRET, at=time.time())
    again = json.dumps(json.loads(body)).encode()
    assert json.loads(again) == json.loads(body)
    await desk.refused(again, header, says="does not match")


@row("webhook-11")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    marked = b"\xef\xbb\xbf" + body
    await desk.refused(marked, signature.sign(body, PAYMENTS_SECRET, at=time.time()), says="does not match")
    await desk.refused(marked, says="not an event")


@row("webhook-13")
async def _(desk: Desk, _: dict[str, Any]) -> None:
    head = f"POST /api/v1/webhooks/local HTTP/1.1\r\nHost: localhost\r\nContent-Length: {5 << 20}\r\n\r\n"
    received, closed = await desk.api.raw(head.encode() + b"x" * 65536)
    assert received.startswith(b"HTTP/1.1 413")
    assert b"payload_too_large" in received
    assert closed


@row("webhook-14")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    first, second = await desk.post(body), await desk.post(body)
    assert (first.status, first.json["new"]) == (200, True)
    assert (second.status, second.json["new"]) == (200, False)
    await desk.payments.sweep_events()
    assert (await desk.post(body)).json["new"] is False
    await desk.payments.sweep_events()
    assert await desk.credited(payment) == 2


@row("webhook-16")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment)
    answers = await asyncio.gather(
        *(desk.post(body) for _ in range(100)), *(desk.payments.sweep_events() for _ in range(10))
    )
    assert [answer.status for answer in answers if answer] == [200] * 100
    assert sum(answer.json["new"] for answer in answers if answer) == 1
    await desk.payments.sweep_events()
    assert await desk.stored(body) == [("applied", "")]
    assert await desk.credited(payment) == 2
    async with desk.db.read() as conn:
        told = await conn.fetch("select type from kit.outbox where aggregate_id = $1", payment["id"])
    assert [fact["type"] for fact in told] == ["payments.balance_credited"]


@row("webhook-17")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment, id="cs_local_unknown", client_reference_id=None)
    assert (await desk.taken(body))[0] == "unmatched"


@row("webhook-18")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    body = desk.event(payment).replace(b'"livemode":false', b'"livemode":true')
    await desk.refused(body, says="wrong mode")


@row("webhook-19")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    assert (await desk.taken(desk.event(payment, amount_total=-1)))[0] == "rejected"


@row("webhook-20")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    assert await desk.taken(desk.event(payment, amount_total=0)) == ("applied", "nothing was paid")


@row("webhook-21")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    assert (await desk.taken(desk.event(payment, amount_total=10**18)))[0] == "held"


@row("webhook-23")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    assert (await desk.taken(desk.event(payment, currency="eur")))[0] == "held"


@row("webhook-25")
async def _(desk: Desk, payment: dict[str, Any]) -> None:
    before = _ignored()
    assert (await desk.taken(desk.event(payment, kind="customer.created")))[0] == "ignored"
    assert _ignored() == before + 1


def _ignored() -> float:
    return REGISTRY.get_sample_value("penstock_billing_provider_events_total", {"outcome": "ignored"}) or 0.0


async def test_a_webhook_needs_the_provider_that_is_set_up(desk: Desk) -> None:
    body = desk.event(await desk.topup())
    assert (await desk.post(body, path="/webhooks/stripe")).status == 404
    assert await desk.stored(body) == []
    forged = signature.sign(body, "whsec_somebody_elses", at=time.time())
    await desk.refused(body, forged, says="does not match")


async def test_a_person_pays_at_the_page_and_is_paid_back(desk: Desk) -> None:
    payment = await desk.topup()
    page = payment["checkout_url"]
    async with desk.api.session.get(page) as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/html")
        assert "form-action 'self'" in response.headers["Content-Security-Policy"]
    assert "No money moves" in text
    assert "$20.00" in text
    for _ in range(2):
        async with desk.api.session.post(f"{page}/pay") as response:
            assert response.status == 200, await response.text()
    await desk.payments.sweep_events()
    assert (await desk.look(payment))["state"] == "succeeded"
    assert await desk.credited(payment) == 2
    body = {"payment_id": payment["id"], "amount_microusd": 5_000_000, "reason": "by mistake"}
    answer = await desk.api.call("POST", "/billing/refunds", json=body)
    assert answer.status == 201, answer.content
    await desk.payments.sweep_refunds()
    await desk.payments.sweep_events()
    shown = await desk.look(payment)
    assert [(refund["state"], refund["amount_microusd"]) for refund in shown["refunds"]] == [("succeeded", 5_000_000)]
    async with desk.api.session.post(f"{page}/pay") as response:
        assert "This payment is succeeded" in await response.text()


async def test_a_person_turns_back(desk: Desk) -> None:
    payment = await desk.topup()
    async with desk.api.session.post(f"{payment['checkout_url']}/cancel") as response:
        assert response.status == 200
    await desk.payments.sweep_events()
    assert (await desk.look(payment))["state"] == "expired"


async def test_a_page_that_nobody_was_given_is_not_there(desk: Desk) -> None:
    root = f"http://127.0.0.1:{desk.api.port}/pay"
    for session in ("cs_local_" + "0" * 40, "x", "..%2f", "cs_local_'"):
        for method, path in (("GET", session), ("POST", f"{session}/pay"), ("POST", f"{session}/cancel")):
            async with desk.api.session.request(method, f"{root}/{path}") as response:
                assert response.status in (404, 405), (method, path)
                if session.startswith("cs_local_0"):
                    assert (response.status, response.content_type) == (404, "text/html")
    async with desk.api.session.get(f"{root}/done") as response:
        assert "confirmed" in await response.text()


async def test_one_payment_for_one_idempotency_key(desk: Desk) -> None:
    headers = {"Idempotency-Key": new_id("key")}
    made = await asyncio.gather(*(desk.topup(**headers) for _ in range(10)))
    assert all(payment == made[0] for payment in made)


@pytest.mark.parametrize("amount", [0, -1_000_000, 999_999, 1_000_001, 1_000_000_010_000, 10**18, 1.5, "20", None])
async def test_a_bad_amount_is_refused_by_name(desk: Desk, amount: Any) -> None:
    body = {"amount_microusd": amount}
    answer = await desk.api.call("POST", "/billing/topups", key=desk.people.stranger.key, json=body)
    assert answer.status == 400
    assert answer.error["field"] == "amount_microusd"


async def test_payments_of_one_organisation_look_absent_to_another(desk: Desk) -> None:
    payment = await desk.topup()
    theirs = await desk.api.call("GET", f"/billing/payments/{payment['id']}", key=desk.people.owner.key)
    unknown = await desk.api.call("GET", f"/billing/payments/pay_{'0' * 26}", key=desk.people.owner.key)
    assert theirs.status == unknown.status == 404
    assert theirs.error["message"] == f"no payment {payment['id']}"
    assert unknown.error["message"] == f"no payment pay_{'0' * 26}"
    listed = await desk.api.call("GET", "/billing/payments", key=desk.people.owner.key)
    assert payment["id"] not in str(listed.json)
    page = await desk.api.call("GET", "/billing/payments?limit=1", key=desk.people.stranger.key)
    assert [item["id"] for item in page.json["items"]] == [payment["id"]]
    more = await desk.api.call(
        "GET", f"/billing/payments?limit=1&cursor={page.json['next_cursor']}", key=desk.people.stranger.key
    )
    assert more.json["items"][0]["id"] < payment["id"]


async def test_operators_decide_about_what_is_held(desk: Desk) -> None:
    payment, other = await desk.topup(), await desk.topup()
    held, bad = desk.event(payment, amount_total=1500), desk.event(other, amount_total=7)
    assert (await desk.taken(held))[0] == (await desk.taken(bad))[0] == "held"
    held_id, bad_id = json.loads(held)["id"], json.loads(bad)["id"]
    listed = await desk.api.call("GET", "/billing/provider-events?state=held&limit=1")
    assert [item["event_id"] for item in listed.json["items"]] == [bad_id]
    cursor = listed.json["next_cursor"]
    listed = await desk.api.call("GET", f"/billing/provider-events?state=held&limit=1&cursor={cursor}")
    assert [item["event_id"] for item in listed.json["items"]] == [held_id]
    shown = await desk.api.call("GET", f"/billing/provider-events/{held_id}")
    assert shown.json["body"].encode() == held
    accepted = await desk.api.call(
        "POST", f"/billing/provider-events/{held_id}/accept", json={"reason": "a discount that we gave"}
    )
    assert (accepted.status, accepted.json["state"]) == (200, "applied")
    assert (await desk.look(payment))["amount_microusd"] == 15_000_000
    twice = await desk.api.call("POST", f"/billing/provider-events/{held_id}/accept", json={"reason": "r"})
    assert (twice.status, twice.error["code"]) == (409, "billing.not_held")
    discarded = await desk.api.call("POST", f"/billing/provider-events/{bad_id}/discard", json={"reason": "r"})
    assert discarded.json["state"] == "discarded"
    assert (await desk.look(other))["state"] == "open"
    for path in ("?state=nonsense", "?cursor=AAAA"):
        assert (await desk.api.call("GET", f"/billing/provider-events{path}")).status == 400
