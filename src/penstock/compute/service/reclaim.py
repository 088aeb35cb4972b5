"""Stock makes room: a request that finds no free slots gets those that stock holds, and is never refused for its sake.

The stock is released like any allocation. Its slots go to the request when the unit's end is proved (`Advance.finish`),
not to the pool, so that nobody else can be quicker; until then the request waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.model import Claim, Draft, Sku
from penstock.compute.service.place import Placed
from penstock.compute.service.release import Release
from penstock.compute.store import claims, room, stock
from penstock.kit import audit
from penstock.kit.db import Tx

WAITS: Final = "waiting: warm stock is being stopped to make room"
_ACTOR: Final = audit.system("stock")


@dataclass(frozen=True, slots=True)
class Reserved:
    """Slots are on their way."""


@dataclass(frozen=True, slots=True)
class Reclaim:
    """The use case."""

    release: Release

    async def __call__(self, tx: Tx, draft: Draft, offer: Sku, held: Sequence[str]) -> Placed | Reserved | None:
        """Choose slots as if there were no stock; `held` is all of it, locked. None when that does not help either."""
        slots = await _without(tx, held, offer, draft)
        holders = await stock.slots_of(tx, held)
        free = [slot for slot in slots if slot.slot_id not in holders]
        if not slots or (free and not await claims.take(tx, draft.id, free, project_id=draft.project_id)):
            return None
        if len(free) == len(slots):
            return Placed(slots[0].node_id)
        for stock_id in sorted({holders[slot.slot_id] for slot in slots if slot.slot_id in holders}):
            await self.release.by_system(tx, _ACTOR, stock_id, f"reclaimed for {draft.id}")
            await stock.yield_to(tx, stock_id, draft.id)
        return Reserved()


async def _without(tx: Tx, held: Sequence[str], offer: Sku, draft: Draft) -> Sequence[Claim]:
    """What placement would choose if the stock held nothing; tried, looked at and taken back."""
    trial = tx.conn.transaction()
    await trial.start()
    await stock.let_go(tx, held)
    slots = await room.best_fit(tx, offer, draft.gpus, project_id=draft.project_id, serves=draft.serves)
    await trial.rollback()
    return slots
