"""Telling others, after the commit: the queue that something waits, a worker what to do, a caller how it ended.

All of it may be lost. Sweepers announce and dispatch again; a caller who hears nothing asks for the row.
"""

import hashlib
import hmac
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec
from nats.errors import Error as NatsError
from prometheus_client import Counter

from penstock.kit.bus import Bus
from penstock.kit.clock import utc_now
from penstock.kit.telemetry import logger
from penstock.serverless.model import Announcement, Claimed, Committed, Mode
from penstock.serverless.service.proofs import Keys
from penstock.wire import subjects
from penstock.wire.serverless import (
    DEAD_LETTER_ERROR_CHARS_MAX,
    DISPATCH_BYTES_MAX,
    MAC_HEADER,
    VERSION,
    CallAnswer,
    ControlMessage,
    DeadLetterMessage,
    FailureClass,
    InvocationMessage,
    InvocationResultMessage,
    Reference,
    Result,
    State,
    WorkerDispatchMessage,
)

_log = logger(__name__)
_encode = msgspec.json.Encoder().encode
_NULL = msgspec.Raw(b"null")
_CALL = "call "
_ended = Counter("penstock_invocations", "Invocations that ended, by state and failure class", ["state", "failure"])


def mac(key: bytes, subject: str, body: bytes) -> str:
    """What a worker knows our messages by."""
    return "sha256=" + hmac.digest(key, subject.encode() + b"\0" + body, hashlib.sha256).hex()


def invocation_message(row: Announcement) -> tuple[str, str, bytes]:
    """Subject, message id and body."""
    request = subjects.request_token(row.project_id, row.function_name)
    message = InvocationMessage(
        version=VERSION,
        invocationID=row.id,
        serverlessRequestID=row.function_name,
        mode=row.mode,
        state=State.QUEUED,
        contentType=row.content_type,
        resultSubject=subjects.result(request),
        metricsSubject=subjects.metrics(request),
        enqueuedAt=row.created_at,
        timeoutSeconds=int(row.timeout_s or 0),
        headers=dict(row.headers),
        attributes=dict(row.attributes),
        payload=_NULL if row.payload is None else msgspec.Raw(row.payload),
        payloadRef=_reference(row.payload_ref),
        replySubject=row.reply_to,
        projectID=row.project_id,
    )
    return subjects.invoke(request), f"{row.project_id}/{row.id}", _encode(message)


def dispatch_message(claimed: Claimed) -> tuple[str, dict[str, str], bytes]:
    """Subject, headers and body."""
    subject = subjects.dispatch(claimed.request, claimed.worker_id)
    payload, reference = _carried(claimed)
    message = WorkerDispatchMessage(
        version=VERSION,
        invocationID=claimed.id,
        serverlessRequestID=claimed.function_name,
        mode=claimed.mode,
        state=claimed.state,
        contentType=claimed.content_type,
        resultSubject=subjects.result(claimed.request),
        metricsSubject=subjects.metrics(claimed.request),
        workerName=claimed.worker_id,
        workerNamespace=claimed.project_id,
        dispatchedAt=claimed.dispatched_at,
        timeoutSeconds=claimed.timeout_s,
        projectID=claimed.project_id,
        attempt=claimed.attempt,
        token=claimed.token.hex(),
        headers=dict(claimed.headers),
        attributes=dict(claimed.attributes),
        payload=payload,
        payloadRef=reference,
    )
    body = _encode(message)
    headers = {
        "Nats-Msg-Id": f"dispatch-{claimed.project_id}/{claimed.id}-{claimed.worker_id}-{claimed.attempt}",
        MAC_HEADER: mac(claimed.mac_key, subject, body),
    }
    return subject, headers, body


def _carried(claimed: Claimed) -> tuple[msgspec.Raw, Reference | None]:
    """The payload in line, or what to fetch from the gateway: an object, or the row's own where that is large."""
    if claimed.payload is None:
        return _NULL, _reference(claimed.payload_ref)
    if len(claimed.payload) <= DISPATCH_BYTES_MAX:
        return msgspec.Raw(claimed.payload), None
    digest = hashlib.sha256(claimed.payload).hexdigest()
    return _NULL, Reference(key="", bytes=len(claimed.payload), sha256=digest)


def _reference(value: object) -> Reference | None:
    return msgspec.convert(value, Reference) if value else None


def call_inbox(request: str, worker: str, call: str) -> str:
    """Where the end of a handler's call goes; a name of ours, no subject."""
    return f"{_CALL}{request} {worker} {call}"


def call_answer(call: str, end: Result) -> CallAnswer:
    """What the handler that called is told."""
    return CallAnswer(
        call=call,
        invocationID=end.invocationID,
        state=end.state,
        statusCode=end.statusCode,
        contentType=end.contentType,
        body=end.body,
        encoding=end.encoding,
        bodyRef=end.bodyRef,
        failureClass=end.failureClass,
        error=end.error,
        errorType=end.errorType,
        traceback=end.traceback,
    )


