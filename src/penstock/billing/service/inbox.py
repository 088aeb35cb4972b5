"""The inbox of providers' events: taken in at once, handled afterwards, each in one transaction of its own.

An event is claimed first, which says when it comes again: one that cannot be handled holds up nobody else, and after
`ATTEMPTS_MAX` attempts it waits for an operator. What an event does and what became of it are written together.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final

import msgspec

from penstock.billing import metrics
from penstock.billing.errors import NotHeld
from penstock.billing.paymentmodel import (
    DISCARDABLE,
    InboxState,
    PaymentEvent,
    PaymentState,
    PaymentTerms,
    Received,
    Verdict,
    check_amount,
    creditable,
)
from penstock.billing.providers import events
from penstock.billing.providers.events import Notice
from penstock.billing.service import crediting, disputes, refunds
from penstock.billing.store import payments as store
from penstock.kit import audit, process
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.telemetry import correlated, logger
from penstock.kit.text import clean
from penstock.wire import subjects
from penstock.wire.unreadable import UNREADABLE

BATCH: Final = 500
_TWO_BODIES: Final = "two_bodies_under_one_id"
#: How JSON spells the one character that Postgres cannot keep.
_ZERO: Final = b"\\u0000"
ATTEMPTS_MAX: Final = 20
_PAID: Final = frozenset({"checkout.session.completed", "checkout.session.async_payment_succeeded"})
_log = logger(__name__)

Handler = Callable[[Tx, Received, Any], Awaitable[Verdict]]


async def receive(db: Database, provider: str, notice: Notice, body: bytes) -> bool:
    """Put a verified event into the inbox; whether it was new. The same id with something else in it is an alarm: it is
    held for an operator, and so is the first one if it was not applied yet."""
    async with db.transaction() as tx:
        new = await store.receive(tx, provider, notice.id, notice.type, body)
        if new:
            tx.hint(subjects.BILLING)
        conflict = not new and await _hold_if_different(tx, provider, notice, body)
    metrics.WEBHOOKS.labels("stored" if new else "conflicting" if conflict else "repeated").inc()
    if conflict:
        _log.error("security_event", reason=_TWO_BODIES, provider=provider, event_id=notice.id)
    return new


async def _hold_if_different(tx: Tx, provider: str, notice: Notice, body: bytes) -> bool:
    first = await store.lock_event(tx, provider, notice.id)
    if first is None or _meaning(first.body) == _meaning(body):
        return False
    twin = f"{notice.id}.{hashlib.sha256(body).hexdigest()[:16]}"
    if await store.receive(tx, provider, twin, notice.type, body):
        second = await store.lock_event(tx, provider, twin)
        assert second is not None
        reason = f"{_TWO_BODIES}: {notice.id} came before with something else in it"
        await store.settle_event(tx, second, InboxState.HELD, reason=reason, payment_id=first.payment_id)
    if first.state in (InboxState.RECEIVED, InboxState.WAITING):
        reason = f"{_TWO_BODIES}: it came again with something else in it, see {twin}"
        await store.settle_event(tx, first, InboxState.HELD, reason=reason, payment_id=None)
    return True


def _meaning(body: bytes) -> tuple[str, object]:
    """The parts of an event that count. Providers send other parts anew with each attempt to deliver it."""
    notice = msgspec.json.decode(body, type=Notice)
    return notice.type, msgspec.json.decode(notice.data.object)


class Inbox:
    """Handles what came."""

    def __init__(self, db: Database, terms: PaymentTerms) -> None:
        self._db = db
        self._terms = terms
        refund = partial(refunds.heard, terms=terms)
        session, refunded, dispute = events.Session, events.Refund, events.Dispute
        self._handlers: dict[str, tuple[type[Any], Handler]] = {
            **dict.fromkeys(_PAID, (session, crediting.paid)),
            "checkout.session.async_payment_failed": (session, crediting.refused),
            "checkout.session.expired": (session, crediting.lapsed),
            "refund.created": (refunded, refund),
            "refund.updated": (refunded, refund),
            "refund.failed": (refunded, refund),
            "charge.refunded": (events.Charge, partial(refunds.summed_up, terms=terms)),
            "charge.dispute.created": (dispute, partial(disputes.heard, terms=terms, closed=False)),
            "charge.dispute.closed": (dispute, partial(disputes.heard, terms=terms, closed=True)),
        }

    async def sweep(self) -> int:
        """Everything that is due; how many events that were."""
        for handled in range(BATCH):
            async with self._db.transaction() as tx:
                claimed = await store.claim_event(tx)
            if claimed is None:
                return handled
            # One that fails is due again later: `claim_event` has said when.
            await process.guarded(self._handle(*claimed), name="provider_event", event_id=claimed[1])
        return BATCH

    async def _handle(self, provider: str, event_id: str) -> None:
        async with self._db.transaction() as tx:
            event = await store.lock_event(tx, provider, event_id)
            if event is None or event.state not in (InboxState.RECEIVED, InboxState.WAITING):
                return
            verdict = await self._patiently(tx, event, await self._judge(tx, event))
            await store.settle_event(
                tx, event, verdict.state, reason=clean(verdict.reason)[:500], payment_id=verdict.payment_id
            )
        if verdict.state is not InboxState.WAITING:
            metrics.PROVIDER_EVENTS.labels(verdict.state).inc()
        if verdict.state in DISCARDABLE:
            _log.warning("provider_event_not_applied", event_id=event_id, type=event.type, reason=verdict.reason)

    async def _judge(self, tx: Tx, event: Received) -> Verdict:
        if event.attempts > ATTEMPTS_MAX and event.state is InboxState.RECEIVED:
            return Verdict(state=InboxState.HELD, reason=f"could not be handled in {ATTEMPTS_MAX} attempts")
        known = self._handlers.get(event.type)
        if known is None:
            return Verdict(state=InboxState.IGNORED, reason="of a type that is not for us")
        if _ZERO in event.body:
            return Verdict(state=InboxState.HELD, reason="has a zero character, which nobody honest sends")
        shape, handle = known
        try:
            thing = _thing(event, shape)
        except UNREADABLE as error:
            return Verdict(state=InboxState.REJECTED, reason=f"not the shape of {event.type}: {error}")
        return await handle(tx, event, thing)

    async def _patiently(self, tx: Tx, event: Received, verdict: Verdict) -> Verdict:
        """What has waited long enough waits no more."""
        if verdict.state is not InboxState.WAITING or await store.event_age_s(tx, event) < verdict.wait_s:
            return verdict
        return Verdict(state=verdict.then, reason=verdict.reason, payment_id=verdict.payment_id)

    async def sweep_abandoned(self) -> int:
        """Close payments that never got a page: nobody was shown where to pay."""
        async with self._db.transaction() as tx:
            found = await store.lock_abandoned(tx, older_than_s=self._terms.abandoned_s, limit=BATCH)
            for payment in found:
                with correlated(payment.correlation_id):
                    outcome = store.Outcome(reason="no checkout page was made")
                    await store.move(tx, payment, PaymentEvent.LAPSED, outcome)
                    await crediting.record(tx, crediting.SYSTEM, "payments.lapsed", payment, 0)
        return len(found)


def _thing(event: Received, shape: type[Any]) -> Any:
    notice = msgspec.json.decode(event.body, type=Notice)
    return msgspec.json.decode(notice.data.object, type=shape)


async def find(conn: Reader, caller: Caller, event_id: str) -> Received:
    """One event, for operators."""
    caller.require("billing.adjust")
    found = await store.find_event(conn, event_id)
    if found is None:
        raise missing("provider event", event_id)
    return found


async def held(conn: Reader, *, limit: int) -> Sequence[Received]:
    """Events that wait for an operator."""
    return await store.events_page(conn, state=InboxState.HELD, before=None, limit=limit)


async def page(
    conn: Reader, caller: Caller, *, state: InboxState | None, before: tuple[datetime, str] | None, limit: int
) -> Sequence[Received]:
    """Events, newest first, for operators."""
    caller.require("billing.adjust")
    return await store.events_page(conn, state=state, before=before, limit=limit)


async def accept(tx: Tx, caller: Caller, event_id: str, *, amount_microusd: int | None, reason: str) -> Received:
    """Credit a payment that was held: what was paid, or the amount that the operator names."""
    caller.require("billing.adjust")
    event = await _lock(tx, caller, event_id, frozenset({InboxState.HELD}))
    if event.type not in _PAID:
        raise NotHeld(f"an event of type {event.type} credits nothing: discard it")
    session = _thing(event, events.Session)
    found = await crediting.match(tx, event.provider, session)
    if found is None:
        raise NotHeld("it belongs to no payment of ours: discard it")
    amount = _amount(session, amount_microusd)
    payment = await crediting.lock(tx, found)
    if payment.state is PaymentState.SUCCEEDED:
        raise NotHeld("the payment was credited already: discard it")
    await crediting.credit(tx, payment, session, amount, actor=caller.actor)
    await _record(tx, caller, "provider_events.accept", event, reason)
    return await store.settle_event(tx, event, InboxState.APPLIED, reason=reason, payment_id=payment.id)


async def discard(tx: Tx, caller: Caller, event_id: str, *, reason: str) -> Received:
    """Put an event aside that credits nothing."""
    caller.require("billing.adjust")
    event = await _lock(tx, caller, event_id, DISCARDABLE)
    await _record(tx, caller, "provider_events.discard", event, reason)
    return await store.settle_event(tx, event, InboxState.DISCARDED, reason=reason, payment_id=None)


async def _lock(tx: Tx, caller: Caller, event_id: str, states: frozenset[InboxState]) -> Received:
    found = await find(tx, caller, event_id)
    event = await store.lock_event(tx, found.provider, found.event_id)
    assert event is not None
    if event.state not in states:
        raise NotHeld(f"the event is {event.state}, not {' or '.join(sorted(states))}")
    return event


def _amount(session: events.Session, named: int | None) -> int:
    if named is not None:
        return check_amount(named)
    paid = creditable(amount_minor=session.amount_total or 0, currency=session.currency or "")
    if paid is None:
        raise Invalid("amount_microusd is needed: what was paid cannot be credited as it is", field="amount_microusd")
    return paid


async def _record(tx: Tx, caller: Caller, action: str, event: Received, reason: str) -> None:
    await audit.record(tx, caller.actor, action, event.event_id, detail={"provider": event.provider, "reason": reason})
