"""Refunds and disputes. Only `move` writes a refund's state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.billing.paymentmodel import (
    REFUND_INITIAL,
    REFUND_MOVES,
    Dispute,
    Refund,
    RefundEvent,
    RefundState,
)
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.errors import Conflict, StaleRow

_COLUMNS: Final = ", ".join(Refund.__dataclass_fields__)
_DISPUTE: Final = ", ".join(Dispute.__dataclass_fields__)
_BACKOFF_MAX_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A refund that somebody asks for, or that the provider tells of."""

    id: str
    payment_id: str
    organisation_id: str
    amount_microusd: int
    reason: str
    created_by: str
    correlation_id: str
    provider_refund_id: str | None = None


async def insert(tx: Tx, draft: Draft) -> Refund:
    """Add a refund. One that the provider knows already needs no asking."""
    names = tuple(Draft.__dataclass_fields__)
    row = await tx.fetchrow(
        f"insert into billing.refunds ({', '.join(names)}, state, due_at)"  # noqa: S608
        f" values ($1, $2, $3, $4, $5, $6, $7, $8, $9, case when $8::text is null then clock_timestamp() end)"
        f" returning {_COLUMNS}",
        *[getattr(draft, name) for name in names],
        REFUND_INITIAL,
    )
    assert row is not None
    return _refund(row)


async def find(conn: Reader, refund_id: str) -> Refund | None:
    """One refund."""
    row = await conn.fetchrow(f"select {_COLUMNS} from billing.refunds where id = $1", refund_id)  # noqa: S608
    return _refund(row) if row else None


async def find_by_provider(conn: Reader, payment_id: str, provider_refund_id: str) -> Refund | None:
    """The refund that became this one at the provider."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from billing.refunds where payment_id = $1 and provider_refund_id = $2",  # noqa: S608
        payment_id,
        provider_refund_id,
    )
    return _refund(row) if row else None


async def lock(tx: Tx, refund_id: str) -> Refund:
    """A refund that is there; customer and payment are locked already."""
    row = await tx.fetchrow(f"select {_COLUMNS} from billing.refunds where id = $1 for update", refund_id)  # noqa: S608
    assert row is not None
    return _refund(row)


async def of_payment(conn: Reader, payment_id: str) -> Sequence[Refund]:
    """All refunds of a payment in the order of their making."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from billing.refunds where payment_id = $1 order by id",  # noqa: S608
        payment_id,
    )
    return [_refund(row) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a move sets beside the state. `ask_again_s` is when to ask how it stands, if nobody tells before."""

    provider_refund_id: str | None = None
    failure: str = ""
    ask_again_s: float | None = None


async def move(tx: Tx, current: Refund, event: RefundEvent, outcome: Outcome) -> Refund:
    """Apply `event`; StaleRow when another writer was first."""
    target = REFUND_MOVES.get((current.state, event))
    if target is None:
        raise Conflict(f"a refund that is {current.state} cannot take {event}", refund_id=current.id)
    row = await tx.fetchrow(
        f"""
        update billing.refunds set state = $3, version = version + 1, attempts = 0,
            provider_refund_id = coalesce(provider_refund_id, $4), failure = $5,
            due_at = clock_timestamp() + make_interval(secs => $6::float8),
            completed_at = case when $7 then clock_timestamp() end
        where id = $1 and version = $2 returning {_COLUMNS}
        """,  # noqa: S608
        current.id,
        current.version,
        target,
        outcome.provider_refund_id,
        outcome.failure,
        outcome.ask_again_s,
        target in (RefundState.SUCCEEDED, RefundState.FAILED),
    )
    if row is None:
        raise StaleRow(f"refund {current.id} was changed meanwhile", refund_id=current.id)
    return _refund(row)


async def claim(tx: Tx, provider: str, *, attempts_max: int) -> Refund | None:
    """The next refund to ask the provider about. It is tried again later and later; after so many attempts no more, and
    an operator has to look."""
    row = await tx.fetchrow(
        f"""
        update billing.refunds set attempts = attempts + 1,
            due_at = case when attempts + 1 < $3
                then clock_timestamp() + make_interval(secs => least($2::float8, 30 * 2.0 ^ attempts)) end
        where id = (
            select r.id from billing.refunds r join billing.payments p on p.id = r.payment_id
            where r.due_at <= clock_timestamp() and r.state in ('requested', 'pending') and p.provider = $1
            order by r.due_at limit 1 for update of r skip locked)
        returning {_COLUMNS}
        """,  # noqa: S608
        provider,
        _BACKOFF_MAX_S,
        attempts_max,
    )
    return _refund(row) if row else None


async def note(tx: Tx, refund_id: str, failure: str) -> None:
    """Why the provider could not be asked; for whoever looks."""
    await tx.execute(
        "update billing.refunds set failure = $2 where id = $1 and state in ('requested', 'pending')",
        refund_id,
        failure,
    )


async def ask_again(tx: Tx, refund_id: str) -> Refund | None:
    """Begin anew with attempts; none where the outcome is known."""
    row = await tx.fetchrow(
        f"update billing.refunds set attempts = 1, due_at = clock_timestamp()"  # noqa: S608
        f" where id = $1 and state in ('requested', 'pending') returning {_COLUMNS}",
        refund_id,
    )
    return _refund(row) if row else None


async def disputed_microusd(conn: Reader, payment_id: str) -> int:
    """What of a payment somebody's bank took back, or wants to."""
    return await conn.fetchval(
        "select coalesce(sum(amount_microusd), 0)::bigint from billing.disputes"
        " where payment_id = $1 and state <> 'won'",
        payment_id,
    )


async def find_dispute(conn: Reader, dispute_id: str) -> Dispute | None:
    """One dispute."""
    row = await conn.fetchrow(f"select {_DISPUTE} from billing.disputes where id = $1", dispute_id)  # noqa: S608
    return _dispute(row) if row else None


async def put_dispute(tx: Tx, dispute: Dispute) -> None:
    """Write how a dispute stands; the customer is locked. One that is closed is never open again."""
    await tx.execute(
        """
        insert into billing.disputes (id, payment_id, state, amount_microusd, closed_at)
        values ($1, $2, $3, $4, case when $3 <> 'open' then clock_timestamp() end)
        on conflict (id) do update set state = excluded.state, closed_at = excluded.closed_at
            where billing.disputes.state = 'open'
        """,
        dispute.id,
        dispute.payment_id,
        dispute.state,
        dispute.amount_microusd,
    )


def _refund(row: Row) -> Refund:
    return msgspec.convert(dict(row), Refund)


def _dispute(row: Row) -> Dispute:
    return msgspec.convert(dict(row), Dispute)
