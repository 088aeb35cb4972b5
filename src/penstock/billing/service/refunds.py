"""Money that goes back. What is asked for is put on hold at once, so that nobody can spend it meanwhile.

The provider is asked outside of any transaction, again and again under the same id; its answer and its events are
applied by the same code, so that it does not matter which comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.billing.errors import NotRefundable, ProviderAway, RefundWindowOver
from penstock.billing.model import CLEARING, Account, Kind, Transfer
from penstock.billing.paymentmodel import (
    CENT_MICROUSD,
    REFUND_MOVES,
    InboxState,
    Payment,
    PaymentState,
    PaymentTerms,
    Received,
    Refund,
    RefundEvent,
    RefundState,
    Verdict,
    check_amount,
    creditable,
)
from penstock.billing.providers import events
from penstock.billing.providers.port import Provider, RefundAnswer, RefundOrder, RefundStatus
from penstock.billing.service import crediting
from penstock.billing.service.crediting import SYSTEM
from penstock.billing.store import ledger
from penstock.billing.store import payments as store
from penstock.billing.store import refunds as rows
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import missing
from penstock.kit.ids import is_id, new_id
from penstock.kit.telemetry import correlated, correlation_id
from penstock.kit.text import dollars
from penstock.wire import subjects

#: A provider that does not answer is asked for about a week; then an operator has to look.
ATTEMPTS_MAX: Final = 200
BATCH: Final = 100
_ASK_AGAIN_S: Final = 3600.0
_EVENTS: Final[Mapping[RefundStatus, RefundEvent]] = {
    RefundStatus.PENDING: RefundEvent.ACCEPTED,
    RefundStatus.SUCCEEDED: RefundEvent.CONFIRMED,
    RefundStatus.FAILED: RefundEvent.REFUSED,
}
_STATUS: Final = {
    "succeeded": RefundStatus.SUCCEEDED,
    "failed": RefundStatus.FAILED,
    "canceled": RefundStatus.FAILED,
}


async def request(
    tx: Tx, caller: Caller, provider: str, terms: PaymentTerms, *, payment_id: str, amount_microusd: int, reason: str
) -> Refund:
    """Pay back a part of a payment: at most what is left of it, and of the organisation's balance."""
    caller.require("billing.adjust")
    check_amount(amount_microusd)
    found = await store.find(tx, payment_id)
    if found is None:
        raise missing("payment", payment_id)
    payment = await crediting.lock(tx, found)
    await _check(tx, payment, provider, terms, amount_microusd)
    refund = await _begin(
        tx,
        payment,
        rows.Draft(
            id=new_id("rfd"),
            payment_id=payment.id,
            organisation_id=payment.organisation_id,
            amount_microusd=amount_microusd,
            reason=reason,
            created_by=caller.principal_id,
            correlation_id=correlation_id(),
        ),
    )
    await crediting.record(tx, caller.actor, "payments.refund", payment, amount_microusd, reason=reason)
    tx.hint(subjects.BILLING)
    return refund


async def ask_again(tx: Tx, caller: Caller, refund_id: str) -> Refund:
    """Ask the provider once more about a refund whose outcome is not known."""
    caller.require("billing.adjust")
    found = await rows.find(tx, refund_id)
    if found is None:
        raise missing("refund", refund_id)
    refund = await rows.ask_again(tx, refund_id)
    if refund is None:
        raise NotRefundable(f"the refund is {found.state} already")
    payment = await store.find(tx, refund.payment_id)
    assert payment is not None
    await crediting.record(tx, caller.actor, "payments.refund_retry", payment, refund.amount_microusd)
    tx.hint(subjects.BILLING)
    return refund


async def _check(tx: Tx, payment: Payment, provider: str, terms: PaymentTerms, amount_microusd: int) -> None:
    if payment.state is not PaymentState.SUCCEEDED or payment.intent_id is None:
        raise NotRefundable(f"the payment is {payment.state}: there is nothing to pay back")
    if payment.provider != provider:
        raise NotRefundable(f"the payment was made with {payment.provider}, which this install does not use any more")
    if await store.age_s(tx, payment) > terms.refund_window_s:
        days = terms.refund_window_s / 86400
        raise RefundWindowOver(f"the payment is older than {days:g} days: it stays as credit and is not paid back")
    left = payment.amount_microusd - payment.refunded_microusd - await rows.disputed_microusd(tx, payment.id)
    if amount_microusd > left:
        raise NotRefundable(f"at most {dollars(max(left, 0))} of this payment is left", field="amount_microusd")
    balance = await ledger.balance(tx, Account.BALANCE.of(payment.organisation_id))
    if amount_microusd > balance:
        raise NotRefundable(
            f"at most {dollars(max(balance, 0))} is left of the balance, the rest was spent", field="amount_microusd"
        )


