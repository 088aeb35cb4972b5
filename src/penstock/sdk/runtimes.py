"""Environments of the project: a base image with the packages of a lock."""

from penstock.sdk.protocol import Listing, Steps, call, identifier, slug
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
    def resolve(self, requirements: str, *, base: str = "python:3", upgrade: bool = False) -> Steps[rest.Resolution]:
        """Have packages by name resolved to a lock, by the servers. Ask for `resolution(id)` until its state is
        `succeeded` or `failed`. The same text gets the same lock again, unless `upgrade` is true."""
        body = rest.ResolutionCreate(requirements=requirements, base=base, upgrade=upgrade)
        return call("POST", "/resolutions", rest.Resolution, body=body)

    @operation
    def resolution(self, resolution_id: str) -> Steps[rest.Resolution]:
        """How far a resolution is; with its lock when it succeeded."""
        return call("GET", f"/resolutions/{identifier('rsl', resolution_id, name='resolution_id')}", rest.Resolution)

    @operation
    def delete(self, name: str) -> Steps[None]:
        """Forget an environment that no living allocation uses."""
        return call("DELETE", _path(name), type(None))


def _path(name: str) -> str:
    return f"/runtimes/{slug(name, name='runtime')}"
