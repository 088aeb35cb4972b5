"""Webhooks over REST."""

from typing import Annotated, Any

import msgspec
from litestar import MediaType, Response, Router, delete, get, patch, post
from litestar.params import QueryParameter

from penstock.kit import http, idempotency, paging, sealing
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Invalid
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.notices import schemas, service
from penstock.notices.errors import SecretShownBefore
from penstock.notices.model import DeliveryState, Webhook
from penstock.notices.service import Change, Webhooks
from penstock.wire import rest

#: Read by hand: `state` is a word of the framework's own, and what is wrong must be named as it was asked.
State = Annotated[str | None, QueryParameter(name="state", required=False, enum=list(DeliveryState))]


def router(webhooks: Webhooks, db: Database) -> Router:
    """All routes of webhooks, below /api/v1."""
    handlers = [*_reading(db), *_changing(webhooks, db), *_secrets(webhooks, db), *_deliveries(webhooks, db)]
    return Router(path="/", route_handlers=handlers, tags=["webhooks"])


def _reading(db: Database) -> list[Any]:
    @get("/webhooks", operation_id="listWebhooks")
    async def list_webhooks(caller: Caller, page: PageQuery) -> rest.Page[rest.Webhook]:
        """The project's webhooks, without their secrets."""
        async with db.read() as conn:
            found = await service.page(conn, caller, after=_after(page), limit=page.limit + 1)
        items = [schemas.webhook(each) for each in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("webhook", items[-1].id) if more else None)

    @get("/webhooks/{webhook_id:str}", operation_id="getWebhook")
    async def get_webhook(caller: Caller, webhook_id: str) -> rest.Webhook:
        """One webhook, without its secret."""
        async with db.read() as conn:
            return schemas.webhook(await service.show(conn, caller, http.path_id("whk", webhook_id)))

    return [list_webhooks, get_webhook]


def _changing(webhooks: Webhooks, db: Database) -> list[Any]:
    @patch("/webhooks/{webhook_id:str}", operation_id="updateWebhook", opt={"action": "webhooks.write"})
    async def update_webhook(caller: Caller, webhook_id: str, data: rest.WebhookUpdate) -> rest.Webhook:
        """Another address, other events; pause it, or resume it. A resumed one hears of what happens from then on, and
        gets what waited when it was paused."""
        wanted = http.path_id("whk", webhook_id)
        await webhooks.check(caller, data.url, data.event_types)
        change = Change(url=data.url, event_types=data.event_types, enabled=data.enabled)
        async with db.transaction() as tx:
            return schemas.webhook(await service.update(tx, caller, wanted, change))

    @delete("/webhooks/{webhook_id:str}", operation_id="deleteWebhook")
    async def delete_webhook(caller: Caller, webhook_id: str) -> None:
        """Delete a webhook and what waits for it."""
        async with db.transaction() as tx:
            await service.delete(tx, caller, http.path_id("whk", webhook_id))

    return [update_webhook, delete_webhook]


def _secrets(webhooks: Webhooks, db: Database) -> list[Any]:
    @post("/webhooks", operation_id="createWebhook", opt={"action": "webhooks.write"})
    async def create_webhook(
        caller: Caller, once: Once | None, credential: str, data: rest.WebhookCreate
    ) -> Response[rest.WebhookCreated]:
        """A new webhook. This answer alone shows the secret that its messages are signed with."""
        await webhooks.check(caller, data.url, data.event_types)

        async def effect(tx: Tx) -> bytes:
            made, secret = await webhooks.create(tx, caller, url=data.url, event_types=data.event_types)
            return _sealed(made, secret, credential)

        return http.created(_unsealed(await idempotency.run(db, once, effect), credential))

    @post(
        "/webhooks/{webhook_id:str}/rotate",
        operation_id="rotateWebhook",
        opt={"action": "webhooks.write"},
        status_code=200,
    )
    async def rotate_webhook(
        caller: Caller, once: Once | None, credential: str, webhook_id: str
    ) -> Response[rest.WebhookCreated]:
        """A new secret, shown this once. For 24 hours messages are signed with the old one too."""
        wanted = http.path_id("whk", webhook_id)

        async def effect(tx: Tx) -> bytes:
            changed, secret = await webhooks.rotate(tx, caller, wanted)
            return _sealed(changed, secret, credential)

        body: Any = _unsealed(await idempotency.run(db, once, effect), credential)
        return Response(content=body, status_code=200, media_type=MediaType.JSON)

    return [create_webhook, rotate_webhook]