async def _begin(tx: Tx, payment: Payment, draft: rows.Draft) -> Refund:
    """Put the amount on hold; customer and payment are locked."""
    refund = await rows.insert(tx, draft)
    await store.count_refund(tx, payment, refund.amount_microusd)
    await _post(tx, refund, "", source=Account.BALANCE, target=Account.HOLDS)
    return refund


async def _post(tx: Tx, refund: Refund, step: str, *, source: Account | None, target: Account | None) -> None:
    """Move the refund's amount; no account of the organisation's stands for the provider's."""
    of = refund.organisation_id
    transfer = Transfer(
        id=f"refund/{refund.id}{step}",
        kind=Kind.REFUND,
        organisation_id=of,
        entries={
            source.of(of) if source else CLEARING: -refund.amount_microusd,
            target.of(of) if target else CLEARING: refund.amount_microusd,
        },
        memo=f"of payment/{refund.payment_id}",
    )
    if not await ledger.post(tx, transfer):
        raise RuntimeError(f"{refund.id} is {refund.state} and the transfer {transfer.id} is there")


async def apply(tx: Tx, payment: Payment, refund: Refund, answer: RefundAnswer) -> bool:
    """Bring a refund to where the provider says that it is; whether that was news. All rows are locked."""
    event = _EVENTS[answer.status]
    if (refund.state, event) not in REFUND_MOVES:
        return False
    with correlated(refund.correlation_id):
        outcome = rows.Outcome(
            provider_refund_id=answer.id,
            failure=answer.failure,
            ask_again_s=_ASK_AGAIN_S if event is RefundEvent.ACCEPTED else None,
        )
        await rows.move(tx, refund, event, outcome)
        if event is RefundEvent.CONFIRMED:
            await _post(tx, refund, "/paid", source=Account.HOLDS, target=None)
            await store.tell(tx, payment, "payments.refunded", refund.amount_microusd)
            await crediting.record(tx, SYSTEM, "payments.refunded", payment, refund.amount_microusd)
        elif event is RefundEvent.REFUSED:
            await _fail(tx, payment, refund)
    tx.hint(subjects.BILLING)
    return True


async def _fail(tx: Tx, payment: Payment, refund: Refund) -> None:
    """Back to the balance: from the hold, or from the provider where a bank returned it."""
    returned = refund.state is RefundState.SUCCEEDED
    await _post(
        tx,
        refund,
        "/returned" if returned else "/failed",
        source=None if returned else Account.HOLDS,
        target=Account.BALANCE,
    )
    await store.count_refund(tx, payment, -refund.amount_microusd)
    await store.tell(tx, payment, "payments.refund_failed", refund.amount_microusd)
    await crediting.record(tx, SYSTEM, "payments.refund_failed", payment, refund.amount_microusd)


async def heard(tx: Tx, event: Received, notice: events.Refund, terms: PaymentTerms) -> Verdict:
    """The provider tells of a refund: one of ours, or one that somebody made at the provider."""
    found = await rows.find(tx, notice.refund_id) if is_id("rfd", notice.refund_id) else None
    payment = await _payment_of(tx, event.provider, found, notice)
    if payment is None or payment.state is not PaymentState.SUCCEEDED:
        return _not_yet("its payment has not come", terms)
    payment = await crediting.lock(tx, payment)
    found = found or await rows.find_by_provider(tx, payment.id, notice.id)
    answer = RefundAnswer(
        id=notice.id,
        status=_STATUS.get(notice.status or "", RefundStatus.PENDING),
        failure=(notice.failure_reason or "")[:200],
    )
    if found is None:
        return await _made_elsewhere(tx, payment, notice, answer, terms)
    if notice.amount * CENT_MICROUSD != found.amount_microusd:
        return Verdict(state=InboxState.HELD, reason=f"refunds {notice.amount} cents", payment_id=payment.id)
    news = await apply(tx, payment, await rows.lock(tx, found.id), answer)
    return Verdict(state=InboxState.APPLIED, reason="" if news else "known before", payment_id=payment.id)


async def _payment_of(conn: Reader, provider: str, refund: Refund | None, notice: events.Refund) -> Payment | None:
    if refund is not None:
        found = await store.find(conn, refund.payment_id)
    else:
        found = await store.find_by_intent(conn, provider, notice.payment_intent or "")
    return found if found is not None and found.provider == provider else None


