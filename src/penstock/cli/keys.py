"""API keys."""

from typing import Annotated

import typer

from penstock.cli import completing, names
from penstock.cli.many import say_each
from penstock.cli.output import ID, NEEDED, Column, Format, notice
from penstock.cli.resolve import local_instance
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Key

app = group("key", "Make, list and revoke API keys.")

COLUMNS: list[Column[Key]] = [
    Column("id", lambda key: key.id, rank=ID),
    Column("name", lambda key: key.name, rank=NEEDED),
    Column("hint", lambda key: key.hint),
    Column("role", lambda key: key.role, rank=NEEDED),
    Column("principal", lambda key: key.principal_id),
    Column("expires", lambda key: key.expires_at),
    Column("revoked", lambda key: key.revoked_at),
    Column("last used", lambda key: key.last_used_at),
]


@command(app, "list", example="penstock key list")
def list_(session: Session) -> None:
    """List keys, without their secrets."""
    with session.client() as client:
        session.output.items(client.keys.list(), COLUMNS)


@command(app, "create", example="penstock key create ci --role developer --expires-in 2592000")
def create(
    session: Session,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    role: Annotated[
        str,
        typer.Option(
            help="owner, admin, developer, viewer or billing.", autocompletion=completing.words(*completing.ROLES)
        ),
    ] = "developer",
    service_account: Annotated[
        str | None,
        typer.Option(
            help="Make it for this service account, by name or id, instead of for yourself.",
            autocompletion=completing.service_accounts,
        ),
    ] = None,
    expires_in: Annotated[int | None, typer.Option(metavar="SECONDS", help="When it stops working.")] = None,
) -> None:
    """Make a key and print its secret, this once."""
    with session.client() as client:
        owner = None if service_account is None else names.service_account(client, service_account)
        made = client.keys.create(name, role=role, service_account_id=owner, expires_in_s=expires_in)
    if session.output.format is Format.JSON:
        session.output.json(made)
        return
    notice(f"{made.key.id} ({made.key.role}); the secret is shown only now:")
    session.output.line(made.secret)


@command(app, "revoke", example="penstock key revoke ci")
def revoke(
    session: Session,
    keys: Annotated[
        list[str],
        typer.Argument(metavar="KEY…", help="The keys' names or ids (key_…).", autocompletion=completing.keys),
    ],
) -> None:
    """Make keys worthless, within seconds."""
    with session.client() as client:

        def revoke(text: str) -> str:
            client.keys.revoke(names.key(client, text))
            return f"revoked key {text}"

        say_each(session, keys, revoke)


@command(app, "show", example="export PENSTOCK_API_KEY=$(penstock key show)")
def show(session: Session) -> None:
    """Print the admin key of the local instance."""
    running = local_instance(session.flags, session.environ)
    if session.output.format is Format.JSON:
        session.output.json({"api": running.api, "gateway": running.gateway, "key": running.key})
    else:
        session.output.line(running.key)
