"""Somebody's bank wants a payment back: the amount is on hold while it is open, and gone when it is lost.

The end may be heard of before the beginning; a dispute that is closed is never open again.
"""

from penstock.billing.model import CLEARING, Account, Kind, Transfer
from penstock.billing.paymentmodel import (
    Dispute,
    DisputeState,
    InboxState,
    Payment,
    PaymentState,
    PaymentTerms,
    Received,
    Verdict,
    creditable,
)
from penstock.billing.providers import events
from penstock.billing.service import crediting
from penstock.billing.store import ledger
from penstock.billing.store import payments as store
from penstock.billing.store import refunds as rows
from penstock.kit.db import Tx
from penstock.kit.telemetry import correlated
from penstock.wire import subjects


async def heard(tx: Tx, event: Received, notice: events.Dispute, terms: PaymentTerms, *, closed: bool) -> Verdict:
    """A dispute was opened or closed."""
    found = await store.find_by_intent(tx, event.provider, notice.payment_intent or "")
    if found is None or found.state is not PaymentState.SUCCEEDED:
        reason = "its payment has not come"
        return Verdict(state=InboxState.WAITING, reason=reason, wait_s=terms.wait_s, then=InboxState.UNMATCHED)
    payment = await crediting.lock(tx, found)
    if notice.amount < 0:
        return Verdict(state=InboxState.REJECTED, reason="amount is below 0", payment_id=payment.id)
    amount = creditable(amount_minor=notice.amount, currency=notice.currency)
    if amount is None or amount > payment.amount_microusd:
        reason = f"disputes {notice.amount} minor units of {notice.currency[:8]}"
        return Verdict(state=InboxState.HELD, reason=reason, payment_id=payment.id)
    with correlated(payment.correlation_id):
        news = await (_close if closed else _open)(tx, payment, notice, amount)
    return Verdict(state=InboxState.APPLIED, reason="" if news else "known before", payment_id=payment.id)


async def _open(tx: Tx, payment: Payment, notice: events.Dispute, amount: int) -> bool:
    if await rows.find_dispute(tx, notice.id) is not None:
        return False
    dispute = Dispute(id=notice.id, payment_id=payment.id, state=DisputeState.OPEN, amount_microusd=amount)
    await _put(tx, payment, dispute, "", source=Account.BALANCE, target=Account.HOLDS)
    await store.tell(tx, payment, "payments.disputed", amount)
    await crediting.record(tx, crediting.SYSTEM, "payments.disputed", payment, amount)
    return True


async def _close(tx: Tx, payment: Payment, notice: events.Dispute, amount: int) -> bool:
    known = await rows.find_dispute(tx, notice.id)
    if known is not None and known.state is not DisputeState.OPEN:
        return False
    lost = notice.status == "lost"
    dispute = Dispute(
        id=notice.id,
        payment_id=payment.id,
        state=DisputeState.LOST if lost else DisputeState.WON,
        amount_microusd=known.amount_microusd if known else amount,
    )
    source = Account.HOLDS if known else Account.BALANCE
    await _put(tx, payment, dispute, f"/{dispute.state}", source=source, target=None if lost else Account.BALANCE)
    await store.tell(tx, payment, "payments.dispute_closed", dispute.amount_microusd)
    await crediting.record(tx, crediting.SYSTEM, f"payments.dispute_{dispute.state}", payment, dispute.amount_microusd)
    return True


async def _put(
    tx: Tx, payment: Payment, dispute: Dispute, step: str, *, source: Account, target: Account | None
) -> None:
    """Write the dispute and move its amount; one that was won before it was heard of moves nothing."""
    await rows.put_dispute(tx, dispute)
    tx.hint(subjects.BILLING)
    if source is target:
        return
    of = payment.organisation_id
    transfer = Transfer(
        id=f"dispute/{dispute.id}{step}",
        kind=Kind.DISPUTE,
        organisation_id=of,
        entries={
            source.of(of): -dispute.amount_microusd,
            target.of(of) if target else CLEARING: dispute.amount_microusd,
        },
        memo=f"of payment/{payment.id}",
    )
    if not await ledger.post(tx, transfer):
        raise RuntimeError(f"dispute {dispute.id} moves twice: the transfer {transfer.id} is there")
