"""Webhooks: addresses that events are sent to."""

from typing import Annotated

import typer

from penstock.cli import completing, names
from penstock.cli.errors import CliError
from penstock.cli.many import say_each
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format, notice
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Webhook, WebhookCreated, WebhookDelivery

app = group("webhook", "Addresses that events are sent to.")

COLUMNS: list[Column[Webhook]] = [
    Column("id", lambda webhook: webhook.id, rank=ID),
    Column("state", lambda webhook: webhook.state, rank=NEEDED),
    Column("url", lambda webhook: webhook.url),
    Column("events", lambda webhook: " ".join(webhook.event_types), rank=EXTRA),
    Column("failures", lambda webhook: webhook.failures),
    Column("reason", lambda webhook: webhook.reason, rank=EXTRA),
]
DETAILS: list[Column[Webhook]] = [
    *COLUMNS,
    Column("failing since", lambda webhook: webhook.failing_since),
    Column("next try", lambda webhook: webhook.next_try_at),
    Column("old secret until", lambda webhook: webhook.old_secret_until),
    Column("created", lambda webhook: webhook.created_at),
    Column("created by", lambda webhook: webhook.created_by),
    Column("updated", lambda webhook: webhook.updated_at),
]
DELIVERY_COLUMNS: list[Column[WebhookDelivery]] = [
    Column("id", lambda delivery: delivery.id, rank=ID),
    Column("event", lambda delivery: delivery.event_type),
    Column("state", lambda delivery: delivery.state, rank=NEEDED),
    Column("attempts", lambda delivery: delivery.attempts),
    Column("error", lambda delivery: delivery.error, rank=EXTRA),
    Column("detail", lambda delivery: delivery.detail, rank=EXTRA),
    Column("next try", lambda delivery: delivery.next_try_at),
    Column("created", lambda delivery: delivery.created_at),
    Column("event id", lambda delivery: delivery.event_id),
]
#: For a terminal; with -o csv or json there is everything.
DELIVERY_TABLE: list[Column[WebhookDelivery]] = [
    Column("id", lambda delivery: delivery.id, rank=ID),
    Column("event", lambda delivery: delivery.event_type),
    Column("state", lambda delivery: delivery.state, rank=NEEDED),
    Column("attempts", lambda delivery: delivery.attempts),
    Column("created", lambda delivery: delivery.created_at),
    Column("error", lambda delivery: delivery.error, rank=EXTRA),
]

WebhookName = Annotated[
    str,
    typer.Argument(metavar="WEBHOOK", help="The webhook's address or id (whk_…).", autocompletion=completing.webhooks),
]
Events = Annotated[
    list[str] | None,
    typer.Option(
        "--event", metavar="TYPE", help="These only: a type, or provisioning.*; repeat. A new one without gets all."
    ),
]


@command(app, "create", example="penstock webhook create https://hooks.example/penstock --event 'provisioning.*'")
def create(
    session: Session,
    url: Annotated[str, typer.Argument(help="A public https address, port 443 or 8443.")],
    event: Events = None,
) -> None:
    """Send events to an address, and print the secret that they are signed with, this once."""
    with session.client() as client:
        made = client.webhooks.create(url, event)
    _show_secret(session, made)


@command(app, "list", example="penstock webhook list")
def list_(session: Session) -> None:
    """List webhooks, and how they do."""
    with session.client() as client:
        session.output.items(client.webhooks.list(), COLUMNS)


@command(app, "show", example="penstock webhook show whk_01k9z3v5x7y9a1b3c5d7e9f1g3")
def show(session: Session, webhook: WebhookName) -> None:
    """Show a webhook."""
    with session.client() as client:
        session.output.item(client.webhooks.get(names.webhook(client, webhook)), DETAILS)


@command(app, "update", example="penstock webhook update whk_01k9z3v5x7y9a1b3c5d7e9f1g3 --enable")
def update(
    session: Session,
    webhook: WebhookName,
    url: Annotated[str | None, typer.Option(help="Send to this address from now on.")] = None,
    event: Events = None,
    enable: Annotated[
        bool | None, typer.Option("--enable/--pause", help="Resume what was paused, or pause.", show_default=False)
    ] = None,
) -> None:
    """Change a webhook's address or events; pause or resume it."""
    if url is None and event is None and enable is None:
        raise CliError("give --url, --event, --enable or --pause")
    with session.client() as client:
        changed = client.webhooks.update(names.webhook(client, webhook), url=url, event_types=event, enabled=enable)
    session.output.item(changed, DETAILS)


@command(app, "delete", example="penstock webhook delete whk_01k9z3v5x7y9a1b3c5d7e9f1g3")
def delete(
    session: Session,
    webhooks: Annotated[
        list[str],
        typer.Argument(
            metavar="WEBHOOK…", help="The webhooks' addresses or ids (whk_…).", autocompletion=completing.webhooks
        ),
    ],
) -> None:
    """Delete webhooks and what waits for them."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.webhooks.delete(names.webhook(client, text))
            return f"deleted webhook {text}"

        say_each(session, webhooks, delete)


@command(app, "rotate", example="penstock webhook rotate whk_01k9z3v5x7y9a1b3c5d7e9f1g3")
def rotate(session: Session, webhook: WebhookName) -> None:
    """Make a new secret and print it, this once. For 24 hours messages are signed with the old one too."""
    with session.client() as client:
        changed = client.webhooks.rotate(names.webhook(client, webhook))
    _show_secret(session, changed)


@command(app, "test", example="penstock webhook test whk_01k9z3v5x7y9a1b3c5d7e9f1g3")
def test(session: Session, webhook: WebhookName) -> None:
    """Send a test event now; `webhook deliveries` shows what became of it."""
    with session.client() as client:
        session.output.item(client.webhooks.test(names.webhook(client, webhook)), DELIVERY_COLUMNS)


@command(app, "deliveries", example="penstock webhook deliveries whk_01k9z3v5x7y9a1b3c5d7e9f1g3 --state failed")
def deliveries(
    session: Session,
    webhook: WebhookName,
    state: Annotated[
        str | None,
        typer.Option(
            help="pending, delivered or failed.", autocompletion=completing.words("pending", "delivered", "failed")
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 50,
) -> None:
    """List what was and is to be sent, newest first."""
    with session.client() as client:
        columns = DELIVERY_TABLE if session.output.format is Format.TABLE else DELIVERY_COLUMNS
        session.output.items(
            client.webhooks.deliveries(names.webhook(client, webhook), state=state, limit=limit), columns
        )


@command(
    app,
    "retry",
    example="penstock webhook retry whk_01k9z3v5x7y9a1b3c5d7e9f1g3 dlv_01k9z3v5x7y9a1b3c5d7e9f1g3",
)
def retry(
    session: Session,
    webhook: WebhookName,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="The delivery's id (dlv_…).")],
) -> None:
    """Send an event again now, whatever became of it."""
    with session.client() as client:
        session.output.item(client.webhooks.retry(names.webhook(client, webhook), delivery), DELIVERY_COLUMNS)


def _show_secret(session: Session, made: WebhookCreated) -> None:
    if session.output.format is Format.JSON:
        session.output.json(made)
        return
    notice(f"{made.webhook.id}; the secret is shown only now:")
    session.output.line(made.secret)
