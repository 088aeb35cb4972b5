"""Payments and the inbox of providers' events. Only `move` writes a payment's state."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from penstock.billing.paymentmodel import (
    FACTS,
    PAYMENT_INITIAL,
    PAYMENT_MOVES,
    InboxState,
    Payment,
    PaymentEvent,
    PaymentState,
    Received,
)
from penstock.billing.providers.port import Checkout
from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.errors import Conflict, StaleRow

_COLUMNS: Final = ", ".join(Payment.__dataclass_fields__)
_INBOX: Final = ", ".join(Received.__dataclass_fields__)
_BACKOFF_MAX_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A payment that somebody is about to make."""

    id: str
    organisation_id: str
    project_id: str
    provider: str
    amount_microusd: int
    currency: str
    created_by: str
    correlation_id: str


async def insert(tx: Tx, draft: Draft) -> Payment:
    """Add a payment that nobody has paid yet."""
    values = [getattr(draft, name) for name in Draft.__dataclass_fields__]
    row = await tx.fetchrow(
        f"insert into billing.payments ({', '.join(Draft.__dataclass_fields__)}, state, version)"  # noqa: S608
        f" values ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0) returning {_COLUMNS}",
        *values,
        PAYMENT_INITIAL,
    )
    assert row is not None
    return _payment(row)


async def attach(tx: Tx, payment_id: str, checkout: Checkout) -> Payment:
    """Where it can be paid; the first page stays."""
    row = await tx.fetchrow(
        f"""
        update billing.payments set session_id = coalesce(session_id, $2),
            checkout_url = case when checkout_url = '' then $3 else checkout_url end
        where id = $1 returning {_COLUMNS}
        """,  # noqa: S608
        payment_id,
        checkout.session_id,
        checkout.url,
    )
    assert row is not None
    return _payment(row)


async def find(conn: Reader, payment_id: str, *, organisation_id: str | None = None) -> Payment | None:
    """One payment, of anybody or of this organisation only."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from billing.payments where id = $1 and ($2::text is null or organisation_id = $2)",  # noqa: S608
        payment_id,
        organisation_id,
    )
    return _payment(row) if row else None


async def find_by_session(conn: Reader, provider: str, session_id: str) -> Payment | None:
    """The payment of a checkout page."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from billing.payments where provider = $1 and session_id = $2",  # noqa: S608
        provider,
        session_id,
    )
    return _payment(row) if row else None


