"""What people see of their allocations, and the little that they may change on them."""

from collections.abc import Sequence

from penstock.compute.model import Allocation
from penstock.compute.store import allocations
from penstock.compute.store.allocations import Filter
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import missing
from penstock.wire.rest import AllocationUpdate

__all__ = ["Filter", "get", "page", "update"]


async def get(conn: Reader, caller: Caller, allocation_id: str) -> Allocation:
    """One allocation of the caller's project."""
    caller.require("allocations.read")
    found = await allocations.in_project(conn, caller.project_id, allocation_id)
    if found is None:
        raise missing("allocation", allocation_id)
    return found


async def page(conn: Reader, caller: Caller, only: Filter, *, before: str | None, limit: int) -> Sequence[Allocation]:
    """The caller's allocations, the newest first."""
    caller.require("allocations.read")
    return await allocations.page(conn, caller.project_id, only, before=before, limit=limit)


async def update(tx: Tx, caller: Caller, allocation_id: str, body: AllocationUpdate) -> Allocation:
    """Change name and labels; labels are replaced as a whole."""
    caller.require("allocations.update")
    current = await allocations.lock(tx, allocation_id, project_id=caller.project_id)
    if current is None:
        raise missing("allocation", allocation_id)
    if body.name is None and body.labels is None:
        return current
    changed = await allocations.rename(tx, current, name=body.name, labels=body.labels)
    detail = {"name": body.name, "labels": body.labels}
    await audit.record(tx, caller.actor, "allocations.update", allocation_id, detail=detail)
    return changed
