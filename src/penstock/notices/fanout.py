"""Reads the log of events and writes down who is to be told. Any number of processes; one at a time does it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.kit.db import Database, Tx
from penstock.notices.model import Patience
from penstock.notices.service import pause
from penstock.notices.store import spread, webhooks

BATCH: Final = 1000
_BATCHES_MAX: Final = 1000
_PROJECT_DELETED: Final = "identity.project_deleted"


@dataclass(frozen=True, slots=True)
class Fanout:
    """From events to deliveries. `written` is called when there is something new to send."""

    db: Database
    patience: Patience
    written: Callable[[], None]

    async def spread(self) -> int:
        """Write what was committed since the last time; how many deliveries. With nobody to tell, it is one look."""
        count = 0
        for _ in range(_BATCHES_MAX):
            async with self.db.read() as conn:
                if not await spread.news(conn):
                    break
            async with self.db.transaction() as tx:
                written = await self._spread(tx)
            if written is None:
                break
            count += written
        if count:
            self.written()
        return count

    async def _spread(self, tx: Tx) -> int | None:
        """None means that another process is at it."""
        if not await spread.lock(tx):
            return None
        found = await spread.batch(tx, limit=BATCH)
        if not found:
            return None
        pairs = [(webhook_id, seq) for _, seq, _, _, webhook_id in found if webhook_id is not None]
        await spread.insert(tx, pairs, give_up_s=self.patience.give_up_s)
        await _silence(tx, {project for _, _, kind, project, _ in found if kind == _PROJECT_DELETED and project})
        transaction, seq, *_ = found[-1]
        await spread.advance(tx, transaction, seq)
        return len(pairs)


async def _silence(tx: Tx, project_ids: set[str]) -> None:
    """A project that is no more hears of nothing, its organisation's bills included."""
    if not project_ids:
        return
    for webhook in await webhooks.lock_active(tx, project_ids=sorted(project_ids)):
        await pause(tx, webhook, "its project was deleted")
