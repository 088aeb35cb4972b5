"""Webhooks and their deliveries."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body
from penstock.wire.rest.states import DeliveryState, WebhookState
from penstock.wire.times import Time

WebhookUrl = Annotated[str, Meta(min_length=1, max_length=2048)]
#: An event's type, all that begin alike (`provisioning.*`), or all (`*`).
EventPattern = Annotated[str, Meta(max_length=100, pattern=r"^(\*|[a-z][a-z0-9_]*(\.[a-z0-9_]+)*(\.\*)?)$(?!\n)")]
EventPatterns = Annotated[list[EventPattern], Meta(min_length=1, max_length=50)]


class WebhookCreate(Body, frozen=True):
    """An https address (port 443 or 8443, public) and the events that are sent there. Facts of the whole organisation
    (`billing.…`, `payments.…`) must be named: `*` does not mean them."""

    url: WebhookUrl
    event_types: EventPatterns = msgspec.field(default_factory=lambda: ["*"])


class WebhookUpdate(Body, frozen=True):
    """What is to be different. `enabled` pauses, or resumes what was paused."""

    url: WebhookUrl | None = None
    event_types: EventPatterns | None = None
    enabled: bool | None = None


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """An address that hears of the project's events. `state`: active, paused (`reason` says why). `failures` are those
    in a row, since `failing_since`; `next_try_at` is when it is tried again."""

    id: str
    url: str
    event_types: list[str]
    state: WebhookState
    reason: str
    failures: int
    failing_since: Time | None
    next_try_at: Time | None
    old_secret_until: Time | None
    created_at: Time
    created_by: str
    updated_at: Time


class WebhookCreated(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook and its secret, which is shown this once."""

    webhook: Webhook
    secret: str


class WebhookDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """One event for one webhook. `state`: pending, delivered, failed. `error`: of the last attempt, such as timeout,
    tls, redirect, status, address_not_public; `status` is the HTTP status that came back."""

    id: str
    webhook_id: str
    event_id: str
    event_type: str
    state: DeliveryState
    attempts: int
    next_try_at: Time | None
    error: str
    detail: str
    status: int | None
    created_at: Time
    finished_at: Time | None
