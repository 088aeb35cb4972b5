"""Values of the model as bodies of the REST API."""

from penstock.notices.model import Delivery, Webhook
from penstock.wire import rest


def webhook(it: Webhook) -> rest.Webhook:
    """A webhook as its project sees it."""
    return rest.Webhook(
        id=it.id,
        url=it.url,
        event_types=it.event_types,
        state=it.state,
        reason=it.reason,
        failures=it.failures,
        failing_since=it.failing_since,
        next_try_at=it.next_try_at,
        old_secret_until=it.old_secret_until,
        created_at=it.created_at,
        created_by=it.created_by,
        updated_at=it.updated_at,
    )


def delivery(it: Delivery) -> rest.WebhookDelivery:
    """A delivery."""
    return rest.WebhookDelivery(
        id=it.id,
        webhook_id=it.webhook_id,
        event_id=it.event_id,
        event_type=it.event_type,
        state=it.state,
        attempts=it.attempts,
        next_try_at=it.next_try_at,
        error=it.error,
        detail=it.detail,
        status=it.status,
        created_at=it.created_at,
        finished_at=it.finished_at,
    )
