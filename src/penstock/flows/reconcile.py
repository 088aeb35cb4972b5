"""The loops that keep rows and the world together. They take no input: an event or a timer only wakes them.

Any number of workers run them at once. Those that concern sagas only start or wake them; those that concern nodes and
units ask compute for releases, which are idempotent.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.compute.model import State
from penstock.compute.service.release import Release
from penstock.compute.service.watch import Exited, Orphan, Unproved, Watch
from penstock.fleet import gpus, nodes, slots
from penstock.fleet.tasks import Tasks
from penstock.flows.sagas import Sagas
from penstock.kit import audit
from penstock.kit.db import Database, Tx
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlated, logger
from penstock.wire.tasks import UNIT_STOP, CleanupProof, UnitStop

_log = logger(__name__)
_ACTOR: Final = audit.system("reconciler")
_ANNOUNCED: Final = "the node is draining: it will be released at "
_ORPHAN_STOP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class SagaKeeper:
    """Sees to it that every row that is not at rest has a saga at work on it."""

    watch: Watch
    sagas: Sagas

    async def undriven(self) -> None:
        """Start again what was lost, with its hint, its worker or the whole of Temporal."""
        for found in await self.watch.undriven():
            if found.stuck:
                _log.warning("saga_replaced", allocation_id=found.id)
                await self.sagas.replace(found.id)
            else:
                await self.sagas.drive(found.id)

    async def overdue(self) -> None:
        """Wake the sagas of rows past their deadline."""
        for allocation_id in await self.watch.overdue():
            await self.sagas.drive(allocation_id)


@dataclass(frozen=True, slots=True)
class NodeKeeper:
    """Releases what can no longer run, and stops what nobody owns."""

    db: Database
    watch: Watch
    release: Release
    tasks: Tasks

    async def lost_nodes(self) -> None:
        """Nothing runs on a lost node; it is paid for until it last named its units."""
        async with self.db.read() as conn:
            occupied = await self.watch.occupied(conn, await nodes.lost(conn))
        for node_id in occupied:
            async with self.db.transaction() as tx:
                if lost := await nodes.hold_lost(tx, node_id):
                    await self.release.node(tx, _ACTOR, node_id, "the node is lost", ended_at=lost.heard_at)

    async def unheard_ends(self) -> None:
        """Nobody pays for the silence in which a unit vanished, whatever was asked for meanwhile."""
        async with self.db.transaction() as tx:
            if found := await self.release.unheard(tx):
                _log.info("unheard_time_not_billed", allocations=found)

    async def draining_nodes(self) -> None:
        """What runs on a draining node is told when it has to leave, and leaves then."""
        async with self.db.read() as conn:
            draining = await nodes.draining(conn)
        for node_id, at, due in draining:
            async with self.db.transaction() as tx:
                if due:
                    await self.release.node(tx, _ACTOR, node_id, "the node is draining", ended_at=None)
                else:
                    when = at.isoformat(timespec="seconds")
                    await self.release.announce(tx, node_id, f"{_ANNOUNCED}{when}")
        async with self.db.transaction() as tx:
            await self.release.take_back(tx, _ANNOUNCED, still=[node_id for node_id, _, _ in draining])

    async def failed_gpus(self) -> None:
        """What runs on a GPU that failed, or that an operator drains, leaves with the reason."""
        async with self.db.read() as conn:
            leaving = await gpus.to_leave(conn)
            held = await self.watch.holding(conn, list(leaving)) if leaving else {}
        for allocation_id, slot_id in held.items():
            await self._release(allocation_id, leaving[slot_id], only_if=None)

    async def exited_units(self) -> None:
        """A unit that has ended by itself gives its GPUs back."""
        for found in await self.watch.exited():
            await self._release(found.id, _exit_reason(found), ended_at=found.ran_until)

    async def missing_units(self) -> None:
        """A unit that its node no longer knows is gone. It is paid for until it was last known to run: while its node
        was off, say, nobody had it."""
        for found in await self.watch.unreported():
            await self._release(found.id, "the unit is gone from its node", ended_at=found.ran_until)

    async def failed_releases(self) -> None:
        """Try again, ever more seldom, while the node answers. On a retired node the release just ends."""
        async with self.db.read() as conn:
            due = await self.watch.unreleased(conn, await nodes.answering(conn))
            over = await self.watch.unreleased(conn, await nodes.retired(conn), at_once=True)
        for allocation_id in due:
            await self._release(allocation_id, "trying again to release", only_if=State.RELEASE_FAILED)
        for allocation_id in over:
            await self._release(allocation_id, "the node is retired", only_if=State.RELEASE_FAILED)

    async def orphan_units(self) -> None:
        """Stop units that no living allocation owns."""
        for orphan in await self.watch.orphans():
            _log.warning("orphan_unit", unit_id=orphan.unit_id, node_id=orphan.node_id)
            await self._stop_orphan(orphan)

    async def blocked_slots(self) -> None:
        """Ask for the proof that was missing, once a minute; a slot that is proved clean returns to the pool."""
        for found in await self.watch.unproved():
            async with self.db.transaction() as tx:
                task_id = await self._ask_for_proof(tx, found)
                outcome = await self.tasks.outcome(tx, task_id)
                if outcome is not None and outcome.succeeded and outcome.decode(CleanupProof).clean:
                    await slots.unblock(tx, found.slot_ids)
                    _log.info("slots_proved_clean", allocation_id=found.allocation_id, slots=len(found.slot_ids))

    async def _ask_for_proof(self, tx: Tx, found: Unproved) -> str:
        return await self.tasks.dispatch(
            tx,
            node_id=found.node_id,
            type=UNIT_STOP,
            allocation_id=found.allocation_id,
            fence=found.fence,
            params=UnitStop(unit_id=found.unit_id, gpu_uuids=list(found.gpu_uuids), allocation_id=found.allocation_id),
            dedupe_key=f"prove/{found.allocation_id}/{found.minute}",
            expires_s=_ORPHAN_STOP_S,
        )

    async def _stop_orphan(self, orphan: Orphan) -> None:
        async with self.db.transaction() as tx:
            await self.tasks.dispatch(
                tx,
                node_id=orphan.node_id,
                type=UNIT_STOP,
                allocation_id=orphan.allocation_id,
                fence=orphan.fence,
                params=UnitStop(unit_id=orphan.unit_id, gpu_uuids=[], allocation_id=orphan.allocation_id or ""),
                dedupe_key=f"orphan/{orphan.node_id}/{orphan.unit_id}/{orphan.minute}",
                expires_s=_ORPHAN_STOP_S,
            )

    async def _release(
        self,
        allocation_id: str,
        reason: str,
        *,
        only_if: State | None = State.ACTIVE,
        ended_at: datetime | None = None,
    ) -> None:
        with correlated(new_id("cor"), allocation_id=allocation_id):
            async with self.db.transaction() as tx:
                await self.release.by_system(tx, _ACTOR, allocation_id, reason, only_if=only_if, ended_at=ended_at)


def _exit_reason(found: Exited) -> str:
    if found.exit_class == "oom":
        return "the unit ran out of memory"
    code = "" if found.exit_code is None else f" with code {found.exit_code}"
    return f"the unit was killed{code}" if found.exit_class == "killed" else f"the unit exited{code}"
