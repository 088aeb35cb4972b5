"""The credential of a request, and when one that a browser sent by itself counts.

A Bearer key is chosen by whoever sends the request. Browsers take the key as the password of HTTP Basic and then add
it to every request of the origin that all units share, whichever unit's page asked: such a key opens only what its
owner opened, or what that very unit's pages ask for (ADR 9).
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import hdrs

from penstock.access.errors import BrowserRefused


@dataclass(frozen=True, slots=True)
class Credential:
    """What the authenticator is asked."""

    authorization: str | None
    project: str | None


def for_port(headers: Mapping[str, str], prefix: str, *, upgrade: bool) -> Credential:
    """The credential of a request below `prefix`, which is `/u/<allocation>/<port>`."""
    authorization = headers.get(hdrs.AUTHORIZATION)
    if not _is_basic(authorization):
        return Credential(authorization, headers.get("Penstock-Project"))
    _check_browser(headers, prefix, upgrade=upgrade)
    # Pages can add headers to requests that carry the browser's key: the project is the key's own.
    return Credential(_bearer(authorization or ""), None)


def for_command(headers: Mapping[str, str]) -> Credential:
    """The credential of a request to run a command."""
    authorization = headers.get(hdrs.AUTHORIZATION)
    if _is_basic(authorization):
        raise BrowserRefused("commands take the API key as a Bearer token only, not as HTTP Basic")
    return Credential(authorization, headers.get("Penstock-Project"))


def _is_basic(authorization: str | None) -> bool:
    return (authorization or "").partition(" ")[0].lower() == "basic"


def _bearer(authorization: str) -> str | None:
    """The password as the authenticator takes it."""
    try:
        decoded = base64.b64decode(authorization.partition(" ")[2].strip(), validate=True).decode("utf-8")
    except ValueError:  # no base64, or no text
        return None
    return f"Bearer {decoded.partition(':')[2]}"


def _path(url: str) -> str:
    return "/" + url.partition("://")[2].partition("/")[2]


def _check_browser(headers: Mapping[str, str], prefix: str, *, upgrade: bool) -> None:
    match headers.get("Sec-Fetch-Site"):
        case "none":
            return
        case None if not (upgrade and hdrs.ORIGIN in headers):
            # No browser: who sends this has the key in hand.
            return
        case "same-origin" if _path(headers.get(hdrs.REFERER, "")).startswith(f"{prefix}/"):
            return
        case _ if upgrade:
            raise BrowserRefused(
                "a WebSocket from a browser does not say which unit's page opened it, so HTTP Basic does not count;"
                " send the API key as a Bearer token"
            )
        case _:
            raise BrowserRefused(
                "another page asked for this with the browser's HTTP Basic credential; open the address directly, or"
                " send the API key as a Bearer token"
            )
