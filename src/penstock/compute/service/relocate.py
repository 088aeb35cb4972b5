"""Another node for a unit that its node never took, within the same create: same allocation, same price, one claim."""

from collections.abc import Sequence

from penstock.compute.model import Allocation, Claim, Limits, State
from penstock.compute.ports import Slots
from penstock.compute.service.place import Placed, place
from penstock.compute.store import allocations, catalogue, claims
from penstock.kit.db import Tx
from penstock.wire import subjects

_NOT_TAKEN = "the node did not take the unit; placed on another"
_STOCK_LEFT = "a unit of warm stock was left on a node that did not answer"


async def relocate(tx: Tx, current: Allocation, limits: Limits, slots: Slots) -> bool:
    """Place a provisioning that had no effect on its node on another. False when none has room or it was tried often
    enough. The caller holds the row's lock, and has withdrawn what the first node was to do."""
    if current.state is not State.PROVISIONING or current.failing or current.relocations >= limits.relocations_max:
        return False
    offer = await catalogue.sku(tx, current.sku)
    if offer is None:
        return False
    left = await claims.held(tx, current.id)
    found = await place(tx, current, offer, not_on=await claims.tried(tx, current.id))
    if not isinstance(found, Placed):
        return False
    await _leave(tx, current, left, slots)
    await allocations.relocate(tx, current, node_id=found.node_id, reason=_NOT_TAKEN)
    tx.hint(subjects.CAPACITY)
    return True


async def _leave(tx: Tx, current: Allocation, left: Sequence[Claim], slots: Slots) -> None:
    """Nothing was started on these slots, so they are as clean as they were. A stock unit still stands on its own."""
    slot_ids = [claim.slot_id for claim in left]
    if current.stock_id is not None:
        await slots.block(tx, slot_ids, _STOCK_LEFT)
    await claims.free_slots(tx, current.id, slot_ids)
    if current.stock_id is not None:
        await claims.return_to(tx, current.stock_id, slot_ids)
