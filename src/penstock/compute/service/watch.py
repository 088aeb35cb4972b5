"""What the worker's loops look at. Nothing here changes an allocation's state: events and timers only wake sagas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute import metrics
from penstock.compute.model import State
from penstock.compute.store import sweeps
from penstock.compute.store.sweeps import Exited, Orphan, Undriven, Unproved, Unreported
from penstock.kit.db import Database, Reader

__all__ = ["Exited", "Orphan", "Patience", "Undriven", "Unproved", "Unreported", "Watch"]

BATCH: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the loops wait before they step in."""

    #: A row that no saga has touched since it changed: its hint was lost.
    fresh_s: float = 1.0
    #: A stock unit that is being handed over: nodes answer within milliseconds.
    handoff_s: float = 3.0
    #: A row whose saga has gone quiet.
    idle_s: float = 15.0
    #: A row whose saga stays quiet although it was asked: it is replaced.
    stuck_s: float = 120.0
    #: Units are reported with heartbeats, which come late.
    report_s: float = 20.0
    #: A failed release is tried again after so long, twice as long each time.
    retry_s: float = 60.0
    retries_max: int = 10


@dataclass(frozen=True, slots=True)
class Watch:
    """Questions to the rows of compute."""

    db: Database
    patience: Patience

    async def undriven(self) -> Sequence[Undriven]:
        """Allocations that are not at rest and that no saga works on; each is told to one worker."""
        async with self.db.transaction() as tx:
            return await sweeps.take_undriven(
                tx,
                fresh_s=self.patience.fresh_s,
                handoff_s=self.patience.handoff_s,
                idle_s=self.patience.idle_s,
                stuck_s=self.patience.stuck_s,
                limit=BATCH,
            )

    async def overdue(self) -> Sequence[str]:
        """Allocations past their deadline whose saga has to end them."""
        async with self.db.transaction() as tx:
            return await sweeps.take_overdue(tx, pause_s=self.patience.idle_s, limit=BATCH)

    async def exited(self) -> Sequence[Exited]:
        """Active allocations whose unit has ended by itself."""
        async with self.db.read() as conn:
            return await sweeps.exited(conn, BATCH)

    async def unreported(self) -> Sequence[Unreported]:
        """Active allocations whose unit is on no list of its node, which has had the time to report it."""
        async with self.db.read() as conn:
            return await sweeps.unreported(conn, after_s=self.patience.report_s, limit=BATCH)

    async def orphans(self) -> Sequence[Orphan]:
        """Units that no living allocation owns."""
        async with self.db.read() as conn:
            return await sweeps.orphans(conn, grace_s=self.patience.report_s, limit=BATCH)

    async def unproved(self) -> Sequence[Unproved]:
        """Units that are over and whose slots nobody proved clean, on nodes that answer again."""
        async with self.db.read() as conn:
            return await sweeps.unproved(conn, BATCH)

    async def occupied(self, conn: Reader, node_ids: Sequence[str]) -> Sequence[str]:
        """Those of the nodes that something is on, also what is leaving."""
        return await sweeps.occupied(conn, node_ids)

    async def holding(self, conn: Reader, slot_ids: Sequence[str]) -> dict[str, str]:
        """Allocation → one of these slots that it holds, of those that are not on their way out."""
        return await sweeps.holding(conn, slot_ids)

    async def unreleased(self, conn: Reader, node_ids: Sequence[str], *, at_once: bool = False) -> Sequence[str]:
        """Failed releases on these nodes whose next try is due, or all of them."""
        if at_once:
            return await sweeps.failed_releases(conn, node_ids, BATCH)
        patience = self.patience
        return await sweeps.unreleased(
            conn, node_ids, retry_s=patience.retry_s, retries_max=patience.retries_max, limit=BATCH
        )

    async def count(self) -> None:
        """Bring the gauges up to date."""
        async with self.db.read() as conn:
            counts = await sweeps.counts(conn)
        for state in State:
            metrics.ALLOCATIONS.labels(state).set(counts.get(state, 0))
        metrics.QUEUE_DEPTH.set(counts.get(State.REQUESTED, 0) + counts.get(State.PROVISIONING, 0))
