"""Starting and waking sagas. Nothing here decides anything: the saga looks at the row."""

import asyncio
from datetime import timedelta
from typing import Final

from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError

from penstock.flows.allocation import TASK_QUEUE, WAKE, WORKFLOW, workflow_id
from penstock.kit.bus import Bus
from penstock.kit.telemetry import logger
from penstock.wire import subjects

_log = logger(__name__)
#: A worker that dies leaves its workflow task to another after this.
_TASK_TIMEOUT: Final = timedelta(seconds=5)
_RPC_TIMEOUT: Final = timedelta(seconds=5)
_STARTS_AT_ONCE_MAX: Final = 32


class Sagas:
    """The sagas of allocations, as seen from outside. Without a connection to Temporal it does nothing: the
    reconciler finds the rows again."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self._room = asyncio.Semaphore(_STARTS_AT_ONCE_MAX)
        self._starting: set[asyncio.Task[None]] = set()

    async def drive(self, allocation_id: str) -> None:
        """Have a saga look at this row: a new one, begun in this process without a detour, or the one that runs."""
        if self.client is None:
            return
        try:
            await self._start(self.client, allocation_id)
        except WorkflowAlreadyStartedError:
            await self._wake(self.client, allocation_id)

    async def replace(self, allocation_id: str) -> None:
        """End the saga that runs, if any, and start another: it did not react."""
        if self.client is None:
            return
        try:
            await self._start(self.client, allocation_id, WorkflowIDConflictPolicy.TERMINATE_EXISTING)
        except WorkflowAlreadyStartedError:
            # The server found a run that began in between: that one is fresh.
            await self._wake(self.client, allocation_id)

    async def _start(
        self,
        client: Client,
        allocation_id: str,
        conflict: WorkflowIDConflictPolicy = WorkflowIDConflictPolicy.FAIL,
    ) -> None:
        await client.start_workflow(
            WORKFLOW,
            allocation_id,
            id=workflow_id(allocation_id),
            task_queue=TASK_QUEUE,
            task_timeout=_TASK_TIMEOUT,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=conflict,
            request_eager_start=True,
            rpc_timeout=_RPC_TIMEOUT,
        )

    async def _wake(self, client: Client, allocation_id: str) -> None:
        """Signal with start: the saga may have ended since it was seen running."""
        await client.start_workflow(
            WORKFLOW,
            allocation_id,
            id=workflow_id(allocation_id),
            task_queue=TASK_QUEUE,
            task_timeout=_TASK_TIMEOUT,
            start_signal=WAKE,
            rpc_timeout=_RPC_TIMEOUT,
        )

    async def watch(self, bus: Bus) -> None:
        """Turn hints into sagas; each hint reaches one of the workers."""
        await bus.on_hint(subjects.ALL_ALLOCATIONS, self._hinted, queue="worker")

    async def _hinted(self, subject: str, _: bytes) -> None:
        await self._room.acquire()
        task = asyncio.create_task(self._drive_hinted(subjects.last_token(subject)))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _drive_hinted(self, allocation_id: str) -> None:
        try:
            await self.drive(allocation_id)
        except RPCError as error:
            _log.warning("saga_not_started", allocation_id=allocation_id, error=str(error))
        finally:
            self._room.release()
