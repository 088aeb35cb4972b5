"""Money that comes, in whatever order and number its events do."""

import asyncio
from itertools import permutations
from typing import Any

import pytest

from penstock.billing.errors import NoPayments, NotHeld, ProviderAway, TooManyOpen
from penstock.billing.paymentmodel import InboxState, PaymentTerms
from penstock.billing.providers import events
from penstock.billing.providers.port import ReturnUrls
from penstock.billing.service import inbox, topups
from penstock.billing.service.topups import Topups
from penstock.identity.model import Role
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.kit.idempotency import Once

from .till import OPERATOR, Till, caller

URLS = ReturnUrls(success="https://a.example", cancel="https://b.example")


async def test_a_payment_is_credited_once_however_often_it_is_told(till: Till) -> None:
    payment = await till.topup()
    await asyncio.gather(
        *(
            till.tell("checkout.session.completed", till.session(payment), event_id=f"evt_same_{payment.id}")
            for _ in range(50)
        ),
        *(till.tell("checkout.session.completed", till.session(payment)) for _ in range(5)),
        till.tell("checkout.session.async_payment_succeeded", till.session(payment)),
    )
    await asyncio.gather(*(till.payments.sweep_events() for _ in range(4)))
    assert await till.balances() == (20_000_000, 0, 20_000_000)
    assert await till.transfers() == [f"payment/{payment.id}"]
    assert await till.facts(payment) == [("payments.balance_credited", 1)]
    async with till.db.read() as conn:
        audited = await conn.fetch("select action, correlation_id from kit.audit where target_id = $1", payment.id)
        posted = await conn.fetchval(
            "select correlation_id from billing.transfers where organisation_id = $1", till.org
        )
    assert [row["action"] for row in audited] == ["payments.create", "payments.credit"]
    assert {row["correlation_id"] for row in audited} == {payment.correlation_id} == {posted}
    assert await till.states() == {"applied"}


async def test_money_finds_a_payment_whose_page_was_never_noted(till: Till) -> None:
    """The process died between the provider's answer and writing it down."""
    till.provider.away = True
    with pytest.raises(ProviderAway):
        await till.topup()
    async with till.db.read() as conn:
        [payment] = await topups.page(conn, till.owner, before="", limit=9)
    assert (payment.state, payment.session_id) == ("open", None)
    assert (await till.told("checkout.session.completed", till.session(payment)))[0] == "applied"
    assert await till.balances() == (20_000_000, 0, 20_000_000)
    assert (await till.look(payment)).session_id == f"cs_{payment.id}"


async def test_the_same_key_gives_a_page_to_the_payment_that_has_none(till: Till) -> None:
    use, once = Topups(till.db, till.provider, URLS), Once.of(scope="s", key="k", operation="o", body=b"")
    till.provider.away = True
    with pytest.raises(ProviderAway):
        await use.create(till.owner, once, 5_000_000)
    till.provider.away = False
    made = await use.create(till.owner, once, 5_000_000)
    assert made.checkout_url
    assert await use.create(till.owner, once, 5_000_000) == made


async def test_a_payment_without_a_page_lapses_and_money_that_comes_still_counts(till: Till) -> None:
    till.provider.away = True
    with pytest.raises(ProviderAway):
        await till.topup()
    till.terms = PaymentTerms(abandoned_s=0)
    await till.payments.sweep_events()
    async with till.db.read() as conn:
        [payment] = await topups.page(conn, till.owner, before="", limit=9)
    assert payment.state == "expired"
    await till.told("checkout.session.completed", till.session(payment))
    assert (await till.balances())[0] == 20_000_000
    assert await till.facts(payment) == [("payments.failed", 1), ("payments.balance_credited", 2)]


