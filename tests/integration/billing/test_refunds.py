"""Money that goes back: never more than came, and never what was spent."""

import asyncio
from typing import Any

import pytest

from penstock.billing.errors import NotRefundable, RefundWindowOver
from penstock.billing.model import REVENUE, Account, Kind, Transfer
from penstock.billing.paymentmodel import PaymentTerms
from penstock.billing.providers.port import RefundStatus
from penstock.billing.service import refunds
from penstock.billing.store import ledger
from penstock.kit.errors import Conflict, Denied, NotFound

from .till import OPERATOR, Till


async def spend(till: Till, amount: int) -> None:
    transfer = Transfer(
        id=f"usage/{till.org}",
        kind=Kind.USAGE,
        organisation_id=till.org,
        entries={Account.BALANCE.of(till.org): -amount, REVENUE: amount},
    )
    async with till.db.transaction() as tx:
        await ledger.post(tx, transfer)


async def test_a_refund_is_held_then_paid(till: Till) -> None:
    payment = await till.paid()
    refund = await till.refund(payment, 5_000_000)
    assert await till.balances() == (15_000_000, 5_000_000, 20_000_000)
    await till.payments.sweep_refunds()
    assert (await till.look_at_refund(refund)).state == "pending"
    assert await till.balances() == (15_000_000, 5_000_000, 20_000_000)
    notice = till.refund_object(payment, 5_000_000, refund=refund)
    assert (await till.told("refund.updated", notice))[0] == "applied"
    assert await till.told("refund.updated", notice) == ("applied", "known before")
    assert await till.told("refund.created", {**notice, "status": "pending"}) == ("applied", "known before")
    assert (await till.look_at_refund(refund)).state == "succeeded"
    assert await till.balances() == (15_000_000, 0, 15_000_000)
    assert await till.facts(payment) == [("payments.balance_credited", 1), ("payments.refunded", 2)]
    async with till.db.read() as conn:
        audited = await conn.fetchval(
            "select detail from kit.audit where action = 'payments.refund' and target_id = $1", payment.id
        )
    assert audited == {"amount_microusd": 5_000_000, "provider": till.provider.name, "reason": "asked for"}


async def test_it_does_not_matter_whether_answer_or_event_comes_first(till: Till) -> None:
    payment = await till.paid()
    refund = await till.refund(payment, 5_000_000)
    await till.told("refund.updated", till.refund_object(payment, 5_000_000, refund=refund))
    await till.payments.sweep_refunds()
    assert (await till.look_at_refund(refund)).state == "succeeded"
    assert till.provider.asked == []
    assert await till.balances() == (15_000_000, 0, 15_000_000)


@pytest.mark.parametrize("after", [RefundStatus.PENDING, RefundStatus.SUCCEEDED])
async def test_a_refund_that_fails_returns_to_the_balance(till: Till, after: RefundStatus) -> None:
    """Even after it was confirmed, when a bank sends it back."""
    payment = await till.paid()
    refund = await till.refund(payment, 20_000_000)
    till.provider.answer = after
    await till.payments.sweep_refunds()
    assert (await till.balances())[0] == 0
    failed = till.refund_object(payment, 20_000_000, refund=refund, status="failed", failure_reason="lost_card")
    await till.told("refund.failed", failed)
    await till.told("refund.updated", till.refund_object(payment, 20_000_000, refund=refund))
    found = await till.look_at_refund(refund)
    assert (found.state, found.failure) == ("failed", "lost_card")
    assert await till.balances() == (20_000_000, 0, 20_000_000)
    assert (await till.look(payment)).refunded_microusd == 0
    assert (await till.facts(payment))[-1][0] == "payments.refund_failed"
    assert await till.refund(payment, 20_000_000)


