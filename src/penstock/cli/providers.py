"""Identity providers, what their groups may do, and people's sessions."""

from typing import Annotated

import typer

from penstock.cli import names
from penstock.cli.many import say_each
from penstock.cli.output import EXTRA, ID, Column, notice
from penstock.cli.session import Session, command, group
from penstock.wire.rest import GroupMapping, IdentityProvider, LoginSession

app = group("idp", "Identity providers: whom people log in with, and what their groups may do.")
sessions = group("session", "Logins of people.")

COLUMNS: list[Column[IdentityProvider]] = [
    Column("name", lambda provider: provider.name, rank=ID),
    Column("issuer", lambda provider: provider.issuer),
    Column("client", lambda provider: provider.client_id),
    Column("audiences", lambda provider: provider.audiences, rank=EXTRA),
    Column("scopes", lambda provider: provider.scopes, rank=EXTRA),
    Column("groups claim", lambda provider: provider.groups_claim),
    Column("session s", lambda provider: provider.session_s),
    Column("enabled", lambda provider: provider.enabled),
    Column("created", lambda provider: provider.created_at),
]
MAPPING_COLUMNS: list[Column[GroupMapping]] = [
    Column("id", lambda mapping: mapping.id, rank=ID),
    Column("group", lambda mapping: mapping.group),
    Column("role", lambda mapping: mapping.role),
    Column("project", lambda mapping: mapping.project_id),
    Column("organisation", lambda mapping: mapping.organisation_id),
    Column("operator", lambda mapping: mapping.operator),
    Column("created", lambda mapping: mapping.created_at),
]
SESSION_COLUMNS: list[Column[LoginSession]] = [
    Column("id", lambda session: session.id, rank=ID),
    Column("person", lambda session: session.principal_id),
    Column("provider", lambda session: session.provider),
    Column("groups", lambda session: session.groups, rank=EXTRA),
    Column("created", lambda session: session.created_at),
    Column("expires", lambda session: session.expires_at),
    Column("revoked", lambda session: session.revoked_at),
    Column("last used", lambda session: session.last_used_at),
]

Name = Annotated[str, typer.Argument(help="The provider's name.")]


@command(app, "list", example="penstock idp list")
def list_providers(session: Session) -> None:
    """List the identity providers; operators only."""
    with session.client() as client:
        session.output.items(client.identity_providers.list(), COLUMNS)


@command(app, "show", example="penstock idp show corp")
def show(session: Session, name: Name) -> None:
    """Show one identity provider."""
    with session.client() as client:
        session.output.item(client.identity_providers.get(name), COLUMNS)


@command(app, "set", example="penstock idp set corp --issuer https://id.example/realms/corp --client-id penstock")
def put(
    session: Session,
    name: Name,
    issuer: Annotated[str, typer.Option(help="Exactly as in its tokens.")],
    client_id: Annotated[str, typer.Option(help="This cloud's client there.")],
    client_secret: Annotated[
        str, typer.Option(help="Only where the provider wants one from programs on people's machines; not a secret.")
    ] = "",
    audience: Annotated[
        list[str] | None, typer.Option(help="Also take tokens made for this audience; repeatable.")
    ] = None,
    scope: Annotated[list[str] | None, typer.Option(help="What to ask for; repeatable.")] = None,
    groups_claim: Annotated[str, typer.Option(help="The claim that lists a person's groups.")] = "groups",
    session_s: Annotated[int, typer.Option(help="How long a login lasts, in seconds.")] = 12 * 3600,
    disabled: Annotated[bool, typer.Option("--disabled", help="Refuse its tokens and sessions.")] = False,
) -> None:
    """Make or change an identity provider; operators only."""
    with session.client() as client:
        provider = client.identity_providers.put(
            name,
            issuer=issuer,
            client_id=client_id,
            client_secret=client_secret,
            audiences=audience or (),
            scopes=scope or ("openid", "profile", "email"),
            groups_claim=groups_claim,
            session_s=session_s,
            enabled=not disabled,
        )
    session.output.item(provider, COLUMNS)


@command(app, "remove", example="penstock idp remove corp")
def remove(
    session: Session,
    providers: Annotated[list[str], typer.Argument(metavar="PROVIDER…", help="The providers' names.")],
) -> None:
    """Remove identity providers with their mappings; their people's sessions end."""
    with session.client() as client:

        def remove(text: str) -> str:
            client.identity_providers.delete(text)
            return f"removed identity provider {text}"

        say_each(session, providers, remove)


@command(app, "map", example="penstock idp map corp ml-team --in-project research --role developer")
def map_group(
    session: Session,
    name: Name,
    group_name: Annotated[str, typer.Argument(metavar="GROUP", help="The group as its tokens have it.")],
    role: Annotated[str | None, typer.Option(help="owner, admin, developer, viewer or billing.")] = None,
    in_project: Annotated[str | None, typer.Option(help="The role holds in this project, by name or id.")] = None,
    in_organisation: Annotated[
        str | None, typer.Option(help="The role holds in all projects of this organisation, by name or id.")
    ] = None,
    operator: Annotated[bool, typer.Option("--operator", help="The group's people may do everything.")] = False,
) -> None:
    """Let a group have a role in a project or an organisation, or be operators."""
    with session.client() as client:
        project_id = None if in_project is None else names.project(client, in_project)
        organisation_id = None if in_organisation is None else names.organisation(client, in_organisation)
        mapping = client.identity_providers.mappings.create(
            name, group_name, role=role, project_id=project_id, organisation_id=organisation_id, operator=operator
        )
    session.output.item(mapping, MAPPING_COLUMNS)


@command(app, "mappings", example="penstock idp mappings corp")
def list_mappings(session: Session, name: Name) -> None:
    """List what the provider's groups may do."""
    with session.client() as client:
        session.output.items(client.identity_providers.mappings.list(name), MAPPING_COLUMNS)


@command(app, "unmap", example="penstock idp unmap corp map_01k9z3v5x7y9a1b3c5d7e9f1g3")
def unmap_group(
    session: Session, name: Name, mapping_id: Annotated[str, typer.Argument(help="Its id (map_…).")]
) -> None:
    """Take from a group what a mapping gave it."""
    with session.client() as client:
        client.identity_providers.mappings.delete(name, mapping_id)
    notice(f"removed mapping {mapping_id}")


@command(sessions, "list", example="penstock session list")
def list_sessions(
    session: Session,
    user: Annotated[str | None, typer.Option(help="Another person's, by name or id; operators only.")] = None,
) -> None:
    """List your logins."""
    with session.client() as client:
        person = None if user is None else names.user(client, user)
        session.output.items(client.sessions.list(principal_id=person), SESSION_COLUMNS)


@command(sessions, "revoke", example="penstock session revoke ses_01k9z3v5x7y9a1b3c5d7e9f1g3")
def revoke(
    session: Session,
    logins: Annotated[list[str], typer.Argument(metavar="SESSION…", help="Their ids (ses_…).")],
) -> None:
    """End logins; what runs under them ends within seconds."""
    with session.client() as client:

        def revoke(text: str) -> str:
            client.sessions.revoke(text)
            return f"revoked session {text}"

        say_each(session, logins, revoke)