async def test_who_may_pay_and_how_much(till: Till) -> None:
    use = Topups(till.db, till.provider, URLS)
    for role in (Role.ADMIN, Role.DEVELOPER, Role.VIEWER):
        with pytest.raises(Denied):
            await use.create(caller(till.org, role), None, 20_000_000)
    assert await use.create(caller(till.org, Role.BILLING), None, 20_000_000)
    for amount in (0, -10_000, 999_999, 1_000_001, 10**18):
        with pytest.raises(Invalid):
            await use.create(till.owner, None, amount)
    with pytest.raises(NoPayments):
        await Topups(till.db, None, URLS).create(till.owner, None, 20_000_000)


async def test_nobody_opens_pages_without_end(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topups, "OPEN_MAX", 2)
    await till.topup()
    await till.topup()
    with pytest.raises(TooManyOpen):
        await till.topup()
    assert await till.topup(who=Till(till.db).owner)


async def test_payments_are_the_organisations_own(till: Till) -> None:
    payment = await till.topup()
    stranger = Till(till.db).owner
    async with till.db.read() as conn:
        assert await topups.page(conn, stranger, before="", limit=9) == []
        with pytest.raises(NotFound):
            await topups.show(conn, stranger, payment.id)
        shown, _ = await topups.show(conn, OPERATOR, payment.id)
    assert shown == payment


STRANGE: list[tuple[dict[str, Any], str, str]] = [
    ({"client_reference_id": None, "metadata": {}, "id": "cs_unknown"}, "unmatched", "no payment"),
    ({"metadata": {"payment_id": "pay_" + "0" * 26}, "id": "cs_unknown"}, "unmatched", "no payment"),
    ({"amount_total": -1}, "rejected", "below 0"),
    ({"amount_total": None}, "rejected", "below 0"),
    ({"amount_total": "much"}, "rejected", "not the shape"),
    ({"amount_total": 0, "payment_status": "no_payment_required"}, "applied", "nothing was paid"),
    ({"amount_total": 10**18}, "held", "paid 1000000000000000000 cents"),
    ({"amount_total": 10**30}, "held", "cents"),
    ({"amount_total": 1999}, "held", "paid 1999 cents, not 2000"),
    ({"currency": "eur"}, "held", "paid in EUR"),
    ({"id": "cs_another"}, "held", "another checkout page"),
    ({"payment_status": "unpaid"}, "applied", "not paid yet"),
]


async def test_what_is_not_what_was_asked_for_is_never_credited(till: Till) -> None:
    for changes, state, says in STRANGE:
        payment = await till.topup()
        outcome = await till.told("checkout.session.completed", till.session(payment, **changes))
        assert outcome[0] == state, changes
        assert says in outcome[1], changes
        assert (await till.look(payment)).state == "open"
    assert await till.transfers() == []


async def test_another_providers_event_is_not_for_this_payment(till: Till) -> None:
    payment = await till.topup()
    async with till.db.transaction() as tx:
        await tx.execute("update billing.payments set provider = 'another' where id = $1", payment.id)
    assert (await till.told("checkout.session.completed", till.session(payment)))[0] == "unmatched"


async def test_an_unknown_type_is_ignored(till: Till) -> None:
    assert (await till.told("customer.created", {"id": "cus_1"}))[0] == "ignored"


async def test_any_order_of_payment_and_refund_ends_alike(till: Till) -> None:
    """The refund was made at the provider; a stale failure of the payment is mixed in."""
    for order in permutations(["completed", "refunded", "charge", "failed"]):
        await ends_alike(Till(till.db), order)


