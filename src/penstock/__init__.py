"""Penstock turns a set of GPU hosts into a cloud."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.sdk.client import AsyncClient as AsyncClient
    from penstock.sdk.client import Client as Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    """Import the client when it is first asked for: processes and the command line start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.sdk import client

    return getattr(client, name)
