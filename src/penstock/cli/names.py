"""Names in the place of ids: wherever exactly one thing has the name, it is meant. What lives is meant before what has
ended."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cli.errors import NOT_FOUND, CliError

if TYPE_CHECKING:
    from penstock.sdk.client import Client

ENDED: Final = frozenset({"released", "failed"})
_NAME: Final = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._ -]{0,61}[a-zA-Z0-9])?")
#: Ids of other kinds are no names.
_ID: Final = re.compile(r"[a-z]{3}_(default|platform|[0-9a-z]{26})")
_TEXT_CHARS_MAX: Final = 2048
#: So many of the same name are looked at.
_SAME_MAX: Final = 50
_LISTED_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """Something that may be meant."""

    id: str
    name: str | None
    #: What tells it from others of its name.
    note: str = ""
    living: bool = True


def allocation(client: "Client", text: str) -> str:
    """An allocation's id, from its id or its name."""
    if _is_id("alc", text):
        return text
    found = client.allocations.list(name=_name(text, "allocation", "alc"), limit=_SAME_MAX)
    candidates = (Candidate(it.id, it.name, it.state, it.state not in ENDED) for it in found)
    return _one("allocation", text, candidates, "penstock alloc list --all")


def node(client: "Client", text: str) -> str:
    """A node's id, from its id or its name."""
    if _is_id("nod", text):
        return text
    _name(text, "node", "nod")
    candidates = (Candidate(it.id, it.name, it.state) for it in client.nodes.list())
    return _one("node", text, candidates, "penstock node list")


def project(client: "Client", text: str) -> str:
    """A project's id, from its id or its name."""
    if _is_id("prj", text):
        return text
    _name(text, "project", "prj")
    candidates = (Candidate(it.id, it.name, it.organisation_id) for it in client.projects.list())
    return _one("project", text, candidates, "penstock project list")


def organisation(client: "Client", text: str) -> str:
    """An organisation's id, from its id or its name."""
    if _is_id("org", text):
        return text
    _name(text, "organisation", "org")
    candidates = (Candidate(it.id, it.name) for it in client.organisations.list())
    return _one("organisation", text, candidates, "penstock org list")


def key(client: "Client", text: str) -> str:
    """A key's id, from its id or its name."""
    if _is_id("key", text):
        return text
    _name(text, "key", "key")
    candidates = (
        Candidate(it.id, it.name, "revoked" if it.revoked_at else it.hint, it.revoked_at is None)
        for it in client.keys.list()
    )
    return _one("key", text, candidates, "penstock key list")


def service_account(client: "Client", text: str) -> str:
    """A service account's id, from its id or its name."""
    if _is_id("sva", text):
        return text
    _name(text, "service account", "sva")
    candidates = (Candidate(it.id, it.name, it.role) for it in client.service_accounts.list())
    return _one("service account", text, candidates, "penstock service-account list")


def user(client: "Client", text: str) -> str:
    """A person's id, from their id or the name that others see."""
    if _is_id("usr", text):
        return text
    _text(text, "user", "usr")
    candidates = (Candidate(it.id, it.display_name, it.subject) for it in client.users.list())
    return _one("user", text, candidates, "penstock user list")


def principal(client: "Client", text: str) -> str:
    """The id of a user or a service account, from an id or a name."""
    if _is_id("usr", text) or _is_id("sva", text):
        return text
    _text(text, "user or service account", "usr")
    people = (Candidate(it.id, it.display_name, it.subject) for it in client.users.list())
    programs = (Candidate(it.id, it.name, it.role) for it in client.service_accounts.list())
    listing = "penstock user list` and `penstock service-account list"
    return _one("user or service account", text, [*people, *programs], listing)


def webhook(client: "Client", text: str) -> str:
    """A webhook's id, from its id or the address that it sends to."""
    if _is_id("whk", text):
        return text
    _text(text, "webhook", "whk")
    candidates = (Candidate(it.id, it.url, it.state) for it in client.webhooks.list())
    return _one("webhook", text, candidates, "penstock webhook list")


def _is_id(prefix: str, text: str) -> bool:
    """Whether an id is meant, be it malformed: who asks the server names what is wrong with it."""
    return text.startswith(f"{prefix}_")


def _name(text: str, kind: str, prefix: str) -> str:
    if not _NAME.fullmatch(text) or _ID.fullmatch(text):
        raise CliError(f"{text[:80]!r} is neither an id ({prefix}_…) nor a name of {_a(kind)}", field=kind)
    return text


def _text(text: str, kind: str, prefix: str) -> None:
    if not text.strip() or len(text) > _TEXT_CHARS_MAX:
        raise CliError(f"{text[:80]!r} is neither an id ({prefix}_…) nor a name of {_a(kind)}", field=kind)


def _one(kind: str, text: str, candidates: Iterable[Candidate], listing: str) -> str:
    matching = [each for each in candidates if each.name == text]
    meant = [each for each in matching if each.living] or matching
    if not meant:
        raise CliError(f"no {kind} {text}", code="not_found", exit_code=NOT_FOUND, next_step=f"see `{listing}`")
    if len(meant) > 1:
        named = ", ".join(f"{each.id} ({each.note})" if each.note else each.id for each in meant[:_LISTED_MAX])
        more = ", …" if len(meant) > _LISTED_MAX else ""
        raise CliError(f"{len(meant)} of the name {text}; say which by its id: {named}{more}", code="ambiguous")
    return meant[0].id


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeio" else f"a {kind}"