async def ends_alike(till: Till, order: tuple[str, ...]) -> None:
    payment = await till.topup()
    things: dict[str, tuple[str, dict[str, Any]]] = {
        "completed": ("checkout.session.completed", till.session(payment)),
        "refunded": ("refund.created", till.refund_object(payment, 5_000_000)),
        "charge": (
            "charge.refunded",
            {"id": "ch_1", "amount_refunded": 500, "currency": "usd", "payment_intent": f"pi_{payment.id}"},
        ),
        "failed": ("checkout.session.async_payment_failed", till.session(payment, payment_status="unpaid")),
    }
    for name in order:
        await till.tell(*things[name])
        await till.payments.sweep_events()
    for _ in range(3):
        await till.due()
        await till.payments.sweep_events()
    assert await till.balances() == (15_000_000, 0, 15_000_000)
    assert (await till.look(payment)).refunded_microusd == 5_000_000
    assert await till.states() == {"applied"}
    versions = [version for _, version in await till.facts(payment)]
    assert versions == list(range(1, len(versions) + 1))


async def test_what_waits_in_vain_is_told_to_operators(till: Till) -> None:
    payment = await till.paid()
    foreign = {**till.refund_object(payment, 1_000_000), "payment_intent": "pi_of_another_shop"}
    unexplained = {"id": "ch_1", "amount_refunded": 7, "currency": "usd", "payment_intent": f"pi_{payment.id}"}
    first, second = await till.tell("refund.created", foreign), await till.tell("charge.refunded", unexplained)
    await till.payments.sweep_events()
    assert (await till.outcome(first))[0] == (await till.outcome(second))[0] == "waiting"
    till.terms = PaymentTerms(wait_s=0, explain_s=0)
    await till.due()
    await till.payments.sweep_events()
    assert (await till.outcome(first))[0] == "unmatched"
    assert (await till.outcome(second))[0] == "held"
    assert await till.balances() == (20_000_000, 0, 20_000_000)


