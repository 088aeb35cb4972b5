"""What the saga of an allocation does, as activities over compute and fleet. Load, act, apply: no transaction is open
while a node is waited for."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from temporalio import activity

from penstock.compute.model import Allocation, Purpose, State
from penstock.compute.service import advance, runtimes
from penstock.compute.service.advance import Advance, Situation
from penstock.compute.service.advance import Verdict as Moved
from penstock.fleet import nodes, slots
from penstock.fleet.errors import StaleFence
from penstock.fleet.model import TaskOutcome, TaskState
from penstock.fleet.tasks import Tasks
from penstock.flows.errors import translated
from penstock.flows.handoffs import Handoffs
from penstock.flows.outcomes import Outcomes
from penstock.flows.steps import Course, Look, Order, Result, Verdict
from penstock.kit.db import Database, Tx
from penstock.kit.telemetry import correlated, span
from penstock.wire.tasks import (
    BAD_CODE,
    RUNTIME_BUILD,
    UNIT_START,
    UNIT_STOP,
    CleanupProof,
    Limits,
    RuntimeBuild,
    UnitStart,
    UnitStop,
    is_bad_code,
)

POLL_S: Final = 1.0

_PROOFS: Final = ("processes_gone", "cgroup_empty", "scratch_deleted", "gpu_idle", "memory_scrubbed")
_LATE: Final = "the unit was not ready in time"
_BUILDING: Final = "building the runtime"
_NO_LOCK: Final = "the runtime's lock is gone"
_UNREACHABLE: Final = "the cleanup was not proved: the node is unreachable"
_LOST: Final = "the cleanup was not proved: the node is lost"
_DONE: Final = Result(Verdict.DONE)
_STALE: Final = Result(Verdict.STALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long nodes have for their tasks."""

    start_s: float = 60.0
    runtime_s: float = 600.0
    #: A stop ends with large folders deleted and GPUs scrubbed, each of which the node itself bounds by minutes.
    stop_s: float = 600.0
    #: A unit whose node has not been sent its task within this time is placed on another node, if one has room.
    take_s: float = 5.0
    #: A build that was sent goes elsewhere when its node is silent for so long.
    silent_s: float = 15.0
    #: A release waits so long for a node that does not answer; an undo does not.
    silence_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A task on its way to a node."""

    task_id: str
    node_id: str


class _NowhereElse(Exception):
    """The node that did not take a unit keeps it: nobody else has room."""


Dispatch: TypeAlias = Callable[[Tx, Order, Situation], Awaitable[Sent | Result]]


class Activities:
    """The saga's actions, with the clients they need."""

    def __init__(self, db: Database, moves: Advance, tasks: Tasks, outcomes: Outcomes, timing: Timing) -> None:
        self._db = db
        self._moves = moves
        self._tasks = tasks
        self._outcomes = outcomes
        self._timing = timing
        self._handoffs = Handoffs(tasks, timing.start_s)

    def all(self) -> Sequence[Callable[..., Any]]:
        """What the worker registers."""
        return [
            self.look,
            self.prepare_runtime,
            self.start_unit,
            self.undo_start,
            self.stop_unit,
            self.activate,
            self.condemn,
            self.fail,
            self.finish,
            self.abandon,
        ]

    @activity.defn
    @translated
    async def look(self, allocation_id: str) -> Look:
        """Read the row; a placed request starts provisioning with that."""
        async with self._db.transaction() as tx:
            row = await self._moves.begin(tx, allocation_id)
        if row is None:
            return Look(Course.REST, "", 0)
        return Look(_course(row), row.state, row.fence, runtime=bool(row.runtime))

    @activity.defn
    @translated
    async def prepare_runtime(self, order: Order) -> Result:
        """Ask the node to build the tenant's environment, unless it has it, and wait for that."""
        sent = await self._send(order, self._build)
        if not isinstance(sent, Sent):
            return sent
        outcome = await self._wait(order, sent, silence_s=math.inf, provisions=True)
        if not isinstance(outcome, TaskOutcome):
            return outcome
        return _DONE if outcome.succeeded else await self._failed(order, "the runtime was not built", outcome)

    @activity.defn
    @translated
    async def start_unit(self, order: Order) -> Result:
        """Ask the node to start the unit, or to hand a stock unit over, and wait until it is ready. A stock unit that
        cannot be handed over is stopped, and one of the allocation's own started in its place."""
        result = await self._bring_up(order)
        hopeless = result.verdict is not Verdict.FAILED or is_bad_code(result.reason)
        if hopeless or not await self._from_stock(order):
            return result
        stopped = await self._stop_and_prove(order, silence_s=0.0)
        if stopped.verdict is not Verdict.DONE:
            return stopped if stopped.verdict is Verdict.STALE else result
        async with self._db.transaction() as tx:
            moved = _moved(await self._moves.restart(tx, order.allocation_id, order.fence, result.reason))
        return await self._bring_up(order) if moved.verdict is Verdict.DONE else moved

    async def _bring_up(self, order: Order) -> Result:
        sent = await self._send(order, self._start)
        if not isinstance(sent, Sent):
            return sent
        outcome = await self._wait(order, sent, silence_s=math.inf, provisions=True)
        if not isinstance(outcome, TaskOutcome):
            return outcome
        return _DONE if outcome.succeeded else await self._failed(order, "the unit did not start", outcome)

    async def _failed(self, order: Order, what: str, outcome: TaskOutcome) -> Result:
        """Why a node did not do it, and how many did not even take it."""
        async with self._db.transaction() as tx:
            found = await advance.situation(tx, order.allocation_id, order.fence)
        passed = found.allocation.relocations if found else 0
        more = f"; {passed} other node{'' if passed == 1 else 's'} before it did not take it" if passed else ""
        return Result(Verdict.FAILED, _why(what, outcome) + more)

    async def _from_stock(self, order: Order) -> bool:
        """Whether a stock unit is in the way of one of its own, and there is time left for that."""
        async with self._db.transaction() as tx:
            found = await advance.situation(tx, order.allocation_id, order.fence)
        return found is not None and found.allocation.stock_id is not None and not found.overdue

    @activity.defn
    @translated
    async def undo_start(self, order: Order) -> Result:
        """Stop whatever was started. A node that does not answer is not waited for."""
        return await self._stop_and_prove(order, silence_s=0.0)

    @activity.defn
    @translated
    async def stop_unit(self, order: Order) -> Result:
        """Stop the unit and have the node prove that nothing of it is left."""
        return await self._stop_and_prove(order, silence_s=self._timing.silence_s)

    @activity.defn
    @translated
    async def activate(self, order: Order) -> Result:
        """provisioning → active."""
        async with self._db.transaction() as tx:
            return _moved(await self._moves.activate(tx, order.allocation_id, order.fence))

    @activity.defn
    @translated
    async def condemn(self, order: Order) -> Result:
        """From now on the provisioning is being undone."""
        async with self._db.transaction() as tx:
            return _moved(await self._moves.condemn(tx, order.allocation_id, order.fence, order.reason))

    @activity.defn
    @translated
    async def fail(self, order: Order) -> Result:
        """provisioning → failed; `reason` says what could not be proved clean."""
        async with self._db.transaction() as tx:
            return _moved(await self._moves.fail(tx, order.allocation_id, unproved=order.reason))

    @activity.defn
    @translated
    async def finish(self, order: Order) -> Result:
        """releasing → released."""
        async with self._db.transaction() as tx:
            return _moved(await self._moves.finish(tx, order.allocation_id, order.fence))

    @activity.defn
    @translated
    async def abandon(self, order: Order) -> Result:
        """releasing → release_failed."""
        async with self._db.transaction() as tx:
            return _moved(await self._moves.abandon(tx, order.allocation_id, order.fence, why=order.reason))

    async def _stop_and_prove(self, order: Order, *, silence_s: float) -> Result:
        sent = await self._send(order, self._stop)
        if not isinstance(sent, Sent):
            return sent
        outcome = await self._wait(order, sent, silence_s=silence_s)
        if not isinstance(outcome, TaskOutcome):
            return outcome
        problem = _unproved(outcome)
        return Result(Verdict.FAILED, problem) if problem else _DONE

    async def _send(self, order: Order, dispatch: Dispatch) -> Sent | Result:
        """Dispatch under the row's lock, so that nothing is started after a release has begun."""
        try:
            async with self._db.transaction() as tx:
                found = await advance.situation(tx, order.allocation_id, order.fence)
                if found is None:
                    return _STALE
                with (
                    correlated(found.allocation.correlation_id, allocation_id=order.allocation_id),
                    span("saga.dispatch", allocation_id=order.allocation_id, fence=order.fence),
                ):
                    return await dispatch(tx, order, found)
        except StaleFence:
            return _STALE

    async def _build(self, tx: Tx, order: Order, found: Situation) -> Sent | Result:
        unit = found.allocation
        if unit.state is not State.PROVISIONING or unit.failing or unit.node_id is None:
            return _STALE
        lock = await runtimes.lock_of(tx, unit.runtime)
        if found.overdue or lock is None:
            return Result(Verdict.FAILED, _LATE if found.overdue else _NO_LOCK)
        await advance.explain(tx, unit.id, _BUILDING)
        task_id = await self._tasks.dispatch(
            tx,
            node_id=unit.node_id,
            type=RUNTIME_BUILD,
            allocation_id=unit.id,
            fence=order.fence,
            params=RuntimeBuild(runtime=lock),
            dedupe_key=f"{unit.id}/runtime/{order.fence}",
            expires_s=self._timing.runtime_s,
        )
        return Sent(task_id=task_id, node_id=unit.node_id)

    async def _start(self, tx: Tx, order: Order, found: Situation) -> Sent | Result:
        unit = found.allocation
        if unit.state is not State.PROVISIONING or unit.failing or unit.node_id is None:
            return _STALE
        if found.overdue:
            return Result(Verdict.FAILED, _LATE)
        if unfit := await slots.unfit(tx, [claim.slot_id for claim in found.claims]):
            return Result(Verdict.FAILED, f"the unit was not started: {unfit}")
        if unit.stock_id is not None:
            return Sent(task_id=await self._handoffs.dispatch(tx, unit), node_id=unit.node_id)
        if unit.runtime:
            await advance.explain(tx, unit.id, "")
        params = UnitStart(
            unit_id=unit.unit_id,
            image=unit.image,
            gpu_uuids=[claim.gpu_uuid for claim in found.claims],
            limits=Limits(
                memory_bytes=unit.memory_bytes,
                processes_max=unit.processes_max,
                cpus=unit.cpus,
                scratch_bytes=unit.scratch_bytes,
            ),
            allocation_id=unit.id,
            stock=unit.purpose is Purpose.STOCK,
            runtime=unit.runtime,
            env=dict(unit.env),
            command=list(unit.command),
            secrets=list(unit.secrets),
            egress=list(unit.egress),
            serving=unit.serving,
        )
        task_id = await self._tasks.dispatch(
            tx,
            node_id=unit.node_id,
            type=UNIT_START,
            allocation_id=unit.id,
            fence=order.fence,
            params=params,
            dedupe_key=f"{unit.id}/start/{order.fence}",
            expires_s=self._timing.start_s,
        )
        return Sent(task_id=task_id, node_id=unit.node_id)

    async def _stop(self, tx: Tx, order: Order, found: Situation) -> Sent | Result:
        unit = found.allocation
        if unit.node_id is None or unit.node_id in await nodes.retired(tx):
            return _DONE
        task_id = await self._tasks.dispatch(
            tx,
            node_id=unit.node_id,
            type=UNIT_STOP,
            allocation_id=unit.id,
            fence=order.fence,
            params=UnitStop(
                unit_id=unit.unit_id,
                gpu_uuids=[claim.gpu_uuid for claim in found.claims],
                allocation_id=unit.id,
            ),
            dedupe_key=f"{unit.id}/stop/{order.fence}/{order.attempt}",
            expires_s=self._timing.stop_s,
        )
        return Sent(task_id=task_id, node_id=unit.node_id)

    async def _wait(
        self, order: Order, sent: Sent, *, silence_s: float, provisions: bool = False
    ) -> TaskOutcome | Result:
        """The task's outcome, or why it is no longer waited for; a node may be silent for `silence_s`. What provisions
        ends with the row's deadline, and goes elsewhere when the node does not take it."""
        with self._outcomes.waiting(sent.task_id) as arrived:
            while True:
                arrived.clear()
                async with self._db.read() as conn:
                    if outcome := await self._tasks.outcome(conn, sent.task_id):
                        return outcome
                activity.heartbeat()
                try:
                    await asyncio.wait_for(arrived.wait(), POLL_S)
                except TimeoutError:
                    if over := await self._given_up(order, sent, silence_s, until_overdue=provisions):
                        return over
                    if provisions and await self._relocated(order, sent):
                        return _STALE

    async def _relocated(self, order: Order, sent: Sent) -> bool:
        """Whether the node has not taken the task and another has the unit now. All of it or nothing."""
        try:
            async with self._db.transaction() as tx:
                found = await advance.situation(tx, order.allocation_id, order.fence)
                if found is None or not await self._tasks.withdraw(
                    tx, sent.task_id, older_than_s=self._timing.take_s, silent_for_s=self._timing.silent_s
                ):
                    return False
                if not await self._moves.relocate(tx, found):
                    raise _NowhereElse
        except _NowhereElse:
            return False
        return True

    async def _given_up(self, order: Order, sent: Sent, silence_s: float, *, until_overdue: bool) -> Result | None:
        """A second has passed: does the row still ask for this, and can the node still answer?"""
        async with self._db.read() as conn:
            pulse = await advance.pulse(conn, order.allocation_id)
            if pulse is None or pulse.fence != order.fence:
                return _STALE
            if until_overdue and pulse.overdue:
                return Result(Verdict.FAILED, _LATE)
            if sent.node_id in await nodes.lost(conn):
                return Result(Verdict.HOPELESS, _LOST)
            if await nodes.silent_for(conn, sent.node_id, longer_than_s=silence_s):
                return Result(Verdict.HOPELESS, _UNREACHABLE)
        return None


def _course(row: Allocation) -> Course:
    if row.state is State.PROVISIONING:
        return Course.UNDO if row.failing else Course.PROVISION
    return Course.RELEASE if row.state is State.RELEASING else Course.REST


def _moved(verdict: Moved) -> Result:
    return _DONE if verdict is Moved.DONE else _STALE


def _why(what: str, outcome: TaskOutcome) -> str:
    if outcome.state is TaskState.EXPIRED:
        return f"{what}: the node did not answer in time"
    if outcome.error_code == BAD_CODE:
        return f"{what}: {BAD_CODE}: {outcome.detail}"
    return f"{what}: {outcome.detail or outcome.error_code or outcome.state}"


def _unproved(outcome: TaskOutcome) -> str:
    """What is missing from the proof; nothing when the node proved it clean."""
    if not outcome.succeeded:
        return _why("the cleanup was not proved", outcome)
    proof = outcome.decode(CleanupProof)
    if proof.clean:
        return ""
    missing = [name.replace("_", " ") for name in _PROOFS if not getattr(proof, name)]
    return f"the cleanup was not proved: not {', not '.join(missing)}" + (f" ({proof.detail})" if proof.detail else "")
