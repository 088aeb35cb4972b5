"""Make, change, pause and delete webhooks; exchange their secrets; look at deliveries and send one again.

A webhook's secret leaves through `create` and `rotate` once, and through the signatures of what is sent.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.outward import Outward, Undelivered
from penstock.notices import model
from penstock.notices.errors import TooManyTests, TooManyWebhooks, WebhookPaused
from penstock.notices.model import (
    SECRET_PREFIX,
    TEST_TYPE,
    TESTS_MAX,
    WEBHOOKS_MAX,
    Delivery,
    Patience,
    Sealed,
    Webhook,
    WebhookEvent,
    WebhookState,
)
from penstock.notices.ports import Vault
from penstock.notices.store import deliveries, webhooks

#: So long the secret before the current one still signs.
OLD_SECRET_S: Final = 24 * 3600.0
BY_OWNER: Final = "paused by its owner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be different; none stays as it is."""

    url: str | None = None
    event_types: Sequence[str] | None = None
    enabled: bool | None = None


def secret_name(webhook_id: str, version: int) -> str:
    """What a webhook's secret is bound to."""
    return f"webhook {webhook_id} {version}"


@dataclass(frozen=True, slots=True)
class Webhooks:
    """The use cases of people."""

    outward: Outward
    vault: Vault
    patience: Patience

    async def check(self, caller: Caller, url: str | None, event_types: Sequence[str] | None) -> None:
        """Pass if the caller may ask for this. Looks the name up, so it comes before any transaction."""
        caller.require("webhooks.write")
        if event_types is not None:
            if (unknown := model.unknown_type(event_types)) is not None:
                raise Invalid(f"event_types: there is no event {unknown!r}; see docs/api", field="event_types")
            if model.asks_for_billing(event_types):
                caller.require("billing.read")
        if url is not None:
            try:
                await self.outward.check(url)
            except Undelivered as error:
                raise Invalid(f"url: {error.why}", field="url") from error

    async def create(self, tx: Tx, caller: Caller, *, url: str, event_types: Sequence[str]) -> tuple[Webhook, str]:
        """A webhook, and the secret that its receiver verifies signatures with."""
        caller.require("webhooks.write")
        await webhooks.lock_project(tx, caller.project_id)
        if await webhooks.count(tx, caller.project_id) >= WEBHOOKS_MAX:
            raise TooManyWebhooks(f"a project has at most {WEBHOOKS_MAX} webhooks")
        made = await webhooks.insert(
            tx,
            organisation_id=caller.organisation_id,
            project_id=caller.project_id,
            url=url,
            event_types=list(dict.fromkeys(event_types)),
            sees_billing=_may_see_billing(caller),
            created_by=caller.principal_id,
        )
        secret = await self._new_secret(tx, made)
        await webhooks.tell(tx, made, "notices.webhook_created")
        await audit.record(tx, caller.actor, "webhooks.create", made.id, detail={"event_types": made.event_types})
        return made, secret

    async def _new_secret(self, tx: Tx, webhook: Webhook) -> str:
        secret = SECRET_PREFIX + secrets.token_urlsafe(32)
        version = await webhooks.next_secret_version(tx, webhook.id)
        key_id, sealed = self.vault.seal(
            project_id=webhook.project_id, name=secret_name(webhook.id, version), value=secret.encode()
        )
        await webhooks.put_secret(tx, webhook.id, Sealed(version, key_id, sealed), old_for_s=OLD_SECRET_S)
        return secret

    async def rotate(self, tx: Tx, caller: Caller, webhook_id: str) -> tuple[Webhook, str]:
        """A new secret; for a day everything is signed with the old one too."""
        caller.require("webhooks.write")
        webhook = await _find(tx, caller, webhook_id, lock=True)
        secret = await self._new_secret(tx, webhook)
        await audit.record(tx, caller.actor, "webhooks.rotate", webhook.id)
        return await _find(tx, caller, webhook_id), secret

    async def send_test(self, tx: Tx, caller: Caller, webhook_id: str) -> Delivery:
        """An event for this webhook alone, sent at once."""
        caller.require("webhooks.write")
        webhook = await self._find_active(tx, caller, webhook_id, lock=True)
        if await deliveries.count_waiting(tx, webhook.id, TEST_TYPE) >= TESTS_MAX:
            raise TooManyTests(f"{TESTS_MAX} test events still wait to be delivered")
        # An aggregate of its own: it waits for nothing.
        event = Event(
            type=TEST_TYPE,
            aggregate_id=new_id("tst"),
            version=1,
            organisation_id=webhook.organisation_id,
            project_id=webhook.project_id,
            payload={"webhook_id": webhook.id},
        )
        sent = await deliveries.insert(tx, webhook.id, event, give_up_s=self.patience.give_up_s)
        await webhooks.hurry(tx, webhook.id)
        await audit.record(tx, caller.actor, "webhooks.test", webhook.id)
        return sent

    async def retry(self, tx: Tx, caller: Caller, webhook_id: str, delivery_id: str) -> Delivery:
        """Send it again now, whether it failed, waits for its next try, or was delivered."""
        caller.require("webhooks.write")
        # The delivery's row before the webhook's, as whoever settles it takes them.
        webhook = await self._find_active(tx, caller, webhook_id, lock=False)
        found = await deliveries.again(tx, webhook.id, delivery_id, give_up_s=self.patience.give_up_s)
        if found is None:
            raise missing("delivery", delivery_id)
        await webhooks.hurry(tx, webhook.id)
        await audit.record(tx, caller.actor, "webhooks.retry", webhook.id, detail={"delivery_id": delivery_id})
        return found

    async def _find_active(self, tx: Tx, caller: Caller, webhook_id: str, *, lock: bool) -> Webhook:
        webhook = await _find(tx, caller, webhook_id, lock=lock)
        if webhook.state is not WebhookState.ACTIVE:
            raise WebhookPaused("the webhook is paused: enable it first")
        return webhook


