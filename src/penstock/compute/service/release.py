"""Release, at any time: by its owner, by an operator, or because its node or its unit is gone.

Entering `releasing` raises the fence, so that a start that comes late is refused, and ends billing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from penstock.compute.model import FINAL, Allocation, Event, Limits, State
from penstock.compute.store import allocations, claims, endings
from penstock.compute.store.allocations import Change
from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Tx
from penstock.kit.errors import missing
from penstock.wire import subjects


@dataclass(frozen=True, slots=True)
class Release:
    """The use case."""

    limits: Limits

    async def __call__(self, tx: Tx, caller: Caller, allocation_id: str, reason: str) -> Allocation:
        """Ask for the end of an allocation of the caller's project. Asking again changes nothing."""
        caller.require("allocations.release")
        current = await allocations.lock(tx, allocation_id, project_id=caller.project_id)
        if current is None:
            raise missing("allocation", allocation_id)
        return await self._leave(tx, caller.actor, current, reason or "released by its owner")

    async def by_system(
        self,
        tx: Tx,
        actor: Actor,
        allocation_id: str,
        reason: str,
        *,
        only_if: State | None = None,
        ended_at: datetime | None = None,
    ) -> Allocation | None:
        """The same on the system's own account; with `only_if`, only from that state. Billing ends at `ended_at` where
        that is earlier than now."""
        current = await allocations.lock(tx, allocation_id)
        if current is None or (only_if is not None and current.state is not only_if):
            return None
        return await self._leave(tx, actor, current, reason, ended_at=ended_at)

    async def node(self, tx: Tx, actor: Actor, node_id: str, reason: str, *, ended_at: datetime | None) -> int:
        """Release everything on a node; billing ends at `ended_at` where that is earlier than now."""
        found = await allocations.on_node(tx, node_id)
        for current in found:
            await self._leave(tx, actor, current, reason, ended_at=ended_at)
        if ended_at is not None:
            await endings.end_billing(tx, node_id, ended_at)
        return len(found)

    async def unheard(self, tx: Tx) -> int:
        """End the billing of what was released while its node was away, where the node came back without the unit:
        the unit was last known to run before. How many there were."""
        return await endings.end_unheard(tx)

    async def payer(
        self,
        tx: Tx,
        actor: Actor,
        organisation_id: str,
        reason: str,
        *,
        project_id: str | None,
        key_id: str | None,
        created_until: datetime,
        limit: int,
    ) -> int:
        """Release what an organisation, one of its projects or one of their keys pays or waits for; so many at once.
        What was created later stays."""
        found = await allocations.of_payer(
            tx, organisation_id, project_id=project_id, key_id=key_id, created_until=created_until, limit=limit
        )
        for current in found:
            await self._leave(tx, actor, current, reason)
        return len(found)

    async def announce(self, tx: Tx, node_id: str, reason: str) -> None:
        """Tell the owners of what runs on a node that it will have to leave; once for each reason."""
        for current in await allocations.on_node(tx, node_id):
            if current.state is State.ACTIVE and current.reason != reason:
                await allocations.remark(tx, current, reason)

    async def take_back(self, tx: Tx, announcement: str, *, still: Sequence[str]) -> None:
        """Announcements that begin so are over on all nodes but these."""
        for current in await allocations.announced(tx, announcement, except_on=still):
            await allocations.remark(tx, current, "")

    async def _leave(
        self, tx: Tx, actor: Actor, current: Allocation, reason: str, *, ended_at: datetime | None = None
    ) -> Allocation:
        if current.state is State.RELEASING or current.state in FINAL:
            return current
        event = Event.RETRY if current.state is State.RELEASE_FAILED else Event.RELEASE
        if current.state is State.ACTIVE and ended_at is None:
            ended_at = await endings.known_end(tx, current)
        change = Change(reason=reason, deadline_s=self.limits.deadlines.releasing_s, billing_ended_at=ended_at)
        moved = await allocations.move(tx, current, event, change)
        if event is Event.RETRY:
            await claims.take_back(tx, current.id, project_id=current.project_id)
        await audit.record(
            tx,
            actor,
            "allocations.release",
            current.id,
            organisation_id=current.organisation_id,
            project_id=current.project_id,
            detail={"reason": reason, "from": current.state},
        )
        tx.hint(subjects.allocation(current.id))
        return moved
