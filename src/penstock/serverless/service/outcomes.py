"""What senders are told of an invocation: that it was accepted, that its id is taken, how it ended. Pure."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from penstock.kit.errors import Unavailable
from penstock.serverless.errors import IdReused
from penstock.serverless.model import Announcement, Draft, Invocation, Mode, State
from penstock.wire import subjects
from penstock.wire.rest import InvocationAck
from penstock.wire.serverless import Reference, Result
from penstock.wire.unreadable import UNREADABLE

_STREAM: Final = "WORK"
_NULL: Final = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An invocation that will have exactly one end. `existing` is the row of an id that came before."""

    project_id: str
    id: str
    function_name: str
    mode: Mode
    created_at: datetime
    existing: Invocation | None = None


def reused(invocation_id: str) -> IdReused:
    """The id is another invocation's."""
    return IdReused(
        f"invocationID {invocation_id} was used with another payload or another function", field="invocationID"
    )


def accepted(draft: Draft, created_at: datetime | None, existing: Invocation | None) -> Accepted | BaseException:
    """What became of a draft: made at `created_at`, or found as `existing`, or why neither."""
    if existing is not None and (
        existing.payload_hash != draft.payload_hash or existing.function_name != draft.function_name
    ):
        return reused(draft.id)
    began = existing.created_at if existing else created_at
    if began is None:
        return Unavailable("an invocation with this id is being forgotten; try again", retry_after_s=1)
    return Accepted(
        project_id=draft.project_id,
        id=draft.id,
        function_name=draft.function_name,
        mode=draft.mode,
        created_at=began,
        existing=existing,
    )


def announcement(draft: Draft, made: Accepted) -> Announcement:
    """What the queue is told."""
    return Announcement(
        project_id=draft.project_id,
        id=draft.id,
        function_name=draft.function_name,
        mode=draft.mode,
        content_type=draft.content_type,
        headers=draft.headers,
        attributes=draft.attributes,
        payload=draft.payload,
        payload_ref=draft.payload_ref,
        timeout_s=draft.timeout_s,
        reply_to=draft.reply_to,
        created_at=made.created_at,
    )


def acknowledgement(made: Accepted, sequence: int) -> InvocationAck:
    """What the sender is told."""
    request = subjects.request_token(made.project_id, made.function_name)
    return InvocationAck(
        invocationID=made.id,
        serverlessRequestID=made.function_name,
        mode=made.mode,
        subject=subjects.invoke(request),
        resultSubject=subjects.result(request),
        metricsSubject=subjects.metrics(request),
        stream=_STREAM,
        sequence=sequence,
        duplicate=made.existing is not None,
        acceptedAt=made.created_at,
        state=made.existing.state if made.existing else State.QUEUED,
    )


def ended(row: Invocation) -> Result:
    """The end of an invocation, from its row."""
    return Result(
        invocationID=row.id,
        serverlessRequestID=row.function_name,
        mode=row.mode,
        state=row.state,
        statusCode=row.status_code,
        contentType=row.result_type or "application/json",
        headers=dict(row.result_headers or {}),
        body=_NULL if row.result is None else embedded(row.result),
        encoding=row.encoding,
        bodyRef=msgspec.convert(row.result_ref, Reference) if row.result_ref else None,
        failureClass=row.failure_class,
        workerName=row.worker_id or "",
        workerNamespace=row.project_id,
        error=row.error,
        errorType=row.error_type,
        traceback=row.traceback,
        startedAt=row.started_at,
        completedAt=row.finished_at,
        attempt=row.attempt,
    )


def embedded(kept: bytes) -> msgspec.Raw:
    """A stored body as a part of a document, which is JSON in UTF-8 whatever was stored: bytes that are no UTF-8 become
    U+FFFD, and what is no JSON becomes a string. The body itself is at `/result`, as it was answered."""
    text = kept.decode(errors="replace")
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except UNREADABLE:
        return msgspec.Raw(msgspec.json.encode(text))
    return msgspec.Raw(text.encode())
