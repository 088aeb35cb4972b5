"""Renting GPUs: offers and allocations."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from penstock.kit.ids import new_id
from penstock.sdk.commands import Command
from penstock.sdk.errors import InvalidArgument, WaitTimeout
from penstock.sdk.protocol import Listing, Steps, call, identifier, slug
from penstock.sdk.resources import Resource, X, command, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page

#: Nothing happens to an allocation after these without a new request.
AT_REST: Final = frozenset({"active", "failed", "released", "release_failed"})
_POLL_FIRST_S: Final = 0.05
_POLL_MAX_S: Final = 1.0
_POLL_GROWTH: Final = 1.3


class Skus(Resource[X]):
    """What can be rented, and its price."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.Sku]:
        """All offers."""
        return Listing(path="/skus", answer=Page[rest.Sku], limit=limit)

    @operation
    def get(self, name: str) -> Steps[rest.Sku]:
        """One offer."""
        return call("GET", f"/skus/{slug(name, name='sku')}", rest.Sku)

    @operation
    def put(self, name: str, sku: rest.SkuPut) -> Steps[rest.Sku]:
        """Define or replace an offer; operators only."""
        return call("PUT", f"/skus/{slug(name, name='sku')}", rest.Sku, body=sku)

    @operation
    def update(self, name: str, change: rest.SkuUpdate) -> Steps[rest.Sku]:
        """Change what is given of an offer; operators only."""
        return call("PATCH", f"/skus/{slug(name, name='sku')}", rest.Sku, body=change)

    @operation
    def delete(self, name: str) -> Steps[None]:
        """Remove an offer that nothing needs; operators only."""
        return call("DELETE", f"/skus/{slug(name, name='sku')}", type(None))


class Egress(Resource[X]):
    """Where the project's units may connect to."""

    @operation
    def get(self) -> Steps[rest.EgressRules]:
        """The rules."""
        return call("GET", "/egress", rest.EgressRules)

    @operation
    def put(self, rules: Sequence[str]) -> Steps[rest.EgressRules]:
        """Replace them; for allocations that are made from now on."""
        return call("PUT", "/egress", rest.EgressRules, body=rest.EgressRules(rules=[*rules]))


class Stock(Resource[X]):
    """Units that are kept ready, so that an allocation starts at once; operators only."""

    @listing
    def list(self, *, limit: int | None = None) -> Listing[rest.StockFloor]:
        """All floors and what there is."""
        return Listing(path="/stock", answer=Page[rest.StockFloor], limit=limit)

    @operation
    def put(self, sku: str, *, floor: int, gpus: int = 1, image: str = "python:3") -> Steps[rest.StockFloor]:
        """Keep `floor` units of this shape ready."""
        body = rest.StockFloorPut(floor=floor, gpus=gpus, image=image)
        return call("PUT", f"/stock/{slug(sku, name='sku')}", rest.StockFloor, body=body)

    @operation
    def delete(self, sku: str, *, gpus: int = 1, image: str = "python:3") -> Steps[None]:
        """Keep no stock of this shape any more."""
        return call("DELETE", f"/stock/{slug(sku, name='sku')}", type(None), query={"gpus": gpus, "image": image})


