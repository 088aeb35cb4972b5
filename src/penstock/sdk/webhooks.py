"""Webhooks of a project, and the check that what comes to one was sent by its cloud."""

import time

from penstock.sdk.protocol import Listing, Steps, call, identifier
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest, signature
from penstock.wire.rest import Page


def verify(body: bytes, header: str, secret: str) -> bool:
    """Whether a message with this body and `Penstock-Signature` header came from whoever made the secret, in the last
    five minutes. `body` is the request's bytes as they came."""
    return signature.verify(body, header, secret, now=time.time())


class Webhooks(Resource[X]):
    """Addresses that events are sent to."""

    @operation
    def create(self, url: str, event_types: list[str] | None = None) -> Steps[rest.WebhookCreated]:
        """Send the project's events there; all, or those of these types. The answer alone shows the secret."""
        body = rest.WebhookCreate(url=url, event_types=event_types or ["*"])
        return call("POST", "/webhooks", rest.WebhookCreated, body=body, create=True)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Webhook]:
        """Those of the current project."""
        return Listing(path="/webhooks", answer=Page[rest.Webhook], limit=limit)

    @operation
    def get(self, webhook_id: str) -> Steps[rest.Webhook]:
        """One webhook, and how it does."""
        return call("GET", _path(webhook_id), rest.Webhook)

    @operation
    def update(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        event_types: "list[str] | None" = None,
        enabled: bool | None = None,
    ) -> Steps[rest.Webhook]:
        """Another address, other events; pause it (`enabled=False`) or resume it."""
        body = rest.WebhookUpdate(url=url, event_types=event_types, enabled=enabled)
        return call("PATCH", _path(webhook_id), rest.Webhook, body=body)

    @operation
    def delete(self, webhook_id: str) -> Steps[None]:
        """Delete it, and what waits for it."""
        return call("DELETE", _path(webhook_id), type(None))

    @operation
    def rotate(self, webhook_id: str) -> Steps[rest.WebhookCreated]:
        """A new secret; the old one signs too for a day."""
        return call("POST", f"{_path(webhook_id)}/rotate", rest.WebhookCreated, create=True)

    @operation
    def test(self, webhook_id: str) -> Steps[rest.WebhookDelivery]:
        """Send an event of type `notices.test` now."""
        return call("POST", f"{_path(webhook_id)}/test", rest.WebhookDelivery, create=True)

    @listing
    def deliveries(
        self, webhook_id: str, *, state: str | None = None, limit: int | None = None
    ) -> Listing[rest.WebhookDelivery]:
        """What was and is to be sent, newest first; all, or those that are pending, delivered or failed."""
        path = f"{_path(webhook_id)}/deliveries"
        return Listing(path=path, answer=Page[rest.WebhookDelivery], query={"state": state}, limit=limit)

    @operation
    def retry(self, webhook_id: str, delivery_id: str) -> Steps[rest.WebhookDelivery]:
        """Send it again now, whatever became of it."""
        delivery = identifier("dlv", delivery_id, name="delivery_id")
        path = f"{_path(webhook_id)}/deliveries/{delivery}/retry"
        return call("POST", path, rest.WebhookDelivery, create=True)


def _path(webhook_id: str) -> str:
    return f"/webhooks/{identifier('whk', webhook_id, name='webhook_id')}"