async def test_a_provider_that_refuses_ends_it(till: Till) -> None:
    payment = await till.paid()
    refund = await till.refund(payment, 1_000_000)
    till.provider.answer = RefundStatus.FAILED
    await till.payments.sweep_refunds()
    assert (await till.look_at_refund(refund)).state == "failed"
    assert await till.balances() == (20_000_000, 0, 20_000_000)


async def test_a_provider_that_is_away_is_asked_again_under_the_same_id(till: Till) -> None:
    payment = await till.paid()
    refund = await till.refund(payment, 1_000_000)
    till.provider.away = True
    for _ in range(3):
        await till.payments.sweep_refunds()
        await till.due()
    found = await till.look_at_refund(refund)
    assert (found.state, found.failure, found.attempts) == ("requested", "away", 3)
    till.provider.away = False
    await till.payments.sweep_refunds()
    assert (await till.look_at_refund(refund)).state == "pending"
    assert [(order.refund_id, order.repeated) for order in till.provider.asked] == [
        (refund.id, False),
        *[(refund.id, True)] * 3,
    ]


async def test_after_many_attempts_an_operator_has_to_look(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refunds, "ATTEMPTS_MAX", 2)
    payment = await till.paid()
    refund = await till.refund(payment, 1_000_000)
    till.provider.away = True
    for _ in range(4):
        await till.payments.sweep_refunds()
        await till.due()
    assert len(till.provider.asked) == 2
    assert (await till.look_at_refund(refund)).due_at is None
    assert (await till.balances())[1] == 1_000_000
    till.provider.away = False
    async with till.db.transaction() as tx:
        with pytest.raises(Denied):
            await refunds.ask_again(tx, till.owner, refund.id)
        await refunds.ask_again(tx, OPERATOR, refund.id)
    await till.payments.sweep_refunds()
    assert till.provider.asked[-1].repeated
    assert (await till.look_at_refund(refund)).state == "pending"
    async with till.db.transaction() as tx:
        await till.payments.sweep_refunds()
        with pytest.raises(NotFound):
            await refunds.ask_again(tx, OPERATOR, "rfd_" + "0" * 26)


async def test_what_was_accepted_and_never_confirmed_is_asked_about(till: Till) -> None:
    payment = await till.paid()
    refund = await till.refund(payment, 1_000_000)
    await till.payments.sweep_refunds()
    till.provider.answer = RefundStatus.SUCCEEDED
    await till.due()
    await till.payments.sweep_refunds()
    assert (await till.look_at_refund(refund)).state == "succeeded"
    assert len(till.provider.asked) == 1


