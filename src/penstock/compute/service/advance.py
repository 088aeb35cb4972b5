"""The moves that a saga makes. Each locks the row, is guarded by its fence, and is idempotent: a repeat finds its
work done."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.compute import metrics
from penstock.compute.model import Allocation, Claim, Event, Limits, State
from penstock.compute.ports import Slots
from penstock.compute.service.relocate import relocate
from penstock.compute.store import allocations, claims, handoffs, stock, sweeps
from penstock.compute.store.allocations import Change
from penstock.compute.store.sweeps import Pulse
from penstock.kit.db import Reader, Tx
from penstock.wire import subjects


class Verdict(StrEnum):
    """What became of a move. `stale`: the row is elsewhere by now, read it again."""

    DONE = "done"
    STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """An allocation and what it holds, locked."""

    allocation: Allocation
    claims: Sequence[Claim]
    overdue: bool


async def situation(tx: Tx, allocation_id: str, fence: int) -> Situation | None:
    """Look, and note that a saga is at work; none when the fence was raised meanwhile."""
    found = await sweeps.take_up(tx, allocation_id)
    if found is None or found[0].fence != fence:
        return None
    held = await claims.held(tx, allocation_id)
    return Situation(allocation=found[0], claims=held, overdue=found[1])


async def explain(tx: Tx, allocation_id: str, reason: str) -> None:
    """Say what takes long."""
    await allocations.explain(tx, allocation_id, reason)


async def pulse(conn: Reader, allocation_id: str) -> Pulse | None:
    """Note that a saga is at work on it, and look whether it still should be."""
    return await sweeps.touch(conn, allocation_id)


@dataclass(frozen=True, slots=True)
class Advance:
    """The saga's moves, with what they ask of others."""

    slots: Slots
    limits: Limits

    async def begin(self, tx: Tx, allocation_id: str) -> Allocation | None:
        """Take the row up: a placed request starts provisioning; anything else is as it is."""
        current = await allocations.lock(tx, allocation_id)
        if current is None or not current.driven:
            return current
        if current.state is State.REQUESTED:
            change = Change(reason="", deadline_s=self.limits.deadlines.provisioning(current.runtime))
            current = await allocations.move(tx, current, Event.PLACED, change)
            metrics.DISPATCH_S.observe((current.changed_at - current.created_at).total_seconds())
        else:
            await sweeps.touch(tx, allocation_id)
        return current

    async def activate(self, tx: Tx, allocation_id: str, fence: int) -> Verdict:
        """The unit is ready: billing starts."""
        current = await allocations.lock(tx, allocation_id)
        if current is not None and current.state is State.ACTIVE:
            return Verdict.DONE
        if current is None or current.state is not State.PROVISIONING or current.fence != fence:
            return Verdict.STALE
        await allocations.move(tx, current, Event.READY, Change(reason="", deadline_s=None))
        return Verdict.DONE

    async def condemn(self, tx: Tx, allocation_id: str, fence: int, why: str) -> Verdict:
        """A step failed: nothing may be started any more, everything is to be undone."""
        current = await allocations.lock(tx, allocation_id)
        if current is None or current.state is not State.PROVISIONING:
            return Verdict.STALE
        if current.failing and current.fence == fence + 1:
            return Verdict.DONE
        if current.fence != fence:
            return Verdict.STALE
        await allocations.condemn(tx, current, why)
        return Verdict.DONE

    async def fail(self, tx: Tx, allocation_id: str, *, unproved: str) -> Verdict:
        """Everything is undone; slots whose cleanup was not proved (`unproved` says why) are blocked."""
        current = await allocations.lock(tx, allocation_id)
        if current is not None and current.state is State.FAILED:
            return Verdict.DONE
        if current is None or current.state is not State.PROVISIONING or not current.failing:
            return Verdict.STALE
        event = await _late_or(tx, current, Event.STEP_FAILED)
        await allocations.move(tx, current, event, Change(reason=current.failing, deadline_s=None))
        await self._let_go(tx, allocation_id, unproved)
        # Whoever waits for it, a function whose worker this was to be, hears of it now.
        tx.hint(subjects.allocation(allocation_id))
        metrics.FAILURES.labels("provisioning").inc()
        return Verdict.DONE

    async def finish(self, tx: Tx, allocation_id: str, fence: int) -> Verdict:
        """The cleanup is proved: the slots go back, also those that an earlier failure had blocked."""
        current = await allocations.lock(tx, allocation_id)
        if current is not None and current.state is State.RELEASED:
            return Verdict.DONE
        if current is None or current.state is not State.RELEASING or current.fence != fence:
            return Verdict.STALE
        await allocations.move(tx, current, Event.PROVED, Change(reason=current.reason, deadline_s=None))
        if current.yields_to is not None:
            await self._pass_on(tx, current.id, current.yields_to)
        await self.slots.unblock(tx, await self._let_go(tx, allocation_id, ""))
        return Verdict.DONE

    async def _pass_on(self, tx: Tx, stock_id: str, allocation_id: str) -> None:
        """Slots of stock go to the request that it was stopped for, if that still waits; it may need several."""
        waits = await allocations.lock(tx, allocation_id)
        if waits is None or waits.state is not State.REQUESTED or waits.node_id is not None:
            return
        missing = waits.gpus - len(await claims.held(tx, allocation_id))
        if await stock.pass_on(tx, stock_id, allocation_id, missing) < missing:
            return
        node_id = (await claims.held(tx, allocation_id))[0].node_id
        await allocations.place(tx, allocation_id, node_id=node_id, deadline_s=self.limits.deadlines.requested_s)
        tx.hint(subjects.allocation(allocation_id))

    async def restart(self, tx: Tx, allocation_id: str, fence: int, why: str) -> Verdict:
        """The stock unit could not be handed over and was proved gone: the allocation gets a unit of its own, on the
        same slots."""
        current = await allocations.lock(tx, allocation_id)
        if current is None or current.state is not State.PROVISIONING or current.failing or current.fence != fence:
            return Verdict.STALE
        if current.stock_id is not None:
            await handoffs.forget(tx, allocation_id, why)
        return Verdict.DONE

    async def relocate(self, tx: Tx, found: Situation) -> bool:
        """The node never took the unit: the allocation goes to another, if there is one."""
        return await relocate(tx, found.allocation, self.limits, self.slots)

    async def abandon(self, tx: Tx, allocation_id: str, fence: int, *, why: str) -> Verdict:
        """The cleanup could not be proved: the slots are blocked until somebody has looked, or a retry proves it."""
        current = await allocations.lock(tx, allocation_id)
        if current is not None and current.state is State.RELEASE_FAILED:
            return Verdict.DONE
        if current is None or current.state is not State.RELEASING or current.fence != fence:
            return Verdict.STALE
        event = await _late_or(tx, current, Event.EXHAUSTED)
        await allocations.move(tx, current, event, Change(reason=why, deadline_s=None))
        await self._let_go(tx, allocation_id, why)
        metrics.FAILURES.labels("release").inc()
        return Verdict.DONE

    async def _let_go(self, tx: Tx, allocation_id: str, unproved: str) -> Sequence[str]:
        """Give up the claims; blocked first, so that no slot is free for a moment without proof."""
        if unproved:
            held = await claims.held(tx, allocation_id)
            await self.slots.block(tx, [claim.slot_id for claim in held], unproved)
        freed = await claims.free(tx, allocation_id)
        tx.hint(subjects.CAPACITY)
        return freed


async def _late_or(tx: Tx, current: Allocation, otherwise: Event) -> Event:
    pulse = await sweeps.touch(tx, current.id)
    if pulse is None or not pulse.overdue:
        return otherwise
    metrics.TIMEOUTS.labels(current.state).inc()
    return Event.DEADLINE