async def find_by_intent(conn: Reader, provider: str, intent_id: str) -> Payment | None:
    """The payment that became this one at the provider."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from billing.payments where provider = $1 and intent_id = $2",  # noqa: S608
        provider,
        intent_id,
    )
    return _payment(row) if row else None


async def lock(tx: Tx, payment_id: str) -> Payment:
    """A payment that is there; the customer is locked already."""
    row = await tx.fetchrow(f"select {_COLUMNS} from billing.payments where id = $1 for update", payment_id)  # noqa: S608
    assert row is not None
    return _payment(row)


async def page(conn: Reader, organisation_id: str, *, before: str, limit: int) -> Sequence[Payment]:
    """An organisation's payments, newest first."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from billing.payments where organisation_id = $1 and ($2 = '' or id < $2)"  # noqa: S608
        " order by id desc limit $3",
        organisation_id,
        before,
        limit,
    )
    return [_payment(row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a move sets beside the state."""

    reason: str = ""
    amount_microusd: int | None = None
    session_id: str | None = None
    intent_id: str | None = None


async def move(tx: Tx, current: Payment, event: PaymentEvent, outcome: Outcome) -> Payment:
    """Apply `event` and write its fact; StaleRow when another writer was first."""
    target = PAYMENT_MOVES.get((current.state, event))
    if target is None:
        raise Conflict(f"a payment that is {current.state} cannot take {event}", payment_id=current.id)
    row = await tx.fetchrow(
        f"""
        update billing.payments set state = $3, version = version + 1, reason = $4,
            amount_microusd = coalesce($5, amount_microusd), session_id = coalesce(session_id, $6),
            intent_id = coalesce(intent_id, $7), completed_at = clock_timestamp()
        where id = $1 and version = $2 returning {_COLUMNS}
        """,  # noqa: S608
        current.id,
        current.version,
        target,
        outcome.reason,
        outcome.amount_microusd,
        outcome.session_id,
        outcome.intent_id,
    )
    if row is None:
        raise StaleRow(f"payment {current.id} was changed meanwhile", payment_id=current.id)
    moved = _payment(row)
    await _append(tx, moved, FACTS[event], moved.amount_microusd if target is PaymentState.SUCCEEDED else 0)
    return moved


async def count_refund(tx: Tx, payment: Payment, amount_microusd: int) -> None:
    """Count a refund, or with a negative amount count one no more; the row is locked."""
    await tx.execute(
        "update billing.payments set refunded_microusd = refunded_microusd + $2 where id = $1",
        payment.id,
        amount_microusd,
    )


async def tell(tx: Tx, payment: Payment, fact: str, amount_microusd: int) -> None:
    """Write a further fact about a payment; the row is locked."""
    row = await tx.fetchrow(
        f"update billing.payments set version = version + 1 where id = $1 returning {_COLUMNS}",  # noqa: S608
        payment.id,
    )
    assert row is not None
    await _append(tx, _payment(row), fact, amount_microusd)


async def _append(tx: Tx, payment: Payment, fact: str, amount_microusd: int) -> None:
    event = outbox.Event(
        type=fact,
        aggregate_id=payment.id,
        version=payment.version,
        organisation_id=payment.organisation_id,
        project_id=None,
        payload={
            "payment_id": payment.id,
            "organisation_id": payment.organisation_id,
            "amount_microusd": amount_microusd,
            "currency": payment.currency,
            "state": payment.state,
        },
    )
    await outbox.append(tx, event)


async def age_s(conn: Reader, payment: Payment) -> float:
    """How long ago it was paid."""
    return await conn.fetchval("select extract(epoch from clock_timestamp() - $1)::float8", payment.completed_at)


async def count_open(conn: Reader, organisation_id: str) -> int:
    """How many payments the organisation began in the last day and did not finish."""
    return await conn.fetchval(
        "select count(*) from billing.payments where organisation_id = $1 and state = 'open'"
        " and created_at > clock_timestamp() - interval '1 day'",
        organisation_id,
    )


async def lock_abandoned(tx: Tx, *, older_than_s: float, limit: int) -> Sequence[Payment]:
    """Open payments that never got a page."""
    rows = await tx.fetch(
        f"""
        select {_COLUMNS} from billing.payments
        where state = 'open' and session_id is null and created_at < clock_timestamp() - make_interval(secs => $1)
        order by created_at limit $2 for update skip locked
        """,  # noqa: S608
        older_than_s,
        limit,
    )
    return [_payment(row) for row in rows]


async def receive(tx: Tx, provider: str, event_id: str, kind: str, body: bytes) -> bool:
    """Put an event into the inbox, once; whether it was new."""
    return bool(
        await tx.fetchval(
            "insert into billing.provider_events (provider, event_id, type, body) values ($1, $2, $3, $4)"
            " on conflict do nothing returning true",
            provider,
            event_id,
            kind,
            body,
        )
    )


async def claim_event(tx: Tx) -> tuple[str, str] | None:
    """The next event that is due. It is tried again later and later, should it not be settled by then."""
    row = await tx.fetchrow(
        """
        update billing.provider_events set attempts = attempts + 1,
            due_at = clock_timestamp() + make_interval(secs => least($1::float8, 2.0 ^ (attempts + 1)))
        where (provider, event_id) = (
            select provider, event_id from billing.provider_events
            where state in ('received', 'waiting') and due_at <= clock_timestamp()
            order by due_at limit 1 for update skip locked)
        returning provider, event_id
        """,
        _BACKOFF_MAX_S,
    )
    return (row["provider"], row["event_id"]) if row else None


async def lock_event(tx: Tx, provider: str, event_id: str) -> Received | None:
    """One event; whoever else handles it waits."""
    row = await tx.fetchrow(
        f"select {_INBOX} from billing.provider_events where provider = $1 and event_id = $2 for update",  # noqa: S608
        provider,
        event_id,
    )
    return _received(row) if row else None


async def find_event(conn: Reader, event_id: str) -> Received | None:
    """One event by its id, whoever sent it."""
    row = await conn.fetchrow(
        f"select {_INBOX} from billing.provider_events where event_id = $1 order by provider limit 1",  # noqa: S608
        event_id,
    )
    return _received(row) if row else None


async def settle_event(tx: Tx, event: Received, state: InboxState, *, reason: str, payment_id: str | None) -> Received:
    """Write what became of it; the row is locked."""
    row = await tx.fetchrow(
        f"""
        update billing.provider_events set state = $3, reason = $4, payment_id = coalesce($5, payment_id),
            handled_at = case when $3 in ('received', 'waiting') then null else clock_timestamp() end
        where provider = $1 and event_id = $2 returning {_INBOX}
        """,  # noqa: S608
        event.provider,
        event.event_id,
        state,
        reason,
        payment_id,
    )
    assert row is not None
    return _received(row)


async def wake_events(tx: Tx, provider: str) -> None:
    """What those that wait for may have come."""
    await tx.execute(
        "update billing.provider_events set due_at = clock_timestamp() where provider = $1 and state = 'waiting'",
        provider,
    )


async def event_age_s(conn: Reader, event: Received) -> float:
    """How long ago an event came."""
    return await conn.fetchval("select extract(epoch from clock_timestamp() - $1)::float8", event.received_at)


async def events_page(
    conn: Reader, *, state: InboxState | None, before: tuple[datetime, str] | None, limit: int
) -> Sequence[Received]:
    """Events, newest first; `before` is time and id of the last one of the page before."""
    rows = await conn.fetch(
        f"""
        select {_INBOX} from billing.provider_events
        where ($1::text is null or state = $1)
            and ($2::timestamptz is null or (received_at, event_id) < ($2, $3))
        order by received_at desc, event_id desc limit $4
        """,  # noqa: S608
        state,
        before[0] if before else None,
        before[1] if before else None,
        limit,
    )
    return [_received(row) for row in rows]


def _payment(row: Row) -> Payment:
    return msgspec.convert(dict(row), Payment)


def _received(row: Row) -> Received:
    return msgspec.convert(dict(row), Received)
