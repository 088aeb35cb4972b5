"""Environments of the project: a base image with the packages of a lock."""

from penstock.sdk.protocol import Listing, Steps, call, slug
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page


class Runtimes(Resource[X]):
    """What allocations can run on besides images; `create(…, runtime=name)` picks one."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Runtime]:
        """Those of the current project, without their locks."""
        return Listing(path="/runtimes", answer=Page[rest.Runtime], limit=limit)

    @operation
    def get(self, name: str) -> Steps[rest.Runtime]:
        """One environment with its lock."""
        return call("GET", _path(name), rest.Runtime)

    @operation
    def put(self, name: str, lock: str, *, base: str = "python:3") -> Steps[rest.Runtime]:
        """Define or change an environment. `lock` is the text of a requirements file with hashes."""
        return call("PUT", _path(name), rest.Runtime, body=rest.RuntimePut(base=base, lock=lock))

    @operation
    def delete(self, name: str) -> Steps[None]:
        """Forget an environment that no living allocation uses."""
        return call("DELETE", _path(name), type(None))


def _path(name: str) -> str:
    return f"/runtimes/{slug(name, name='runtime')}"
