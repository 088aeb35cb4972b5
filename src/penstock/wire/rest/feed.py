"""Events, audit and dead letters."""

from datetime import date
from typing import Any

import msgspec

from penstock.wire.rest.fleet import Task
from penstock.wire.times import Time


class EventOut(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, as in the stream. `cursor` resumes after it."""

    cursor: str
    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    project_id: str | None
    correlation_id: str
    occurred_at: Time
    payload: dict[str, Any]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what."""

    id: str
    at: Time
    actor_id: str
    actor_kind: str
    action: str
    target_id: str
    organisation_id: str | None
    project_id: str | None
    correlation_id: str
    detail: dict[str, Any]


class ChainedAudit(msgspec.Struct, frozen=True, kw_only=True):
    """One link of an audit chain: `hash` covers the entry and the one before it. No entry: its row is gone."""

    position: int
    audit_id: str
    hash: str
    entry: AuditEntry | None


class AuditChain(msgspec.Struct, frozen=True, kw_only=True):
    """A chain: an organisation's, or `platform`. `unlinked` rows were written a moment ago and follow."""

    chain: str
    position: int
    hash: str
    linked_at: Time | None
    unlinked: int


class DeadLetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the broker refused for good."""

    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    occurred_at: Time
    attempts: int
    last_error: str


class SagaStep(msgspec.Struct, frozen=True, kw_only=True):
    """One event of an allocation's saga."""

    allocation_id: str
    at: Time
    what: str
    detail: str = ""


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a transfer that a request led to."""

    transfer_id: str
    kind: str
    account_id: str
    amount_microusd: int
    memo: str
    at: Time


class Charge(msgspec.Struct, frozen=True, kw_only=True):
    """What an allocation was charged for one day (UTC), in microseconds and micro-dollars."""

    allocation_id: str
    day: date
    quantity: int
    amount_microusd: int
    until_at: Time


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that belongs to one request, oldest first. `missing` names what could not be asked, and why."""

    correlation_id: str
    audit: list[AuditEntry]
    events: list[EventOut]
    tasks: list[Task]
    sagas: list[SagaStep]
    ledger: list[LedgerRow]
    charges: list[Charge]
    missing: list[str]
