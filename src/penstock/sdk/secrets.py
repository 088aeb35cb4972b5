"""Secrets of a project: set, listed and deleted, never read."""

import base64

from penstock.sdk.protocol import Listing, Steps, call, slug
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page


class Secrets(Resource[X]):
    """Values for units, by name."""

    @operation
    def set(self, name: str, value: bytes | str) -> Steps[rest.Secret]:
        """The value becomes the secret's next version, which units get that are made from now on."""
        content = value.encode() if isinstance(value, str) else value
        body = rest.SecretPut(value_base64=base64.b64encode(content).decode())
        return call("PUT", _path(name), rest.Secret, body=body, create=True)

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Secret]:
        """The names of the current project's secrets, with versions and times."""
        return Listing(path="/secrets", answer=Page[rest.Secret], limit=limit)

    @operation
    def get(self, name: str) -> Steps[rest.Secret]:
        """One secret with its versions, without their values."""
        return call("GET", _path(name), rest.Secret)

    @operation
    def delete(self, name: str) -> Steps[None]:
        """Delete it. What refers to it already may still start."""
        return call("DELETE", _path(name), type(None))


def _path(name: str) -> str:
    return f"/secrets/{slug(name, name='name')}"