class Teller:
    """Publishes through one process's connection."""

    def __init__(self, bus: Bus, keys: Keys) -> None:
        self._bus = bus
        self._keys = keys

    async def _publish(self, subject: str, body: bytes, *, headers: dict[str, str] | None = None) -> None:
        """What cannot be sent is lost: everything here is made up for by somebody who looks."""
        try:
            await self._bus.client.publish(subject, body, headers=headers)
        except (NatsError, OSError) as error:
            _log.info("not_told", subject=subject, error=repr(error))

    async def dispatch(self, claimed: Iterable[Claimed]) -> None:
        """To the workers. Nothing waits for the queue's word: an attempt that did not arrive is found missing."""
        for each in claimed:
            subject, headers, body = dispatch_message(each)
            await self._publish(subject, body, headers=headers)

    async def ended(self, rows: Iterable[Committed]) -> None:
        """The same of what no worker told."""
        await self.answered((row, None) for row in rows)

    async def answered(self, rows: Iterable[tuple[Committed, InvocationResultMessage | None]]) -> None:
        """To whoever waits: callers in their inboxes, those who follow by a hint, and the queue's own watchers where no
        worker told them."""
        for row, message in rows:
            if row.mode is not Mode.SYNC:
                self._bus.hint(subjects.invocation(row.id))
            if row.waiting:
                continue
            _ended.labels(row.state, row.failure_class).inc()
            if row.reply_to:
                await self._answer(row, result(row, message))
            if message is None or row.state is State.DEAD_LETTERED:
                # The worker's own message says how its attempt ended, not that it was the last.
                await self._publish_result(row)
            if row.state is State.DEAD_LETTERED:
                await self._publish_dead_letter(row)

    async def _answer(self, row: Committed, end: Result) -> None:
        """A process of ours gets it in its inbox, a handler that called by its worker."""
        if not row.reply_to.startswith(_CALL):
            await self._publish(row.reply_to, _encode(end))
            return
        _, request, worker, call = row.reply_to.split(" ")
        if (key := await self._keys.of(worker)) is not None:
            await self.answer_call(request=request, worker=worker, mac_key=key, answer=call_answer(call, end))

    async def _publish_result(self, row: Committed) -> None:
        """What ended without a worker is told like all others. The token is empty: nothing is committed by it again."""
        now = utc_now()
        message = InvocationResultMessage(
            version=VERSION,
            invocationID=row.id,
            serverlessRequestID=row.function_name,
            mode=row.mode,
            state=row.state,
            workerName=row.worker_id,
            workerNamespace=row.project_id,
            statusCode=row.status_code or 500,
            startedAt=row.started_at or now,
            completedAt=row.finished_at or now,
            projectID=row.project_id,
            attempt=row.attempt,
            token="",
            failureClass=FailureClass(row.failure_class) if row.failure_class else None,
            error=row.error,
        )
        subject = subjects.result(subjects.request_token(row.project_id, row.function_name))
        headers = {"Nats-Msg-Id": f"result-{row.project_id}/{row.id}-end"}
        await self._publish(subject, _encode(message), headers=headers)

    async def _publish_dead_letter(self, row: Committed) -> None:
        request = subjects.request_token(row.project_id, row.function_name)
        message = DeadLetterMessage(
            version=VERSION,
            source="invocation",
            state=State.DEAD_LETTERED,
            failureClass=FailureClass.RETRY_EXHAUSTED,
            originalSubject=subjects.invoke(request),
            stream="WORK",
            failedAt=row.finished_at or datetime.now(UTC),
            invocationID=row.id,
            serverlessRequestID=row.function_name,
            projectID=row.project_id,
            workerName=row.worker_id,
            deliveryCount=row.attempt,
            error=row.error[:DEAD_LETTER_ERROR_CHARS_MAX],
        )
        headers = {"Nats-Msg-Id": f"dlq-{row.project_id}/{row.id}"}
        await self._publish(subjects.dead_letter("invocation", request), _encode(message), headers=headers)

    async def order(self, *, request: str, worker: str, mac_key: bytes, message: ControlMessage) -> None:
        """To one worker's sidecar; repeated when its heartbeats show that it was not heard."""
        subject = subjects.control(request, worker)
        body = _encode(message)
        await self._publish(subject, body, headers={MAC_HEADER: mac(mac_key, subject, body)})

    async def answer_call(self, *, request: str, worker: str, mac_key: bytes, answer: CallAnswer) -> None:
        """To the handler that called."""
        subject = subjects.call_answer(request, worker)
        body = _encode(answer)
        await self._publish(subject, body, headers={MAC_HEADER: mac(mac_key, subject, body)})


def result(row: Committed, message: InvocationResultMessage | None) -> Result:
    """What a caller is told. The row says how it ended, the worker's message what came of it."""
    return Result(
        invocationID=row.id,
        serverlessRequestID=row.function_name,
        mode=row.mode,
        state=row.state,
        statusCode=row.status_code,
        contentType=message.contentType if message else "application/json",
        headers=message.headers if message else {},
        body=message.body if message else _NULL,
        encoding=message.encoding if message else "",
        bodyRef=message.bodyRef if message else None,
        failureClass=row.failure_class,
        workerName=row.worker_id,
        workerNamespace=row.project_id,
        error=row.error,
        errorType=row.error_type,
        traceback=row.traceback,
        startedAt=row.started_at,
        completedAt=row.finished_at,
        attempt=row.attempt,
    )