async def update(tx: Tx, caller: Caller, webhook_id: str, change: Change) -> Webhook:
    """Another address, other events, or (un)paused. One that is enabled again hears of what happens from then on."""
    caller.require("webhooks.write")
    webhook = await _find(tx, caller, webhook_id, lock=True)
    if change.url is not None or change.event_types is not None:
        webhook = await webhooks.change(
            tx,
            webhook,
            url=change.url or webhook.url,
            event_types=list(dict.fromkeys(change.event_types or webhook.event_types)),
            sees_billing=_may_see_billing(caller) if change.event_types is not None else None,
        )
        await webhooks.tell(tx, webhook, "notices.webhook_updated")
    if change.enabled is True and webhook.state is WebhookState.PAUSED:
        webhook = await webhooks.move(tx, webhook, WebhookEvent.RESUME, "")
    if change.enabled is False and webhook.state is WebhookState.ACTIVE:
        webhook = await webhooks.move(tx, webhook, WebhookEvent.PAUSE, BY_OWNER)
    await audit.record(tx, caller.actor, "webhooks.update", webhook.id, detail={"state": str(webhook.state)})
    return webhook


async def delete(tx: Tx, caller: Caller, webhook_id: str) -> None:
    """Nothing more is sent to it; what waits is dropped."""
    caller.require("webhooks.write")
    webhook = await _find(tx, caller, webhook_id, lock=True)
    await webhooks.move(tx, webhook, WebhookEvent.DELETE, "")
    await audit.record(tx, caller.actor, "webhooks.delete", webhook.id)


async def pause(tx: Tx, webhook: Webhook, reason: str) -> None:
    """Send nothing more to one that is active; its owner is told by the fact."""
    await webhooks.move(tx, webhook, WebhookEvent.PAUSE, reason)
    await audit.record(
        tx,
        audit.system("notices"),
        "webhooks.pause",
        webhook.id,
        organisation_id=webhook.organisation_id,
        project_id=webhook.project_id,
        detail={"reason": reason},
    )


async def show(conn: Reader, caller: Caller, webhook_id: str) -> Webhook:
    """One webhook."""
    caller.require("webhooks.read")
    return await _find(conn, caller, webhook_id)


async def page(conn: Reader, caller: Caller, *, after: str, limit: int) -> list[Webhook]:
    """The project's webhooks."""
    caller.require("webhooks.read")
    return await webhooks.page(conn, caller.project_id, after=after, limit=limit)


async def list_deliveries(
    conn: Reader, caller: Caller, webhook_id: str, *, before: int | None, state: str | None, limit: int
) -> list[Delivery]:
    """What was and is to be sent to it, newest first."""
    caller.require("webhooks.read")
    webhook = await _find(conn, caller, webhook_id)
    return await deliveries.page(conn, webhook.id, before=before, state=state, limit=limit)


async def _find(conn: Reader, caller: Caller, webhook_id: str, *, lock: bool = False) -> Webhook:
    found = await webhooks.find(conn, caller.project_id, webhook_id, lock=lock)
    if found is None:
        raise missing("webhook", webhook_id)
    return found


def _may_see_billing(caller: Caller) -> bool:
    return "billing.read" in caller.actions
