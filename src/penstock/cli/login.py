"""Logging in and out, and who one is."""

import getpass
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.errors import CliError
from penstock.cli.output import Column, notice
from penstock.cli.profiles import Profile, check_name, config_path, read, write
from penstock.cli.session import Session, command, group

if TYPE_CHECKING:
    from penstock.wire.rest import Whoami

_KEY_CHARS_MAX: Final = 4096


app = group("auth", "Log in and out.")

COLUMNS: "list[Column[Whoami]]" = [
    Column("principal", lambda me: me.principal_id),
    Column("kind", lambda me: me.principal_kind),
    Column("name", lambda me: me.display_name),
    Column("organisation", lambda me: me.organisation_id),
    Column("project", lambda me: me.project_id),
    Column("role", lambda me: me.role),
    Column("operator", lambda me: me.operator),
    Column("key", lambda me: me.key_id),
    Column("gateway", lambda me: me.gateway_url),
]


@command(app, "whoami", example="penstock whoami -o json")
def whoami(session: Session) -> None:
    """Show who the server takes you for."""
    with session.client() as client:
        me = client.whoami()
    session.output.item(me, COLUMNS)


@command(app, "login", example="penstock login --api-url https://cloud.example --key-stdin < key.txt")
def login(
    session: Session,
    key_stdin: Annotated[
        bool, typer.Option("--key-stdin", help="Read the key from standard input instead of asking.")
    ] = False,
    gateway_url: Annotated[
        str | None, typer.Option("--gateway-url", help="The gateway's address, if not the one that the API names.")
    ] = None,
) -> None:
    """Store the API's address and a key in a profile, after trying them."""
    path = config_path(session.environ)
    file = read(path)
    name = check_name(session.flags.profile or session.environ.get("PENSTOCK_PROFILE") or file.current)
    old = file.profiles.get(name, Profile())
    api_url = session.flags.api_url or session.environ.get("PENSTOCK_API_URL") or _ask_url(session, old)
    new = Profile(
        api_url=api_url,
        gateway_url=gateway_url or old.gateway_url,
        key=_key(session, from_stdin=key_stdin),
        project=session.flags.project or old.project,
    )
    new = _try(new)
    write(path, replace(file.with_profile(name, new), current=name))
    notice(f"logged in; profile {name} is in {path}")


def _ask_url(session: Session, old: Profile) -> str:
    session.need_input("--api-url")
    if not sys.stdin.isatty():
        raise CliError("give the API's address with --api-url", field="api_url")
    return typer.prompt("API address", default=old.api_url, err=True)


def _key(session: Session, *, from_stdin: bool) -> str:
    if from_stdin:
        return sys.stdin.readline(_KEY_CHARS_MAX).strip()
    session.need_input("a key (use --key-stdin)")
    if not sys.stdin.isatty():
        raise CliError("standard input is not a terminal; give the key with --key-stdin", field="key")
    return getpass.getpass("API key (not shown): ", stream=sys.stderr)


def _try(profile: Profile) -> Profile:
    """The profile in its normal form, if the server takes it."""
    from penstock.sdk.client import Client

    if not profile.key:
        raise CliError("no key was given", field="key")
    with Client(str(profile.api_url), profile.key, project=profile.project, gateway_url=profile.gateway_url) as client:
        me = client.whoami()
        target = client.executor.target
    notice(f"you are {me.display_name} ({me.role} in {me.project_id})")
    return replace(profile, api_url=target.api_url, gateway_url=target.gateway_url)


@command(app, "logout", example="penstock logout --profile staging")
def logout(session: Session) -> None:
    """Forget the key of a profile. The key itself stays valid: revoke it with `penstock key revoke`."""
    path = config_path(session.environ)
    file = read(path)
    name = session.flags.profile or session.environ.get("PENSTOCK_PROFILE") or file.current
    profile = file.profiles.get(name)
    if profile is None or profile.key is None:
        raise CliError(f"profile {name} has no key; there are: {', '.join(file.profiles) or 'no profiles'}")
    write(path, file.with_profile(name, replace(profile, key=None)))
    notice(f"forgot the key of profile {name}")
