"""What people see of their allocations, and the little that they may change on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.compute.model import Allocation, Claim, Move
from penstock.compute.store import allocations, claims
from penstock.compute.store.allocations import Filter
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import NotFound
from penstock.wire.rest import AllocationUpdate

__all__ = ["Filter", "View", "get", "page", "update", "view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An allocation with its GPUs and, when asked for, its timeline."""

    allocation: Allocation
    claims: Sequence[Claim]
    timeline: Sequence[Move] = ()


async def get(conn: Reader, caller: Caller, allocation_id: str) -> View:
    """One allocation of the caller's project."""
    caller.require("allocations.read")
    found = await allocations.in_project(conn, caller.project_id, allocation_id)
    if found is None:
        raise NotFound("no object with this id")
    return await view(conn, found)


async def view(conn: Reader, found: Allocation) -> View:
    """The whole picture of one allocation."""
    return View(
        allocation=found,
        claims=await claims.ever(conn, found.id),
        timeline=await allocations.timeline(conn, found.id),
    )


async def page(conn: Reader, caller: Caller, only: Filter, *, before: str | None, limit: int) -> Sequence[View]:
    """The caller's allocations, the newest first."""
    caller.require("allocations.read")
    found = await allocations.page(conn, caller.project_id, only, before=before, limit=limit)
    held = await claims.ever_of(conn, [allocation.id for allocation in found])
    return [View(allocation=each, claims=held.get(each.id, [])) for each in found]


async def update(tx: Tx, caller: Caller, allocation_id: str, body: AllocationUpdate) -> View:
    """Change name and labels; labels are replaced as a whole."""
    caller.require("allocations.update")
    current = await allocations.lock(tx, allocation_id, project_id=caller.project_id)
    if current is None:
        raise NotFound("no object with this id")
    if body.name is None and body.labels is None:
        return await view(tx, current)
    changed = await allocations.rename(tx, current, name=body.name, labels=body.labels)
    await audit.record(
        tx, caller.actor, "allocations.update", allocation_id, detail={"name": body.name, "labels": body.labels}
    )
    return await view(tx, changed)
