"""Logging in and out, and who one is."""

import getpass
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from penstock.cli.errors import CliError
from penstock.cli.output import NEEDED, Column, notice
from penstock.cli.profiles import Profile, change, check_name, config_path, read
from penstock.cli.session import Session, command, group
from penstock.cli.text import clean

if TYPE_CHECKING:
    from penstock.cli.oidc import Attempt, Provider
    from penstock.wire.rest import LoginProvider, SessionCreated, Whoami

_KEY_CHARS_MAX: Final = 4096
_PASTED_CHARS_MAX: Final = 16_384
_SESSION_PREFIX: Final = "pss_"


app = group("auth", "Log in and out.")

COLUMNS: "list[Column[Whoami]]" = [
    Column("principal", lambda me: me.principal_id),
    Column("kind", lambda me: me.principal_kind),
    Column("name", lambda me: me.display_name, rank=NEEDED),
    Column("organisation", lambda me: me.organisation_id),
    Column("project", lambda me: me.project_id),
    Column("role", lambda me: me.role),
    Column("operator", lambda me: me.operator),
    Column("key", lambda me: me.key_id),
    Column("session", lambda me: me.session_id),
    Column("gateway", lambda me: me.gateway_url),
]


@dataclass(frozen=True, slots=True)
class Way:
    """How the person wants to log in with a provider."""

    provider: str | None
    browser: bool
    callback_port: int


@command(app, "whoami", example="penstock whoami -o json")
def whoami(session: Session) -> None:
    """Show who the server takes you for."""
    with session.client() as client:
        me = client.whoami()
    session.output.item(me, COLUMNS)


@command(app, "login", example="penstock login --api-url https://cloud.example")
def login(
    session: Session,
    key_stdin: Annotated[bool, typer.Option("--key-stdin", help="Use an API key, read from standard input.")] = False,
    provider: Annotated[str | None, typer.Option(help="The identity provider, where there are several.")] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Show an address and a code to use on any device.")
    ] = False,
    callback_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where the browser comes back to; any free port by default.")
    ] = 0,
    gateway_url: Annotated[
        str | None, typer.Option("--gateway-url", help="The gateway's address, if not the one that the API names.")
    ] = None,
) -> None:
    """Log in with your identity provider, or with an API key, and store that in a profile."""
    path = config_path(session.environ)
    file = read(path)
    name = check_name(session.flags.profile or session.environ.get("PENSTOCK_PROFILE") or file.current)
    old = file.profiles.get(name, Profile())
    api_url = session.flags.api_url or session.environ.get("PENSTOCK_API_URL") or _ask_url(session, old)
    # What the profile says of another cloud must not be sent this one's key.
    kept = old if old.api_url == api_url else Profile()
    new = Profile(
        api_url=api_url,
        gateway_url=gateway_url or kept.gateway_url,
        project=session.flags.project or kept.project,
    )
    way = Way(provider, browser=not no_browser, callback_port=callback_port)
    offered = None if key_stdin else _offered(api_url, way)
    if offered is None:
        new = _try(session, replace(new, key=_key(session, from_stdin=key_stdin)))
    else:
        new = _by_provider(session, new, offered, way)
    change(path, lambda now: replace(now.with_profile(name, new), current=name))
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


def _try(session: Session, profile: Profile) -> Profile:
    """The profile in its normal form, if the server takes it."""
    from penstock.sdk.client import Client

    if not profile.key:
        raise CliError("no key was given", field="key")
    with Client(
        str(profile.api_url),
        profile.key,
        project=profile.project,
        gateway_url=profile.gateway_url,
        allow_http=session.allow_http,
    ) as client:
        me = client.whoami()
        target = client.executor.target
    notice(f"you are {me.display_name} ({me.role} in {me.project_id})")
    return replace(profile, api_url=target.api_url, gateway_url=target.gateway_url)


def _offered(api_url: str, way: Way) -> "LoginProvider | None":
    """The provider to log in with; none if the cloud has none, and keys only."""
    from penstock.sdk.client import Client
    from penstock.sdk.errors import NotFound

    with Client(api_url, None) as client:
        try:
            found = {provider.name: provider for provider in client.sessions.document().providers}
        except NotFound:
            found = {}
    if way.provider is None and len(found) <= 1:
        return next(iter(found.values()), None)
    if way.provider in found:
        return found[way.provider]
    known = ", ".join(found) or "none"
    what = "which identity provider?" if way.provider is None else f"no identity provider {way.provider!r};"
    raise CliError(f"{what} there are: {known}; choose with --provider", field="provider")