class Allocations(Resource[X]):
    """Claims on GPUs."""

    @listing
    def list(
        self,
        *,
        state: str | None = None,
        sku: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        ended: bool | None = None,
        limit: int | None = None,
    ) -> Listing[rest.Allocation]:
        """Those of the current project, newest first; with `ended` false, only what has not ended."""
        pairs = [f"{key}={value}" for key, value in (labels or {}).items()]
        over = None if ended is None else str(ended).lower()
        query = {"state": state, "sku": sku, "name": name, "label": pairs, "ended": over}
        return Listing(path="/allocations", answer=Page[rest.Allocation], query=query, limit=limit)

    @operation
    def create(
        self,
        sku: str,
        *,
        gpus: int = 1,
        name: str | None = None,
        image: str = "python:3",
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
        ports: Sequence[int] = (),
        secrets: Mapping[str, str] | None = None,
        runtime: str | None = None,
        wait_s: int = 0,
        allocation_id: str | None = None,
    ) -> Steps[rest.Allocation]:
        """Rent GPUs. `wait_s` > 0 waits that long for capacity instead of being refused at once.
        `secrets` are the files that the unit gets, each with the variable that also holds it, or an empty one.
        `runtime` names an environment of the project's in place of the image's own. `allocation_id` is one that
        `new_allocation_id` made: whoever has it can release the allocation, whatever becomes of the answer."""
        body = rest.AllocationCreate(
            sku=sku,
            id=allocation_id or new_allocation_id(),
            gpus=gpus,
            name=name,
            image=image,
            labels=dict(labels or {}),
            env=dict(env or {}),
            command=[*command],
            ports=[*ports],
            secrets=[rest.SecretUse(name=secret, env=variable) for secret, variable in (secrets or {}).items()],
            runtime=runtime,
            wait_s=wait_s,
        )
        return call("POST", "/allocations", rest.Allocation, body=body, create=True)

    @operation
    def get(self, allocation_id: str) -> Steps[rest.Allocation]:
        """One allocation with its timeline."""
        return call("GET", _allocation(allocation_id), rest.Allocation)

    @operation
    def update(
        self, allocation_id: str, *, name: str | None = None, labels: Mapping[str, str] | None = None
    ) -> Steps[rest.Allocation]:
        """Change the name or replace the labels."""
        body = rest.AllocationUpdate(name=name, labels=None if labels is None else dict(labels))
        return call("PATCH", _allocation(allocation_id), rest.Allocation, body=body)

    @operation
    def release(self, allocation_id: str, *, reason: str = "") -> Steps[rest.Allocation]:
        """Give the GPUs back, in whatever state it is. Releasing twice is the same as once."""
        path = f"{_allocation(allocation_id)}/release"
        return call("POST", path, rest.Allocation, body=rest.ReleaseRequest(reason=reason), create=True)

    @operation
    def wait(
        self,
        allocation_id: str,
        *,
        until: Collection[str] = AT_REST,
        timeout_s: float = 900.0,
        on_change: Callable[[rest.Allocation], None] | None = None,
    ) -> Steps[rest.Allocation]:
        """The allocation as soon as its state is one of `until`; WaitTimeout after `timeout_s`."""
        return _wait(_allocation(allocation_id), frozenset(until), timeout_s, on_change)

    @command
    def exec(
        self,
        allocation_id: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stdin: bytes = b"",
    ) -> Command:
        """Run a command in the sandbox to its end. `argv` is an argument list, not a shell line."""
        if isinstance(argv, str) or not argv:
            raise InvalidArgument("argv must be a list of arguments, with at least one", field="argv")
        identifier("alc", allocation_id, name="allocation_id")
        return Command(allocation_id=allocation_id, argv=argv, env=env or {}, cwd=cwd, stdin=stdin)


def new_allocation_id() -> str:
    """A fresh id for `create`."""
    return new_id("alc")


def _allocation(allocation_id: str) -> str:
    return f"/allocations/{identifier('alc', allocation_id, name='allocation_id')}"


def _wait(
    path: str, until: frozenset[str], timeout_s: float, on_change: Callable[[rest.Allocation], None] | None
) -> Steps[rest.Allocation]:
    ends_at = time.monotonic() + timeout_s
    pause_s, seen = 0.0, None
    while True:
        allocation = yield from call("GET", path, rest.Allocation, delay_s=pause_s)
        if on_change is not None and (allocation.state, allocation.reason) != seen:
            on_change(allocation)
        seen = (allocation.state, allocation.reason)
        if allocation.state in until:
            return allocation
        pause_s = min(_POLL_MAX_S, max(_POLL_FIRST_S, pause_s * _POLL_GROWTH))
        if time.monotonic() + pause_s > ends_at:
            raise WaitTimeout(f"{allocation.id} is still {allocation.state} after {timeout_s:g} s")