async def test_an_event_that_cannot_be_handled_holds_up_nobody(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    payment = await till.topup()
    bad = await till.tell("checkout.session.completed", till.session(payment))
    async with till.db.transaction() as tx:
        await tx.execute(
            "insert into billing.transfers (id, kind, organisation_id) values ($1, 'payment', $2)",
            f"payment/{payment.id}",
            till.org,
        )
    await till.payments.sweep_events()
    assert (await till.outcome(bad))[0] == "received"
    other = await till.paid(who=Till(till.db).owner)
    assert other.state == "succeeded"
    assert (await till.look(payment)).state == "open"
    monkeypatch.setattr(inbox, "ATTEMPTS_MAX", 1)
    await till.due()
    await till.payments.sweep_events()
    assert (await till.outcome(bad))[0] == "held"


@pytest.mark.parametrize("field", ["currency", "payment_status", "client_reference_id", "payment_intent"])
async def test_a_zero_character_holds_its_own_event_alone(till: Till, field: str) -> None:
    payment, other = await till.topup(), await till.topup()
    bad = await till.tell("checkout.session.completed", till.session(payment) | {field: "u\0sd"})
    good = await till.tell("checkout.session.completed", till.session(other))
    await till.payments.sweep_events()
    assert (await till.outcome(bad))[0] == "held"
    assert (await till.outcome(good))[0] == "applied"
    assert (await till.look(payment)).state == "open"


async def test_one_id_with_two_bodies_is_held_and_told(till: Till) -> None:
    payment = await till.topup()
    first = await till.tell("checkout.session.completed", till.session(payment))
    body = events.encode(
        event_id=first,
        kind="checkout.session.completed",
        created=1,
        api_version="x",
        thing=till.session(payment, amount_total=999_00),
    )
    assert not await inbox.receive(till.db, till.provider.name, events.decode(body, livemode=False), body)
    assert not await inbox.receive(till.db, till.provider.name, events.decode(body, livemode=False), body)
    async with till.db.read() as conn:
        held = await inbox.page(conn, OPERATOR, state=InboxState.HELD, before=None, limit=100)
    mine = [event for event in held if event.event_id.startswith(first)]
    assert len(mine) == 2
    assert all("two_bodies_under_one_id" in event.reason for event in mine)
    await till.payments.sweep_events()
    assert (await till.look(payment)).state == "open"


async def test_an_event_that_was_applied_stays_so_when_another_body_comes(till: Till) -> None:
    payment = await till.topup()
    first = await till.tell("checkout.session.completed", till.session(payment))
    await till.payments.sweep_events()
    body = events.encode(event_id=first, kind="refund.created", created=1, api_version="x", thing={"id": "re_1"})
    assert not await inbox.receive(till.db, till.provider.name, events.decode(body, livemode=False), body)
    assert (await till.outcome(first))[0] == "applied"
    async with till.db.read() as conn:
        held = await inbox.page(conn, OPERATOR, state=InboxState.HELD, before=None, limit=100)
    assert [event.type for event in held if event.event_id.startswith(first)] == ["refund.created"]


async def test_operators_credit_what_is_held_once(till: Till) -> None:
    payment = await till.topup()
    event_id = await till.tell("checkout.session.completed", till.session(payment, amount_total=1999))
    await till.payments.sweep_events()

    async def accept() -> object:
        async with till.db.transaction() as tx:
            return await inbox.accept(tx, OPERATOR, event_id, amount_microusd=None, reason="a bank's fee")

    results = await asyncio.gather(*(accept() for _ in range(5)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["NotHeld"] * 4 + ["Received"]
    assert await till.balances() == (19_990_000, 0, 19_990_000)
    assert (await till.look(payment)).amount_microusd == 19_990_000
    assert await till.outcome(event_id) == ("applied", "a bank's fee")
    async with till.db.read() as conn:
        audited = await conn.fetchval(
            "select actor_id from kit.audit where action = 'provider_events.accept' and target_id = $1", event_id
        )
    assert audited == "usr_a"


async def test_what_cannot_be_credited_as_it_is_needs_an_amount(till: Till) -> None:
    payment = await till.topup()
    event_id = await till.tell("checkout.session.completed", till.session(payment, currency="eur"))
    await till.payments.sweep_events()
    async with till.db.transaction() as tx:
        with pytest.raises(Invalid) as caught:
            await inbox.accept(tx, OPERATOR, event_id, amount_microusd=None, reason="r")
        assert caught.value.field == "amount_microusd"
        await inbox.accept(tx, OPERATOR, event_id, amount_microusd=21_000_000, reason="by today's rate")
    assert (await till.balances())[0] == 21_000_000


async def test_what_is_discarded_credits_nothing_and_stays_so(till: Till) -> None:
    payment = await till.topup()
    event_id = await till.tell("checkout.session.completed", till.session(payment, amount_total=1))
    await till.payments.sweep_events()
    async with till.db.transaction() as tx:
        for who in (till.owner, caller(till.org, Role.ADMIN)):
            with pytest.raises(Denied):
                await inbox.discard(tx, who, event_id, reason="r")
        with pytest.raises(NotFound):
            await inbox.discard(tx, OPERATOR, "evt_none", reason="r")
        await inbox.discard(tx, OPERATOR, event_id, reason="a test of theirs")
        with pytest.raises(NotHeld):
            await inbox.accept(tx, OPERATOR, event_id, amount_microusd=None, reason="r")
    assert await till.outcome(event_id) == ("discarded", "a test of theirs")
    assert await till.transfers() == []


async def test_events_are_listed_by_state_and_page(till: Till) -> None:
    for _ in range(3):
        await till.told("customer.created", {"id": "cus_1"})
    async with till.db.read() as conn:
        first = await inbox.page(conn, OPERATOR, state=InboxState.IGNORED, before=None, limit=2)
        last = (first[-1].received_at, first[-1].event_id)
        rest = await inbox.page(conn, OPERATOR, state=None, before=last, limit=2)
        assert [event.event_id[-2:] for event in [*first, *rest[:1]]] == ["_2", "_1", "_0"]
        assert await inbox.page(conn, OPERATOR, state=InboxState.RECEIVED, before=None, limit=2) == []
        with pytest.raises(Denied):
            await inbox.page(conn, till.owner, state=None, before=None, limit=2)
