"""Events, audit and dead letters."""

from datetime import datetime
from typing import Any

import msgspec


class EventOut(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, as in the stream. `cursor` resumes after it."""

    cursor: str
    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    project_id: str | None
    correlation_id: str
    occurred_at: datetime
    payload: dict[str, Any]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what."""

    id: str
    at: datetime
    actor_id: str
    actor_kind: str
    action: str
    target_id: str
    project_id: str | None
    correlation_id: str
    detail: dict[str, Any]


class DeadLetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the broker refused for good."""

    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    occurred_at: datetime
    attempts: int
    last_error: str
