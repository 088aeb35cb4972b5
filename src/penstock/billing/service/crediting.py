"""Money that came: applies a provider's events about checkout pages, each in the caller's one transaction.

A payment is credited once, whatever comes how often: by its state, and by the id of its transfer. What was paid must be
what was asked for; anything else waits for an operator.
"""

from typing import Final

from penstock.billing.model import CLEARING, Account, Kind, Transfer
from penstock.billing.paymentmodel import (
    PAYMENT_MOVES,
    InboxState,
    Payment,
    PaymentEvent,
    PaymentState,
    Received,
    Verdict,
    doubt,
)
from penstock.billing.providers.events import Session
from penstock.billing.store import ledger
from penstock.billing.store import payments as store
from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.db import Reader, Tx
from penstock.kit.ids import is_id
from penstock.kit.telemetry import correlated
from penstock.wire import subjects

SYSTEM: Final = audit.system("payments")


async def lock(tx: Tx, payment: Payment) -> Payment:
    """The payment as it is now, its customer locked first."""
    await ledger.open_customer(tx, payment.organisation_id)
    await ledger.lock_customer(tx, payment.organisation_id)
    return await store.lock(tx, payment.id)


async def credit(tx: Tx, payment: Payment, session: Session, amount_microusd: int, *, actor: Actor = SYSTEM) -> None:
    """Put it on the balance; the payment is locked and was not credited."""
    with correlated(payment.correlation_id):
        outcome = store.Outcome(
            amount_microusd=amount_microusd, session_id=session.id, intent_id=session.payment_intent or None
        )
        await store.move(tx, payment, PaymentEvent.PAID, outcome)
        transfer = Transfer(
            id=f"payment/{payment.id}",
            kind=Kind.PAYMENT,
            organisation_id=payment.organisation_id,
            entries={
                CLEARING: -amount_microusd,
                Account.BALANCE.of(payment.organisation_id): amount_microusd,
            },
            memo=f"{payment.provider} {session.id}",
        )
        if not await ledger.post(tx, transfer):
            raise RuntimeError(f"{payment.id} is {payment.state} and its transfer is there")
        await record(tx, actor, "payments.credit", payment, amount_microusd)
    await store.wake_events(tx, payment.provider)
    tx.hint(subjects.BILLING)


async def record(
    tx: Tx, actor: Actor, action: str, payment: Payment, amount_microusd: int, *, reason: str | None = None
) -> None:
    """The audit row of something that happened to a payment, with the reason that somebody gave."""
    why = {} if reason is None else {"reason": reason}
    await audit.record(
        tx,
        actor,
        action,
        payment.id,
        organisation_id=payment.organisation_id,
        project_id=payment.project_id,
        detail={"amount_microusd": amount_microusd, "provider": payment.provider, **why},
    )


async def match(conn: Reader, provider: str, session: Session) -> Payment | None:
    """Which of our payments a checkout page is of: by what we gave it on its way, or by its id."""
    found = await store.find(conn, session.payment_id) if is_id("pay", session.payment_id) else None
    if found is None:
        found = await store.find_by_session(conn, provider, session.id)
    return found if found is not None and found.provider == provider else None


async def paid(tx: Tx, event: Received, session: Session) -> Verdict:
    """A page was completed. With some ways to pay, the money comes days later."""
    found = await match(tx, event.provider, session)
    if found is None:
        return Verdict(state=InboxState.UNMATCHED, reason="no payment of ours")
    amount = session.amount_total
    if amount is None or amount < 0:
        return Verdict(state=InboxState.REJECTED, reason="amount_total is below 0", payment_id=found.id)
    payment = await lock(tx, found)
    if why := _why_held(payment, session, amount):
        return Verdict(state=InboxState.HELD, reason=why, payment_id=payment.id)
    if amount == 0 or session.payment_status != "paid":
        reason = "nothing was paid" if amount == 0 else "not paid yet"
        return Verdict(state=InboxState.APPLIED, reason=reason, payment_id=payment.id)
    if payment.state is PaymentState.SUCCEEDED:
        return Verdict(state=InboxState.APPLIED, reason="credited before", payment_id=payment.id)
    await credit(tx, payment, session, payment.amount_microusd)
    return Verdict(state=InboxState.APPLIED, payment_id=payment.id)


def _why_held(payment: Payment, session: Session, amount: int) -> str:
    if amount == 0:
        return ""
    if payment.session_id not in (None, session.id):
        return "of another checkout page than this payment's"
    return doubt(payment, amount_minor=amount, currency=session.currency or "")


async def refused(tx: Tx, event: Received, session: Session) -> Verdict:
    """The money did not come after all."""
    return await _ended(tx, event, session, PaymentEvent.REFUSED, "the payment was refused")


async def lapsed(tx: Tx, event: Received, session: Session) -> Verdict:
    """The page is closed and nobody paid."""
    reason = "nobody paid: the checkout page was cancelled, or its time was over"
    return await _ended(tx, event, session, PaymentEvent.LAPSED, reason)


async def _ended(tx: Tx, event: Received, session: Session, what: PaymentEvent, reason: str) -> Verdict:
    found = await match(tx, event.provider, session)
    if found is None:
        return Verdict(state=InboxState.UNMATCHED, reason="no payment of ours")
    payment = await lock(tx, found)
    if (payment.state, what) not in PAYMENT_MOVES:
        return Verdict(state=InboxState.APPLIED, reason=f"the payment is {payment.state}", payment_id=payment.id)
    with correlated(payment.correlation_id):
        await store.move(tx, payment, what, store.Outcome(reason=reason, session_id=session.id))
        await record(tx, SYSTEM, f"payments.{what}", payment, 0)
    return Verdict(state=InboxState.APPLIED, payment_id=payment.id)