def _by_provider(session: Session, new: Profile, offered: "LoginProvider", way: Way) -> Profile:
    from penstock.cli.oidc import discover
    from penstock.sdk.client import Client

    provider = discover(
        offered.issuer,
        client_id=offered.client_id,
        client_secret=offered.client_secret,
        scopes=tuple(offered.scopes),
    )
    token, nonce = _token(session, provider, way)
    with Client(str(new.api_url), None, gateway_url=new.gateway_url) as client:
        opened = client.sessions.create(token, nonce=nonce)
        target = client.executor.target
    new = replace(new, api_url=target.api_url, gateway_url=target.gateway_url, key=opened.secret)
    return replace(new, project=_project(opened, new.project))


def _token(session: Session, provider: "Provider", way: Way) -> tuple[str, str | None]:
    """The provider's ID token, and the nonce that is in it."""
    from penstock.cli.callback import listen
    from penstock.cli.oidc import Attempt, by_device, redeem

    if not way.browser and provider.device_endpoint is not None:
        return by_device(provider, _show_code), None
    if way.browser:
        with listen(way.callback_port) as callback:
            attempt = Attempt(redirect_uri=callback.url)
            _open(attempt.url(provider))
            code = attempt.code(callback.wait(), provider)
    else:
        attempt = Attempt(redirect_uri=f"http://127.0.0.1:{way.callback_port or 8765}/callback")
        code = attempt.code(_pasted(session, attempt, provider), provider)
    return redeem(provider, attempt, code), attempt.nonce


def _show_code(address: str, code: str) -> None:
    notice(f"on any device, open {address} and confirm the code {code}")


def _open(url: str) -> None:
    import threading

    notice(f"log in with your browser; if it does not open, go to: {url}")
    # Some browsers return only when the person leaves them, and they wait for our answer until then.
    threading.Thread(target=_browse, args=(url,), daemon=True).start()


def _browse(url: str) -> None:
    """The person has the address on the screen: a browser that cannot be started is no failure."""
    import webbrowser

    with suppress(webbrowser.Error, OSError, ValueError):
        webbrowser.open(url)


def _pasted(session: Session, attempt: "Attempt", provider: "Provider") -> str:
    """The query of the address that the browser could not reach."""
    from penstock.cli.oidc import failed

    session.need_input("the address that the browser ends at")
    notice(f"open this address in any browser: {attempt.url(provider)}")
    notice("after the login the browser shows a page that it cannot load; paste that page's address here:")
    try:
        return urlsplit(sys.stdin.readline(_PASTED_CHARS_MAX).strip()).query
    except ValueError as error:
        raise failed("that is not an address; nothing was stored") from error


def _project(opened: "SessionCreated", wanted: str | None) -> str | None:
    """The project to act in: the one that was asked for, or the only one. Others choose with -p."""
    mine = {project.id: project.name for project in opened.projects}
    notice(f"you are {opened.display_name}{' (operator)' if opened.operator else ''}")
    if opened.operator or wanted in mine:
        return wanted
    if not mine:
        notice("you have no role in any project yet: ask an operator to map one of your groups, or to add you")
    elif len(mine) > 1:
        named = ", ".join(f"{project_id} ({clean(name)})" for project_id, name in mine.items())
        notice(f"you have several projects; choose one with -p, or log in again with -p: {named}")
    return next(iter(mine)) if len(mine) == 1 else None


@command(app, "logout", example="penstock logout --profile staging")
def logout(session: Session) -> None:
    """End the session of a profile and forget it. A key is only forgotten: revoke it with `penstock key revoke`."""
    path = config_path(session.environ)
    file = read(path)
    name = session.flags.profile or session.environ.get("PENSTOCK_PROFILE") or file.current
    profile = file.profiles.get(name)
    if profile is None or profile.key is None:
        raise CliError(f"profile {name} has no key; there are: {', '.join(file.profiles) or 'no profiles'}")
    forgotten = replace(profile, key=None)
    if profile.key.startswith(_SESSION_PREFIX):
        _end(session, profile)
    change(path, lambda now: now.with_profile(name, forgotten))
    notice(f"forgot the key of profile {name}")


def _end(session: Session, profile: Profile) -> None:
    """Revoke the session on the server; one that is over already needs no more."""
    from penstock.sdk.client import Client
    from penstock.sdk.errors import Unauthenticated

    with Client(str(profile.api_url), profile.key, allow_http=session.allow_http) as client:
        try:
            client.sessions.end()
        except Unauthenticated:
            notice("the session was over already")
