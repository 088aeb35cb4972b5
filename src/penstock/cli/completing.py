"""Values that the tab key completes: asked from the server for a moment, and silent when there is no answer."""

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeAlias

import typer

if TYPE_CHECKING:
    from penstock.cli.session import Session
    from penstock.sdk.client import Client

#: A value and what it is.
Values: TypeAlias = list[tuple[str, str]]
Completer: TypeAlias = Callable[[typer.Context, str], Values]

#: A person waits no longer for the tab key.
_WAIT_S: Final = 1.5
_VALUES_MAX: Final = 200
ROLES: Final = ("owner", "admin", "developer", "viewer", "billing")
_GLOBAL: Final = ("project", "profile", "api_url", "data")


def _of(read: "Callable[[Client], Iterable[tuple[str | None, str]]]", *, in_project: bool = True) -> Completer:
    """Completes what the server lists."""

    def complete(context: typer.Context, incomplete: str) -> Values:
        found: Values = []

        def look() -> None:
            from penstock.sdk.client import Client

            with Client(**_session(context).target(timeout_s=_WAIT_S, in_project=in_project)) as client:
                for value, note in read(client):
                    if value and value.startswith(incomplete):
                        found.append((value, note))

        return _bounded(look, found)

    return complete


def _bounded(look: Callable[[], None], found: Values) -> Values:
    """What is found in time. A failure is no more than nothing found: the shell shows whatever is printed."""

    def quietly() -> None:
        try:
            look()
        except BaseException:  # noqa: BLE001 - whatever it is, the person types on
            return

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    return found[:_VALUES_MAX]


def _session(context: typer.Context) -> "Session":
    """The session with the options that stand on the line so far."""
    session: Session = context.obj
    at: typer.Context | None = context
    given: dict[str, str] = {}
    while at is not None:
        given = {name: at.params[name] for name in _GLOBAL if at.params.get(name)} | given
        session.insecure_http |= bool(at.params.get("insecure_http"))
        at = at.parent  # pyright: ignore[reportAssignmentType]
    from dataclasses import replace

    session.flags = replace(session.flags, **given)
    return session


def words(*known: str) -> Completer:
    """Completes words that are known."""

    def complete(_: typer.Context, incomplete: str) -> Values:
        return [(word, "") for word in known if word.startswith(incomplete)]

    return complete


def profiles(context: typer.Context, incomplete: str) -> Values:
    """Completes the profiles of the configuration file."""
    found: Values = []

    def look() -> None:
        from penstock.cli.profiles import config_path, read

        file = read(config_path(_session(context).environ))
        found.extend((name, it.api_url or "") for name, it in file.profiles.items() if name.startswith(incomplete))

    return _bounded(look, found)


def _allocations(client: "Client") -> Iterable[tuple[str | None, str]]:
    for it in client.allocations.list(ended=False, limit=_VALUES_MAX):
        yield it.name, f"{it.id} {it.state}"
        yield it.id, f"{it.name or it.sku} {it.state}"


def _nodes(client: "Client") -> Iterable[tuple[str | None, str]]:
    for it in client.nodes.list(limit=_VALUES_MAX):
        yield it.name, f"{it.id} {it.state}"
        yield it.id, f"{it.name} {it.state}"


def _webhooks(client: "Client") -> Iterable[tuple[str | None, str]]:
    return ((it.id, it.url) for it in client.webhooks.list(limit=_VALUES_MAX))


allocations = _of(_allocations)
nodes = _of(_nodes)
webhooks = _of(_webhooks)
skus = _of(lambda client: ((it.name, it.description) for it in client.skus.list()))
functions = _of(lambda client: ((it.name, f"version {it.current_version}") for it in client.functions.list()))
projects = _of(lambda client: ((it.name, it.id) for it in client.projects.list()), in_project=False)
keys = _of(lambda client: ((it.name, it.id) for it in client.keys.list() if it.revoked_at is None))
secrets = _of(lambda client: ((it.name, f"version {it.version}") for it in client.secrets.list()))
runtimes = _of(lambda client: ((it.name, it.base) for it in client.runtimes.list()))
service_accounts = _of(lambda client: ((it.name, it.id) for it in client.service_accounts.list()))
invocations = _of(
    lambda client: ((it.id, f"{it.function} {it.state}") for it in client.invocations.list(limit=_VALUES_MAX))
)
