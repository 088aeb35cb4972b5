"""Webhooks and what is delivered to them: values, the lifecycle, which events a webhook asks for. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from penstock.wire.catalogue import CATALOGUE

WEBHOOKS_MAX: Final = 20
#: Test events of one webhook that wait at a time.
TESTS_MAX: Final = 10
TEST_TYPE: Final = "notices.test"
SECRET_PREFIX: Final = "whs_"  # noqa: S105
#: Facts of a whole organisation, which belong to none of its projects; a webhook must name them.
ORGANISATION_PREFIXES: Final = ("billing.", "payments.")
_PATTERN: Final = re.compile(r"\*|[a-z][a-z0-9_]*(\.[a-z0-9_]+)*\.\*")


class WebhookState(StrEnum):
    """Whether events are sent to it."""

    ACTIVE = "active"
    PAUSED = "paused"
    DELETED = "deleted"


class WebhookEvent(StrEnum):
    """What can happen to it."""

    PAUSE = "pause"
    RESUME = "resume"
    DELETE = "delete"


#: The whole lifecycle; a pair that is absent is illegal.
MOVES: Final[Mapping[tuple[WebhookState, WebhookEvent], WebhookState]] = {
    (WebhookState.ACTIVE, WebhookEvent.PAUSE): WebhookState.PAUSED,
    (WebhookState.PAUSED, WebhookEvent.RESUME): WebhookState.ACTIVE,
    (WebhookState.ACTIVE, WebhookEvent.DELETE): WebhookState.DELETED,
    (WebhookState.PAUSED, WebhookEvent.DELETE): WebhookState.DELETED,
}
FINAL: Final = frozenset(WebhookState) - {source for source, _ in MOVES}

#: The fact that each event leaves in the outbox.
FACTS: Final[Mapping[WebhookEvent, str]] = {
    WebhookEvent.PAUSE: "notices.webhook_paused",
    WebhookEvent.RESUME: "notices.webhook_resumed",
    WebhookEvent.DELETE: "notices.webhook_deleted",
}


class DeliveryState(StrEnum):
    """What became of one event for one webhook."""

    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """An address that hears of a project's events. `failures` are those in a row, since `failing_since`."""

    id: str
    organisation_id: str
    project_id: str
    url: str
    event_types: list[str]
    state: WebhookState
    reason: str
    version: int
    failures: int
    failing_since: datetime | None
    next_try_at: datetime | None
    created_at: datetime
    created_by: str
    updated_at: datetime
    old_secret_until: datetime | None = None

    @property
    def fact(self) -> dict[str, Any]:
        """What its events say."""
        return {"webhook_id": self.id, "url": self.url, "state": str(self.state), "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One event for one webhook. `error` is a class such as `timeout`, `detail` says more."""

    id: str
    seq: int
    webhook_id: str
    event_id: str
    event_type: str
    state: DeliveryState
    attempts: int
    next_try_at: datetime | None
    error: str
    detail: str
    status: int | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Sealed:
    """A secret as it is stored: under which master key, and the bytes."""

    version: int
    key_id: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A delivery that this process has claimed: its number of attempts, this one included, is what it holds it by."""

    id: str
    attempts: int
    webhook_id: str
    webhook_project_id: str
    url: str
    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    organisation_id: str | None
    project_id: str | None
    correlation_id: str
    occurred_at: datetime
    payload: Mapping[str, Any]
    secrets: Sequence[Sealed] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long receivers are waited for. A webhook is paused after so many failures in a row, or so much time."""

    retry_first_s: float = 5.0
    retry_max_s: float = 3600.0
    give_up_s: float = 3 * 86_400.0
    failures_max: int = 50
    #: Longer than any exchange: who claimed a delivery and fell silent is not waited for.
    lease_s: float = 30.0
    pending_max: int = 10_000
    keep_s: float = 7 * 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """How many deliveries are under way at a time: in a process, to a project's webhooks, to one webhook."""

    at_once: int = 32
    per_project: int = 8
    per_webhook: int = 4


def unknown_type(event_types: Sequence[str]) -> str | None:
    """The first that no event can have, if there is one."""
    return next((each for each in event_types if each not in CATALOGUE and not _PATTERN.fullmatch(each)), None)


def asks_for_billing(event_types: Sequence[str]) -> bool:
    """Whether it names facts of the whole organisation."""
    return any(each.startswith(ORGANISATION_PREFIXES) for each in event_types)
