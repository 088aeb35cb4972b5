"""People, programs and the organisations that they belong to."""

from typing import Annotated

import typer

from penstock.cli import completing, names
from penstock.cli.many import Done, each, say_each
from penstock.cli.output import ID, NEEDED, Column
from penstock.cli.session import Session, command, group
from penstock.wire.rest import Organisation, ServiceAccount, User

service_accounts = group("service-account", "Principals for programs.")
users = group("user", "People.")
organisations = group("org", "Organisations: customers that own projects.")

SERVICE_ACCOUNT_COLUMNS: list[Column[ServiceAccount]] = [
    Column("id", lambda account: account.id, rank=ID),
    Column("name", lambda account: account.name, rank=NEEDED),
    Column("role", lambda account: account.role),
    Column("project", lambda account: account.project_id),
    Column("created", lambda account: account.created_at),
]
USER_COLUMNS: list[Column[User]] = [
    Column("id", lambda user: user.id, rank=ID),
    Column("name", lambda user: user.display_name, rank=NEEDED),
    Column("issuer", lambda user: user.issuer),
    Column("subject", lambda user: user.subject),
    Column("created", lambda user: user.created_at),
    Column("disabled", lambda user: user.disabled_at),
]
ORGANISATION_COLUMNS: list[Column[Organisation]] = [
    Column("id", lambda organisation: organisation.id, rank=ID),
    Column("name", lambda organisation: organisation.name, rank=NEEDED),
    Column("created", lambda organisation: organisation.created_at),
]


UserNames = Annotated[list[str], typer.Argument(metavar="PERSON…", help="Their names or ids (usr_…).")]


@command(service_accounts, "list", example="penstock service-account list")
def list_service_accounts(session: Session) -> None:
    """List the service accounts of the project."""
    with session.client() as client:
        session.output.items(client.service_accounts.list(), SERVICE_ACCOUNT_COLUMNS)


@command(service_accounts, "create", example="penstock service-account create ci --role developer")
def create_service_account(
    session: Session,
    name: Annotated[str, typer.Argument(help="What to call it.")],
    role: Annotated[
        str,
        typer.Option(
            help="owner, admin, developer, viewer or billing.", autocompletion=completing.words(*completing.ROLES)
        ),
    ] = "developer",
) -> None:
    """Make a service account; give it a key with `penstock key create --service-account`."""
    with session.client() as client:
        session.output.item(client.service_accounts.create(name, role=role), SERVICE_ACCOUNT_COLUMNS)


@command(service_accounts, "delete", example="penstock service-account delete ci")
def delete_service_account(
    session: Session,
    accounts: Annotated[
        list[str],
        typer.Argument(
            metavar="ACCOUNT…", help="Their names or ids (sva_…).", autocompletion=completing.service_accounts
        ),
    ],
) -> None:
    """Delete service accounts; their keys stop working."""
    with session.client() as client:

        def delete(text: str) -> str:
            client.service_accounts.delete(names.service_account(client, text))
            return f"deleted service account {text}"

        say_each(session, accounts, delete)


@command(users, "list", example="penstock user list")
def list_users(session: Session) -> None:
    """List people."""
    with session.client() as client:
        session.output.items(client.users.list(), USER_COLUMNS)


@command(users, "create", example="penstock user create 'Ada L' --issuer https://id.example --subject 4711")
def create_user(
    session: Session,
    display_name: Annotated[str, typer.Argument(help="The name that others see.")],
    issuer: Annotated[str, typer.Option(help="The identity provider's issuer.")],
    subject: Annotated[str, typer.Option(help="The provider's name for this person.")],
) -> None:
    """Make a person known by their identity provider."""
    with session.client() as client:
        user = client.users.create(issuer=issuer, subject=subject, display_name=display_name)
    session.output.item(user, USER_COLUMNS)


@command(users, "disable", example="penstock user disable 'Ada L'")
def disable_user(session: Session, people: UserNames) -> None:
    """Shut people out: no key and no login of theirs works any more; operators only."""
    with session.client() as client:
        _show(session, each(session, people, lambda text: client.users.disable(names.user(client, text))))


@command(users, "enable", example="penstock user enable 'Ada L'")
def enable_user(session: Session, people: UserNames) -> None:
    """Let people in again; operators only."""
    with session.client() as client:
        _show(session, each(session, people, lambda text: client.users.enable(names.user(client, text))))


def _show(session: Session, done: Done[User]) -> None:
    if done.many:
        session.output.items(done.values, USER_COLUMNS)
    else:
        session.output.item(done.values[0], USER_COLUMNS)
    done.end()


@command(organisations, "list", example="penstock org list")
def list_organisations(session: Session) -> None:
    """List organisations."""
    with session.client() as client:
        session.output.items(client.organisations.list(), ORGANISATION_COLUMNS)


@command(organisations, "create", example="penstock org create acme")
def create_organisation(session: Session, name: Annotated[str, typer.Argument(help="What to call it.")]) -> None:
    """Make an organisation; operators only."""
    with session.client() as client:
        session.output.item(client.organisations.create(name), ORGANISATION_COLUMNS)