def _not_yet(reason: str, terms: PaymentTerms) -> Verdict:
    return Verdict(state=InboxState.WAITING, reason=reason, wait_s=terms.wait_s, then=InboxState.UNMATCHED)


async def _made_elsewhere(
    tx: Tx, payment: Payment, notice: events.Refund, answer: RefundAnswer, terms: PaymentTerms
) -> Verdict:
    """What the provider paid back is a fact, even where the balance does not cover it any more."""
    amount = creditable(amount_minor=notice.amount, currency=notice.currency)
    if notice.amount < 0:
        return Verdict(state=InboxState.REJECTED, reason="amount is below 0", payment_id=payment.id)
    if amount is None:
        reason = f"refunds {notice.amount} minor units of {notice.currency[:8]}"
        return Verdict(state=InboxState.HELD, reason=reason, payment_id=payment.id)
    if answer.status is RefundStatus.FAILED:
        return Verdict(state=InboxState.APPLIED, reason="failed from the start", payment_id=payment.id)
    if amount > payment.amount_microusd - payment.refunded_microusd:
        # One of ours may be on its way that the provider is about to refuse for this one.
        reason = "refunds more than is left of the payment"
        return Verdict(state=InboxState.WAITING, reason=reason, payment_id=payment.id, wait_s=terms.explain_s)
    draft = rows.Draft(
        id=new_id("rfd"),
        payment_id=payment.id,
        organisation_id=payment.organisation_id,
        amount_microusd=amount,
        reason=f"made at {payment.provider}",
        created_by=SYSTEM.id,
        correlation_id=payment.correlation_id,
        provider_refund_id=notice.id,
    )
    with correlated(payment.correlation_id):
        refund = await _begin(tx, payment, draft)
    await apply(tx, payment, refund, answer)
    return Verdict(state=InboxState.APPLIED, payment_id=payment.id)


async def summed_up(tx: Tx, event: Received, charge: events.Charge, terms: PaymentTerms) -> Verdict:
    """The provider tells the sum of all refunds of a payment. Each is told by an event of its own, so this only checks
    that none was missed."""
    payment = await store.find_by_intent(tx, event.provider, charge.payment_intent or "")
    if payment is None:
        return _not_yet("its payment has not come", terms)
    known = sum(refund.amount_microusd for refund in await rows.of_payment(tx, payment.id) if _counts(refund))
    if charge.amount_refunded * CENT_MICROUSD > known:
        reason = f"{charge.amount_refunded} cents are refunded in all, {known // CENT_MICROUSD} are known here"
        return Verdict(state=InboxState.WAITING, reason=reason, payment_id=payment.id, wait_s=terms.explain_s)
    return Verdict(state=InboxState.APPLIED, payment_id=payment.id)


def _counts(refund: Refund) -> bool:
    return refund.state is not RefundState.FAILED


@dataclass(frozen=True, slots=True)
class RefundDesk:
    """Asks the provider for what was requested, and how it stands with what was accepted long ago."""

    db: Database
    provider: Provider

    async def sweep(self) -> int:
        """Everything that is due; how many that were."""
        for asked in range(BATCH):
            async with self.db.transaction() as tx:
                refund = await rows.claim(tx, self.provider.name, attempts_max=ATTEMPTS_MAX)
            if refund is None:
                return asked
            with correlated(refund.correlation_id):
                await self._ask(refund)
        return BATCH

    async def _ask(self, refund: Refund) -> None:
        async with self.db.read() as conn:
            payment = await store.find(conn, refund.payment_id)
        assert payment is not None
        try:
            answer = await self._answer(refund, payment)
        except ProviderAway as error:
            async with self.db.transaction() as tx:
                await rows.note(tx, refund.id, error.detail)
            return
        async with self.db.transaction() as tx:
            payment = await crediting.lock(tx, payment)
            await apply(tx, payment, await rows.lock(tx, refund.id), answer)

    async def _answer(self, refund: Refund, payment: Payment) -> RefundAnswer:
        if refund.provider_refund_id is not None:
            return await self.provider.refund_status(refund.provider_refund_id)
        return await self.provider.refund(
            RefundOrder(
                refund_id=refund.id,
                payment_id=payment.id,
                intent_id=payment.intent_id or "",
                amount_microusd=refund.amount_microusd,
                repeated=refund.attempts > 1,
            )
        )
