"""Packages by name, resolved to a lock by the servers: asks for it and waits."""

import time
from collections.abc import Callable
from typing import Final

from penstock.sdk.client import Client
from penstock.sdk.errors import InvalidArgument, SdkError
from penstock.wire import rest

_POLL_S: Final = 0.5
_WAIT_S: Final = 600.0
_SHOWN: Final = 8

Report = Callable[[str], None]


class Unresolved(SdkError):
    """The servers could not resolve the requirements; `code` and the message say why."""


def is_lock(text: str) -> bool:
    """Whether a requirements file is a lock already, with the hashes of its packages."""
    return "--hash=" in text


def resolved(client: Client, requirements: str, *, base: str, upgrade: bool, report: Report, note: Report) -> str:
    """The lock of these requirements. `report` is told that it takes a while, `note` what was resolved."""
    report("resolving packages on the servers")
    asked = client.runtimes.resolve(requirements, base=base, upgrade=upgrade)
    before = asked.state == "succeeded"
    until = time.monotonic() + _WAIT_S
    found = asked
    while found.state not in ("succeeded", "failed"):
        if time.monotonic() > until:
            raise Unresolved(f"the packages are not resolved after {_WAIT_S:g} s", code="resolve_timeout")
        time.sleep(_POLL_S)
        found = client.runtimes.resolution(asked.id)
    if found.state == "failed":
        raise Unresolved(f"the packages could not be resolved: {found.error}", code=found.error_code)
    note(described(found, before=before))
    return found.lock


def described(found: rest.Resolution, *, before: bool) -> str:
    """What was chosen, the first few by name."""
    pins = [line.partition(" ")[0] for line in found.lock.splitlines()]
    more = f" and {len(pins) - _SHOWN} more" if len(pins) > _SHOWN else ""
    when = f" on {found.created_at:%Y-%m-%d}; --upgrade resolves anew" if before else ""
    return f"resolved for Python {found.python}{when}: {', '.join(pins[:_SHOWN])}{more}"


def text_of(names: "list[str] | tuple[str, ...]") -> str:
    """Requirements of a list of names. One that would be more than a line is refused."""
    for name in names:
        if "\n" in name or "\r" in name:
            raise InvalidArgument(f"requirements: {name!r} must be one package", field="requirements")
    return "".join(f"{name}\n" for name in names)
