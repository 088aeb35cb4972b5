"""A Temporal worker that outlives Temporal: it waits for the server at the start and comes back when it was away."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from penstock.flows.allocation import TASK_QUEUE, AllocationSaga
from penstock.flows.sagas import Sagas
from penstock.kit.clock import backoff_s
from penstock.kit.telemetry import logger

_log = logger(__name__)
_GRACE: Final = timedelta(seconds=3)
_BACKOFF_CAP_S: Final = 5.0


def build(client: Client, activities: Sequence[Callable[..., Any]]) -> Worker:
    """The worker of all sagas. A bug fails the saga instead of stalling it: the reconciler starts another."""
    return Worker(
        client,
        task_queue=TASK_QUEUE,
        workflows=[AllocationSaga],
        activities=activities,
        workflow_runner=UnsandboxedWorkflowRunner(),
        workflow_failure_exception_types=[Exception],
        max_concurrent_workflow_tasks=100,
        max_concurrent_activities=500,
        max_concurrent_local_activities=100,
        default_heartbeat_throttle_interval=timedelta(seconds=1),
        max_heartbeat_throttle_interval=timedelta(seconds=1),
        graceful_shutdown_timeout=_GRACE,
    )


async def host(address: str, namespace: str, sagas: Sagas, activities: Sequence[Callable[..., Any]]) -> None:
    """Run for ever; while Temporal is away, rows wait and nothing is lost."""
    failures = 0
    while True:
        try:
            sagas.client = await Client.connect(address, namespace=namespace)
            _log.info("temporal_connected", address=address)
            failures = 0
            await build(sagas.client, activities).run()
        except (RPCError, RuntimeError, OSError) as error:
            _log.warning("temporal_away", address=address, error=str(error))
        sagas.client = None
        failures += 1
        await asyncio.sleep(backoff_s(failures, cap_s=_BACKOFF_CAP_S))
