"""The saga of one allocation: `allocation-<id>`.

It looks at the row, does what the row asks for, and looks again until the row is at rest; then it ends. The row is the
truth: a saga that is lost, repeated or started twice does no harm, because every action is guarded by the row's fence.
A `wake` signal makes it look at once, also while it waits for a node.
"""

from datetime import timedelta
from typing import Final

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError, is_cancelled_exception

from penstock.flows.errors import cause_of, is_outage
from penstock.flows.steps import (
    ABANDON,
    CONDEMN,
    DOES,
    FINISH,
    LOOK,
    PREPARE_RUNTIME,
    PROVISION,
    STOP_UNIT,
    UNDO,
    Action,
    Course,
    Look,
    Order,
    Result,
    Verdict,
)

WORKFLOW: Final = "allocation"
WAKE: Final = "wake"
TASK_QUEUE: Final = "allocations"
#: A saga that looks more often than this goes in circles; it ends, and the reconciler starts another.
LOOKS_MAX: Final = 100
RETRY_PAUSE: Final = timedelta(seconds=1)

_SHORT: Final = timedelta(seconds=10)
_LONG: Final = timedelta(minutes=20)
#: The database may be away for a while; after that the saga fails and the reconciler starts another.
_LOCAL_RETRY: Final = RetryPolicy(
    initial_interval=timedelta(milliseconds=100), maximum_interval=timedelta(seconds=2), maximum_attempts=8
)
#: A worker that dies leaves its activity to another within the heartbeat's timeout.
_REMOTE_RETRY: Final = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5), maximum_attempts=8
)
_HEARTBEAT: Final = timedelta(seconds=6)


def workflow_id(allocation_id: str) -> str:
    """One saga per allocation at a time."""
    return f"allocation-{allocation_id}"


@workflow.defn(name=WORKFLOW)
class AllocationSaga:
    """Drives one allocation until its row is at rest."""

    def __init__(self) -> None:
        self._allocation_id = ""
        self._wakes = 0

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        """The row changed, or is overdue: look."""
        self._wakes += 1

    @workflow.run
    async def run(self, allocation_id: str) -> str:
        """The state that the row came to rest in."""
        self._allocation_id = allocation_id
        look = Look(Course.REST, "", 0)
        for _ in range(LOOKS_MAX):
            wakes = self._wakes
            look = await self._look()
            if look.course is Course.REST and self._wakes == wakes:
                break
            await self._follow(look)
        return look.state

    async def _follow(self, look: Look) -> None:
        if look.course is Course.PROVISION:
            await self._provision(look)
        elif look.course is Course.UNDO:
            await self._undo(look)
        elif look.course is Course.RELEASE:
            await self._release(look)

    async def _provision(self, look: Look) -> None:
        """The steps after the look; the first that fails condemns the rest."""
        for step in PROVISION[1:]:
            if step.do is PREPARE_RUNTIME and not look.runtime:
                continue
            result = await self._do(step.do, look)
            if result.verdict is Verdict.STALE:
                return
            if result.verdict is not Verdict.DONE:
                await self._do(CONDEMN, look, result.reason)
                return

    async def _undo(self, look: Look) -> None:
        """Every undo in reverse; what could not be proved is passed on to those after it."""
        unproved = ""
        for action in UNDO:
            result = await self._do(action, look, unproved)
            if result.verdict is Verdict.STALE:
                return
            if result.verdict is not Verdict.DONE:
                unproved = result.reason

    async def _release(self, look: Look) -> None:
        stopped = await self._do(STOP_UNIT, look)
        if stopped.verdict is Verdict.DONE:
            await self._do(FINISH, look)
        elif stopped.verdict is not Verdict.STALE:
            await self._do(ABANDON, look, stopped.reason)

    async def _do(self, action: Action, look: Look, reason: str = "") -> Result:
        """One action, with its retries."""
        result = Result(Verdict.FAILED)
        for attempt in range(action.attempts_max):
            if attempt:
                await workflow.sleep(RETRY_PAUSE)
            order = Order(self._allocation_id, look.fence, attempt, reason)
            result = await (self._local(action, order) if action.local else self._remote(action, order, look))
            if result.verdict is not Verdict.FAILED:
                break
        return result

    async def _look(self) -> Look:
        return await workflow.execute_local_activity(
            LOOK.name,
            self._allocation_id,
            result_type=Look,
            start_to_close_timeout=_SHORT,
            retry_policy=_LOCAL_RETRY,
        )

    async def _local(self, action: Action, order: Order) -> Result:
        try:
            return await workflow.execute_local_activity(
                action.name, order, result_type=Result, start_to_close_timeout=_SHORT, retry_policy=_LOCAL_RETRY
            )
        except FailureError as error:
            if action not in DOES or is_cancelled_exception(error):
                raise
            return _failed(action, error)

    async def _remote(self, action: Action, order: Order, look: Look) -> Result:
        """Wait for the node, but look when woken: a release during provisioning does not wait for its end."""
        running = workflow.start_activity(
            action.name,
            order,
            result_type=Result,
            start_to_close_timeout=_LONG,
            heartbeat_timeout=_HEARTBEAT,
            retry_policy=_REMOTE_RETRY,
            cancellation_type=workflow.ActivityCancellationType.TRY_CANCEL,
        )
        wakes = self._wakes
        while not running.done():
            await workflow.wait_condition(lambda seen=wakes: running.done() or self._wakes > seen)
            if not running.done():
                wakes = self._wakes
                if await self._look() != look:
                    running.cancel()
                    await workflow.wait_condition(running.done)
        return _result_of(action, running)


def _result_of(action: Action, running: "workflow.ActivityHandle[Result]") -> Result:
    if running.cancelled():
        return Result(Verdict.STALE)
    error = running.exception()
    if error is None:
        return running.result()
    if is_cancelled_exception(error):
        return Result(Verdict.STALE)
    if isinstance(error, FailureError):
        return _failed(action, error)
    raise error


def _failed(action: Action, error: FailureError) -> Result:
    """A step that raised has failed, unless something was only away: then this saga ends and another starts later."""
    if is_outage(error):
        raise error
    return Result(Verdict.FAILED, f"{action.name}: {cause_of(error)}")
