"""How an attempt's end is told: published again and again under one id until the stream has it.

What is too large for a message goes to the gateway first, and the message names it. The work was done once: nothing
here makes it be done again.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec
from nats.errors import Error
from prometheus_client import Counter

from penstock.kit.bus import Bus
from penstock.kit.clock import backoff_s, utc_now
from penstock.kit.publish import BadMessage, NotStored
from penstock.kit.telemetry import logger
from penstock.node.sidecar import answers
from penstock.node.sidecar.answers import Outcome
from penstock.node.sidecar.errors import TooLarge
from penstock.node.sidecar.gateway import Attempts, NotKept
from penstock.wire.serverless import (
    VERSION,
    WORKER_MESSAGE_BYTES_MAX,
    FailureClass,
    InvocationResultMessage,
    Reference,
    WorkerDispatchMessage,
)

_log = logger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_told = Counter("penstock_sidecar_results_total", "Ends of attempts, by state and failure class.", ("state", "failure"))
_dropped = Counter("penstock_sidecar_results_dropped_total", "Results that were given up before the stream had them.")
#: As long as the queue keeps the dispatch itself.
_TELL_S: Final = 3600.0
_AGAIN_CAP_S: Final = 2.0
#: What goes with a body in a message at most, apart from errors and headers: names, times, NATS' own headers.
_ENVELOPE_BYTES: Final = 16 << 10
_NULL: Final = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One end of one attempt. `wanted` says whether anybody still asks for it."""

    dispatch: WorkerDispatchMessage
    outcome: Outcome
    started_at: datetime
    duration_s: float
    wanted: Callable[[], bool]


class Results:
    """Tells the results of one worker, through whatever connection it has."""

    def __init__(
        self, bus: Callable[[], Bus], gateway: Attempts, subject: str, *, inline_bytes_max: int, result_bytes_max: int
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._subject = subject
        self._inline_bytes_max = inline_bytes_max
        self._result_bytes_max = result_bytes_max

    async def tell(self, told: Told) -> Outcome | None:
        """What was told in the end, or nothing when it was given up."""
        outcome, body = await self._written(told)
        if not await self._publish(told, body):
            _dropped.inc()
            _log.warning("result_dropped", invocation_id=told.dispatch.invocationID, attempt=told.dispatch.attempt)
            return None
        _told.labels(outcome.state, outcome.failure or "").inc()
        return outcome

    async def _written(self, told: Told) -> tuple[Outcome, bytes]:
        """The message; a body that does not fit is kept elsewhere."""
        outcome = told.outcome
        room = min(self._bus().client.max_payload, WORKER_MESSAGE_BYTES_MAX) - _ENVELOPE_BYTES
        if len(memoryview(outcome.body)) <= self._inline_bytes_max:
            body = _message(told, outcome, None)
            if len(body) <= room:
                return outcome, body
        outcome, kept = await self._kept(told)
        body = _message(told, outcome, kept)
        if len(body) > room:
            outcome = answers.failed(FailureClass.FRAMEWORK_ERROR, "the reply's headers and errors are too large")
            body = _message(told, outcome, None)
        return outcome, body

    async def _kept(self, told: Told) -> tuple[Outcome, Reference | None]:
        outcome = told.outcome

        def content() -> tuple[int, Iterator[bytes]]:
            return answers.content(outcome, self._result_bytes_max)

        try:
            return outcome, await self._gateway.store(told.dispatch, content, outcome.content_type)
        except TooLarge as error:
            return answers.failed(FailureClass.RESULT_TOO_LARGE, error.detail), None
        except NotKept as error:
            large = error.code == "too_large"
            failure = FailureClass.RESULT_TOO_LARGE if large else FailureClass.RESULT_STORE_ERROR
            return answers.failed(failure, f"the result could not be kept: {error.detail}"), None

    async def _publish(self, told: Told, body: bytes) -> bool:
        loop = asyncio.get_running_loop()
        until = loop.time() + _TELL_S
        message_id = _message_id(told.dispatch)
        failures = 0
        while told.wanted() and loop.time() < until:
            try:
                await self._bus().publish(self._subject, body, msg_id=message_id)
            except BadMessage as error:
                _log.error("result_unsendable", invocation_id=told.dispatch.invocationID, error=error.detail)
                return False
            except (NotStored, Error) as error:
                failures += 1
                _log.debug("result_not_stored", invocation_id=told.dispatch.invocationID, error=repr(error))
                await asyncio.sleep(backoff_s(failures, base_s=0.05, cap_s=_AGAIN_CAP_S))
            else:
                return True
        return False


def _message_id(dispatch: WorkerDispatchMessage) -> str:
    """One per attempt, and not to be guessed: whoever used it before us would have our message dropped as a repeat."""
    digest = hashlib.sha256(f"{dispatch.projectID}/{dispatch.invocationID}/{dispatch.token}".encode()).hexdigest()
    return f"result-{digest[:40]}-{dispatch.attempt}"


def _message(told: Told, outcome: Outcome, kept: Reference | None) -> bytes:
    given = told.dispatch
    body = _NULL if kept else outcome.body
    return _encode(
        InvocationResultMessage(
            version=VERSION,
            invocationID=given.invocationID,
            serverlessRequestID=given.serverlessRequestID,
            mode=given.mode,
            state=outcome.state,
            workerName=given.workerName,
            workerNamespace=given.workerNamespace,
            statusCode=outcome.status,
            startedAt=told.started_at,
            completedAt=utc_now(),
            projectID=given.projectID,
            attempt=given.attempt,
            token=given.token,
            contentType=outcome.content_type,
            headers=outcome.headers,
            body=body,
            bodyRef=kept,
            bodySHA256=hashlib.sha256(memoryview(body)).hexdigest(),
            # Kept are the very bytes.
            encoding="" if kept else outcome.encoding,
            failureClass=outcome.failure,
            error=outcome.error,
            errorType=outcome.error_type,
            traceback=outcome.traceback,
            durationMs=round(told.duration_s * 1000),
        )
    )
