"""What the sagas of an allocation did, as Temporal remembers it: for people who look into a request."""

from collections.abc import AsyncIterator
from datetime import UTC
from typing import Final

import msgspec
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client
from temporalio.service import RPCError

from penstock.flows.allocation import workflow_id
from penstock.flows.sagas import Sagas
from penstock.kit.bus import Bus
from penstock.wire import subjects
from penstock.wire.rest import SagaStep
from penstock.wire.unreadable import UNREADABLE

RUNS_MAX: Final = 10
STEPS_MAX: Final = 2000
_PREFIX: Final = "EVENT_TYPE_"
_NOISE: Final = frozenset({"WORKFLOW_TASK_SCHEDULED", "WORKFLOW_TASK_STARTED", "WORKFLOW_TASK_COMPLETED"})


async def answer(bus: Bus, sagas: Sagas) -> None:
    """Let other processes ask for it."""

    async def history(payload: bytes) -> bytes:
        steps = [step async for step in _steps(sagas.client, payload.decode())] if sagas.client else []
        return msgspec.json.encode(steps[:STEPS_MAX])

    await bus.on_ask(subjects.SAGA_HISTORY, history, queue="worker")


async def _steps(client: Client, allocation_id: str) -> AsyncIterator[SagaStep]:
    """The newest runs, oldest step first within each."""
    query = f"WorkflowId = '{workflow_id(allocation_id)}'"
    async for run in client.list_workflows(query, limit=RUNS_MAX):
        try:
            found = await client.get_workflow_handle(run.id, run_id=run.run_id).fetch_history()
        except RPCError:
            continue
        for event in found.events:
            what, detail = _describe(event)
            if what not in _NOISE:
                at = event.event_time.ToDatetime(tzinfo=UTC)
                yield SagaStep(allocation_id=allocation_id, at=at, what=what.lower(), detail=detail)


def _describe(event: HistoryEvent) -> tuple[str, str]:
    """The event's name, and the activity, signal or failure that it is about."""
    what = EventType.Name(event.event_type).removeprefix(_PREFIX)
    if event.HasField("activity_task_scheduled_event_attributes"):
        return what, event.activity_task_scheduled_event_attributes.activity_type.name
    if event.HasField("activity_task_failed_event_attributes"):
        return what, event.activity_task_failed_event_attributes.failure.message
    if event.HasField("workflow_execution_signaled_event_attributes"):
        return what, event.workflow_execution_signaled_event_attributes.signal_name
    if event.HasField("workflow_execution_failed_event_attributes"):
        return what, event.workflow_execution_failed_event_attributes.failure.message
    if event.HasField("marker_recorded_event_attributes"):
        return what, _marker(event)
    return what, ""


class _LocalActivity(msgspec.Struct):
    activity_type: str = ""


def _marker(event: HistoryEvent) -> str:
    """The name of the local activity that a marker stands for."""
    for payloads in event.marker_recorded_event_attributes.details.values():
        for payload in payloads.payloads:
            try:
                return msgspec.json.decode(payload.data, type=_LocalActivity).activity_type
            except UNREADABLE:
                continue
    return ""