async def test_fifty_at_once_never_take_more_than_the_payment(till: Till) -> None:
    await till.paid()
    payment = await till.paid()
    results = await asyncio.gather(*(till.refund(payment, 3_000_000) for _ in range(50)), return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 6
    assert all(isinstance(result, NotRefundable) for result in results if isinstance(result, BaseException))
    assert (await till.look(payment)).refunded_microusd == 18_000_000
    assert await till.balances() == (22_000_000, 18_000_000, 40_000_000)


async def test_fifty_at_once_never_take_what_was_spent(till: Till) -> None:
    first, second = await till.paid(), await till.paid()
    await spend(till, 35_000_000)
    results = await asyncio.gather(
        *(till.refund(payment, 1_000_000) for payment in [first, second] * 25), return_exceptions=True
    )
    assert sum(not isinstance(result, BaseException) for result in results) == 5
    assert await till.balances() == (0, 5_000_000, 40_000_000)


async def test_what_cannot_be_paid_back_is_refused_with_its_reason(till: Till) -> None:
    payment = await till.paid()
    with pytest.raises(Denied):
        await till.refund(payment, 1_000_000, till.owner)
    with pytest.raises(NotRefundable, match="is open"):
        await till.refund(await till.topup(), 1_000_000)
    with pytest.raises(NotRefundable, match=r"at most \$20.00 of this payment"):
        await till.refund(payment, 20_010_000)
    await spend(till, 19_000_000)
    with pytest.raises(NotRefundable, match=r"at most \$1.00 is left of the balance"):
        await till.refund(payment, 2_000_000)
    async with till.db.transaction() as tx:
        with pytest.raises(NotFound):
            await refunds.request(tx, OPERATOR, "p", till.terms, payment_id="pay_x", amount_microusd=10_000, reason="r")
        with pytest.raises(NotRefundable, match="made with prv_"):
            await refunds.request(
                tx, OPERATOR, "stripe", till.terms, payment_id=payment.id, amount_microusd=10_000, reason="r"
            )
    till.terms = PaymentTerms(refund_window_s=0)
    with pytest.raises(RefundWindowOver, match="stays as credit") as caught:
        await till.refund(payment, 1_000_000)
    assert isinstance(caught.value, Conflict)
    assert await till.balances() == (1_000_000, 0, 20_000_000)


async def test_a_refund_made_at_the_provider_is_a_fact_even_beyond_the_balance(till: Till) -> None:
    payment = await till.paid()
    await spend(till, 19_000_000)
    notice = till.refund_object(payment, 5_000_000, status="pending")
    assert (await till.told("refund.created", notice))[0] == "applied"
    assert await till.balances() == (-4_000_000, 5_000_000, 20_000_000)
    await till.told("refund.updated", {**notice, "status": "succeeded"})
    assert await till.balances() == (-4_000_000, 0, 15_000_000)


STRANGE: list[tuple[dict[str, Any], str]] = [
    ({"amount": -1}, "rejected"),
    ({"currency": "eur"}, "held"),
    ({"amount": 10**18}, "held"),
    ({"amount": 2001}, "waiting"),
    ({"status": "failed"}, "applied"),
]


async def test_strange_refunds_change_nothing(till: Till) -> None:
    payment = await till.paid()
    for number, (changes, state) in enumerate(STRANGE):
        notice = till.refund_object(payment, 1_000_000, id=f"re_{number}", **changes)
        assert (await till.told("refund.created", notice))[0] == state, changes
    assert await till.balances() == (20_000_000, 0, 20_000_000)


async def test_a_refund_of_another_amount_than_asked_for_is_held(till: Till) -> None:
    payment = await till.paid()
    refund = await till.refund(payment, 1_000_000)
    notice = till.refund_object(payment, 2_000_000, refund=refund)
    assert (await till.told("refund.updated", notice))[0] == "held"
    assert (await till.look_at_refund(refund)).state == "requested"


@pytest.mark.parametrize(
    ("status", "after"), [("won", (20_000_000, 0, 20_000_000)), ("lost", (5_000_000, 0, 5_000_000))]
)
@pytest.mark.parametrize("first", ["created", "closed"])
async def test_a_dispute_ends_alike_in_any_order(
    till: Till, status: str, after: tuple[int, int, int], first: str
) -> None:
    payment = await till.paid()
    created = ("charge.dispute.created", till.dispute(payment, 15_000_000))
    closed = ("charge.dispute.closed", till.dispute(payment, 15_000_000, status))
    if first == "created":
        await till.told(*created)
        assert await till.balances() == (5_000_000, 15_000_000, 20_000_000)
        with pytest.raises(NotRefundable, match=r"at most \$5.00"):
            await till.refund(payment, 6_000_000)
        await till.told(*closed)
    else:
        await till.told(*closed)
        assert await till.told(*created) == ("applied", "known before")
    assert await till.told(*closed) == ("applied", "known before")
    assert await till.balances() == after


async def test_a_dispute_of_more_than_was_paid_is_held(till: Till) -> None:
    payment = await till.paid()
    assert (await till.told("charge.dispute.created", till.dispute(payment, 20_010_000)))[0] == "held"
    waiting = {**till.dispute(payment, 1), "payment_intent": "pi_x"}
    assert (await till.told("charge.dispute.created", waiting))[0] == "waiting"
    assert await till.balances() == (20_000_000, 0, 20_000_000)
