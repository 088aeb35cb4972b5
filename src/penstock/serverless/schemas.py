"""Values of the model as bodies of the REST API."""

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.serverless.definitions import Deployed, Version
from penstock.serverless.model import Worker
from penstock.serverless.service.invocations import Shown
from penstock.serverless.service.outcomes import embedded
from penstock.serverless.service.units import ShownUnit
from penstock.wire import rest, subjects
from penstock.wire.serverless import Reference, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Urls:
    """Where people find this cloud."""

    api_url: str
    gateway_url: str

    def function(self, it: Deployed) -> str:
        """Where it can be called."""
        return f"{self.gateway_url.rstrip('/')}/f/{it.name}"

    def result(self, invocation_id: str) -> str:
        """Where an invocation's answer is."""
        return f"{self.api_url.rstrip('/')}/api/v1/invocations/{invocation_id}/result"


def function(it: Deployed, urls: Urls) -> rest.Function:
    """A function as its owner sees it."""
    return rest.Function(
        id=it.id,
        project_id=it.project_id,
        name=it.name,
        current_version=it.current_version,
        serving_version=it.serving_version,
        definition=it.definition,
        workers_ready=it.workers_ready,
        workers_starting=it.workers_starting,
        queued=it.queued,
        running=it.running,
        waiting_for=it.waiting_for,
        url=urls.function(it),
        created_at=it.created_at,
        updated_at=it.updated_at,
    )


def version(it: Version) -> rest.FunctionVersion:
    """A version."""
    return rest.FunctionVersion(
        number=it.number,
        definition=it.definition,
        created_at=it.created_at,
        created_by=it.created_by,
        current=it.current,
        serving=it.serving,
    )


def worker(it: Worker) -> rest.FunctionWorker:
    """A worker."""
    return rest.FunctionWorker(
        name=it.id,
        version=it.version,
        allocation_id=it.allocation_id,
        state=it.state,
        reason=it.reason,
        slots=it.slots,
        inflight=it.inflight,
        served=it.served,
        created_at=it.created_at,
        ready_at=it.ready_at,
    )


def invocation(shown: Shown, urls: Urls) -> rest.Invocation:
    """An invocation. In lists, their rows come without results."""
    it = shown.row
    return rest.Invocation(
        id=it.id,
        project_id=it.project_id,
        function=it.function_name,
        mode=it.mode,
        state=it.state,
        attempts=it.attempt,
        version=it.version,
        worker=it.worker_id,
        waiting_for=shown.waiting_for,
        status_code=it.status_code if it.ended else 0,
        failure_class=it.failure_class if it.ended else "",
        error=it.error,
        error_type=it.error_type,
        traceback=it.traceback,
        progress=None if it.progress is None else msgspec.Raw(it.progress.encode()),
        parent_id=it.parent_id,
        timeout_s=it.timeout_s,
        duration_ms=it.duration_ms,
        created_at=it.created_at,
        due_at=it.due_at,
        expires_at=it.expires_at,
        dispatched_at=it.dispatched_at,
        started_at=it.started_at,
        finished_at=it.finished_at,
        content_type=it.result_type if it.ended else "",
        encoding=it.encoding if it.ended else "",
        body=embedded(it.result) if it.ended and it.result is not None else None,
        result=_apart(it.result_ref, urls.result(it.id)) if it.ended else None,
    )


def outcome(it: Result, urls: Urls) -> rest.InvocationOutcome:
    """How a sync invocation ended, in the source's words."""
    reference = it.bodyRef
    url = urls.result(it.invocationID)
    return rest.InvocationOutcome(
        invocationID=it.invocationID,
        serverlessRequestID=it.serverlessRequestID,
        mode=it.mode,
        state=it.state,
        failureClass=it.failureClass,
        workerName=it.workerName,
        workerNamespace=it.workerNamespace,
        statusCode=it.statusCode,
        contentType=it.contentType,
        headers=it.headers,
        body=it.body,
        error=it.error,
        startedAt=it.startedAt,
        completedAt=it.completedAt,
        encoding=it.encoding,
        result=rest.ObjectUse(bytes=reference.bytes, sha256=reference.sha256, url=url) if reference else None,
        attempts=it.attempt,
        errorType=it.errorType,
        traceback=it.traceback,
    )


def unit(it: ShownUnit) -> rest.GpuUnit:
    """A unit of the source."""
    body, framework = it.unit.body, it.unit.body.serverless.framework
    ready = it.function.workers_ready if it.function else 0
    return rest.GpuUnit(
        operationID=body.operationID,
        name=body.name,
        specName=body.specName or body.packageID,
        image=body.image,
        template=body.template,
        access=body.access,
        serverless=body.serverless,
        status=rest.GpuUnitStatus(
            phase=_phase(it.function),
            readyReplicas=ready,
            serviceName=it.unit.function_name,
            accessURL="",
            serverless=rest.UnitServerlessStatus(
                phase="Disabled" if it.function is None else "Ready" if ready else "Pending",
                dispatchSubject=_dispatch_subject(it),
                socketPath=framework.socketPath,
                invokePath=framework.invokePath,
                healthPath=framework.healthPath,
            ),
        ),
        createdAt=it.unit.created_at,
    )


def _phase(function: Deployed | None) -> str:
    if function is None or not (function.workers_ready or function.workers_starting):
        return "Failed" if function and function.waiting_for else "Empty"
    return "Ready" if function.workers_ready else "Progressing"


def _dispatch_subject(it: ShownUnit) -> str:
    if it.function is None:
        return ""
    return subjects.dispatch(subjects.request_token(it.function.project_id, it.function.name), it.unit.name)


def _apart(kept: Any, url: str) -> rest.ObjectUse | None:
    if not kept:
        return None
    reference = msgspec.convert(kept, Reference)
    return rest.ObjectUse(bytes=reference.bytes, sha256=reference.sha256, url=url)
