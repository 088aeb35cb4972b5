"""Requests that wait for capacity: offered slots in turn, given up at their deadline."""

from dataclasses import dataclass
from typing import Final

from penstock.compute import metrics
from penstock.compute.model import Allocation, Event, Limits
from penstock.compute.service.place import Placed, place
from penstock.compute.service.reclaim import WAITS, Reclaim, Reserved
from penstock.compute.service.release import Release
from penstock.compute.store import allocations, catalogue, claims, stock, sweeps
from penstock.compute.store.allocations import Change
from penstock.kit.db import Database, Tx
from penstock.kit.errors import PenstockError
from penstock.wire import subjects

BATCH: Final = 200


@dataclass(frozen=True, slots=True)
class Waiting:
    """The loop's work. Any number of workers may do it at once."""

    db: Database
    limits: Limits

    async def place_all(self) -> int:
        """Offer capacity to waiting requests: in turn over projects, first come first served within a shape."""
        async with self.db.read() as conn:
            queue = await sweeps.waiting(conn, BATCH)
        full: set[tuple[str, int]] = set()
        placed = 0
        for allocation_id in queue:
            async with self.db.transaction() as tx:
                placed += await self._offer(tx, allocation_id, full)
        return placed

    async def _offer(self, tx: Tx, allocation_id: str, full: set[tuple[str, int]]) -> bool:
        """One request, unless an earlier one of its shape found nothing."""
        waits = await sweeps.take_waiting(tx, allocation_id)
        if waits is None or (waits.sku, waits.gpus) in full:
            return False
        offer = await catalogue.sku(tx, waits.sku)
        if offer is None:
            # Deleted while the create was under way.
            await allocations.explain(tx, waits.id, f"waiting: there is no SKU {waits.sku} any more")
            return False
        # It may hold slots of stock that yielded to it, while others never came.
        await claims.free(tx, waits.id)
        found: Placed | Reserved | PenstockError = await place(tx, waits, offer)
        if not isinstance(found, Placed) and (held := await stock.lock_all(tx)):
            found = await Reclaim(Release(self.limits))(tx, waits, offer, held) or found
        if isinstance(found, Reserved):
            await allocations.explain(tx, waits.id, WAITS)
            return False
        if not isinstance(found, Placed):
            full.add((waits.sku, waits.gpus))
            await allocations.explain(tx, waits.id, f"waiting: {found.detail}")
            return False
        await allocations.place(tx, waits.id, node_id=found.node_id, deadline_s=self.limits.deadlines.requested_s)
        tx.hint(subjects.allocation(waits.id))
        return True

    async def expire(self) -> int:
        """Give up requests whose deadline has passed. Nothing was started for them, so nothing is to be undone."""
        async with self.db.transaction() as tx:
            late = await sweeps.overdue_requests(tx, BATCH)
            for request in late:
                await allocations.move(tx, request, Event.DEADLINE, Change(reason=_too_late(request), deadline_s=None))
                metrics.TIMEOUTS.labels(request.state).inc()
                if await claims.free(tx, request.id):
                    tx.hint(subjects.CAPACITY)
        return len(late)


def _too_late(request: Allocation) -> str:
    if request.node_id is None:
        why = request.reason.removeprefix("waiting: ")
        if request.wait_s == 0:
            return f"no room could be made in time ({why})"
        return f"no capacity within {request.wait_s} s" + (f" ({why})" if why else "")
    return "provisioning did not start in time"