def _deliveries(webhooks: Webhooks, db: Database) -> list[Any]:
    @get("/webhooks/{webhook_id:str}/deliveries", operation_id="listWebhookDeliveries")
    async def list_deliveries(
        caller: Caller, page: PageQuery, webhook_id: str, delivery_state: State = None
    ) -> rest.Page[rest.WebhookDelivery]:
        """What was and is to be sent, newest first. Deliveries that have ended are kept for a week."""
        wanted, before, state = http.path_id("whk", webhook_id), _before(page), _state(delivery_state)
        async with db.read() as conn:
            found = await service.list_deliveries(
                conn, caller, wanted, before=before, state=state, limit=page.limit + 1
            )
        shown = found[: page.limit]
        cursor = paging.encode_cursor("delivery", shown[-1].seq) if len(found) > page.limit else None
        return rest.Page(items=[schemas.delivery(each) for each in shown], next_cursor=cursor)

    @post(
        "/webhooks/{webhook_id:str}/deliveries/{delivery_id:str}/retry",
        operation_id="retryWebhookDelivery",
        opt={"action": "webhooks.write"},
    )
    async def retry_delivery(
        caller: Caller, once: Once | None, webhook_id: str, delivery_id: str
    ) -> Response[rest.WebhookDelivery]:
        """Send it again now, whatever became of it."""
        of, wanted = http.path_id("whk", webhook_id), http.path_id("dlv", delivery_id)

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(schemas.delivery(await webhooks.retry(tx, caller, of, wanted)))

        return http.created(await idempotency.run(db, once, effect))

    @post("/webhooks/{webhook_id:str}/test", operation_id="testWebhook", opt={"action": "webhooks.write"})
    async def test_webhook(caller: Caller, once: Once | None, webhook_id: str) -> Response[rest.WebhookDelivery]:
        """Send an event of type `notices.test` now."""
        wanted = http.path_id("whk", webhook_id)

        async def effect(tx: Tx) -> bytes:
            return msgspec.json.encode(schemas.delivery(await webhooks.send_test(tx, caller, wanted)))

        return http.created(await idempotency.run(db, once, effect))

    return [list_deliveries, retry_delivery, test_webhook]


def _sealed(webhook: Webhook, secret: str, credential: str) -> bytes:
    """The answer as it is kept for repeats: never with the secret in the clear."""
    sealed = sealing.seal(secret, credential=credential)
    return msgspec.json.encode(rest.WebhookCreated(webhook=schemas.webhook(webhook), secret=sealed))


def _unsealed(kept: bytes, credential: str) -> bytes:
    answer = msgspec.json.decode(kept, type=rest.WebhookCreated)
    secret = sealing.unseal(answer.secret, credential=credential)
    if secret is None:
        raise SecretShownBefore("this secret was made by an earlier call with another credential")
    return msgspec.json.encode(rest.WebhookCreated(webhook=answer.webhook, secret=secret))


def _state(text: str | None) -> str | None:
    if text is not None and text not in list(DeliveryState):
        raise Invalid(f"state must be one of {', '.join(DeliveryState)}", field="state")
    return text


def _after(page: PageQuery) -> str:
    if page.cursor is None:
        return ""
    match paging.decode_cursor(page.cursor):
        case ["webhook", str(last)]:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _before(page: PageQuery) -> int | None:
    if page.cursor is None:
        return None
    match paging.decode_cursor(page.cursor):
        case ["delivery", int(last)]:
            return last
        case _:
            raise Invalid("invalid cursor", field="cursor")
