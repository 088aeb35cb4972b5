"""One attempt: called once, ended once, told until the stream has it.

The first end counts: an answer, the deadline, a cancellation, or the end of the unit. The slot is taken until the
framework is done with it, whatever was told by then; a framework that does not let go is ended with its unit.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec
from nats.aio.msg import Msg
from prometheus_client import Counter

from penstock.kit.clock import utc_now
from penstock.kit.telemetry import logger
from penstock.node.errors import NodeError
from penstock.node.sidecar import answers
from penstock.node.sidecar.answers import Outcome
from penstock.node.sidecar.errors import BrokenAnswer, LostConnection, NotSpooled, Refusal, TooLarge, Unready
from penstock.node.sidecar.framework import BUSY, Framework
from penstock.node.sidecar.gateway import Attempts, NotKept
from penstock.node.sidecar.output import Pace, Voice
from penstock.node.sidecar.results import Told
from penstock.wire.serverless import (
    CANCEL_PATH,
    INLINE_BYTES_MAX,
    RESULT_BYTES_MAX,
    TIMEOUT_S_MAX,
    VERSION,
    FailureClass,
    Frame,
    FrameCall,
    FrameworkReply,
    FrameworkRequest,
    State,
    WorkerDispatchMessage,
)
from penstock.wire.sidecar import Ended, ExitClass
from penstock.wire.unitobjects import ObjectAsk

_log = logger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_late = Counter("penstock_sidecar_late_answers_total", "Answers of frameworks after the deadline or a cancellation.")
_WHY_S: Final = 1.0
_CANCEL_S: Final = 1.0
_BUSY_S: Final = 5.0
_BUSY_AGAIN_S: Final = 0.1
_REPLY_BYTES: Final = 1 << 20
_SMALL_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much and how long, for every attempt."""

    inline_bytes_max: int = INLINE_BYTES_MAX
    result_bytes_max: int = RESULT_BYTES_MAX
    grace_s: float = 2.0
    #: A handler's call that is not answered is sent again after this time at first.
    call_again_s: float = 3.0
    pace: Pace = Pace()  # noqa: RUF009 (frozen)

    @property
    def reply_bytes_max(self) -> int:
        """A reply whose body is the largest result, in base64."""
        return self.result_bytes_max // 3 * 4 + _REPLY_BYTES


class Host(Protocol):
    """The worker that the attempt is for. `freed` gives its slot back, `kill` ends the unit."""

    @property
    def framework(self) -> Framework: ...
    @property
    def gateway(self) -> Attempts: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def invoke_path(self) -> str: ...
    @property
    def own_framework(self) -> bool: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def ended(self) -> "asyncio.Future[Ended]": ...
    def started(self, attempt: "Attempt") -> None: ...
    def freed(self) -> None: ...
    def call(self, attempt: "Attempt", call: FrameCall) -> None: ...
    def ask_object(self, attempt: "Attempt", asked: ObjectAsk) -> None: ...
    def kill(self, reason: str) -> None: ...
    async def say(self, batch: bytes) -> None: ...
    async def tell(self, attempt: "Attempt", told: Told) -> None: ...


class Attempt:
    """`run` is its whole life. `message` is the newest delivery of it."""

    def __init__(self, host: Host, dispatch: WorkerDispatchMessage, message: Msg) -> None:
        self.dispatch = dispatch
        self.message = message
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._started_at: datetime = utc_now()
        self._started = self._loop.time()
        self._duration_s = 0.0
        self._end: Outcome | None = None
        self._unwanted = False
        self._calling = self._called = False
        self._let_go = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._voice = Voice(dispatch, host.say, host.bounds.pace)

    @property
    def key(self) -> tuple[str, int]:
        """What makes it the same attempt when it comes again."""
        return self.dispatch.invocationID, self.dispatch.attempt

    @property
    def running(self) -> bool:
        """Whether the handler is at it and nobody has ended it."""
        return self._calling and self._end is None

    @property
    def timeout_s(self) -> float:
        """How long the handler may take."""
        given = self.dispatch.timeoutSeconds
        return min(given, TIMEOUT_S_MAX) if given > 0 else TIMEOUT_S_MAX

    async def run(self) -> None:
        """Call the handler and tell how it ended. Returns when the queue knows, or nobody wants to know any more."""
        try:
            outcome = await self._outcome()
        except Exception:  # noqa: BLE001 (an attempt's supervisor: the worker goes on)
            _log.exception("attempt_failed", invocation_id=self.dispatch.invocationID)
            # A handler that was called is not called again for an answer that could not be handled.
            failure = FailureClass.FRAMEWORK_ERROR if self._called else FailureClass.DISPATCH_ERROR
            outcome = answers.failed(failure, "the attempt failed within the platform")
        finally:
            self._calling = False
            self._let_go.set()
            self._host.freed()
        if outcome is not None and self._settle(outcome):
            await self._tell(outcome)
        await asyncio.gather(*self._background)

    def call_off(self) -> None:
        """Nobody wants it any more: an end that has not been told need not be."""
        outcome = answers.cancelled()
        if self._settle(outcome):
            self._spawn(self._tell(outcome))
            self._stop("it was cancelled")
        else:
            self._unwanted = True

    async def _outcome(self) -> Outcome | None:
        try:
            payload = await self._payload()
        except NotKept as error:
            failure = FailureClass.INTEGRITY if error.code == "altered" else FailureClass.DISPATCH_ERROR
            return answers.failed(failure, error.detail)
        return None if self._end is not None else await self._invoke(self._request(payload))

    async def _invoke(self, request: bytes) -> Outcome:
        host = self._host
        self._calling = self._called = True
        self._started_at, self._started = utc_now(), self._loop.time()
        host.started(self)
        deadline = self._loop.call_later(self.timeout_s, self._expire)
        try:
            return await _judged(await self._reply(request))
        except BrokenAnswer as error:
            return answers.failed(FailureClass.FRAMEWORK_ERROR, error.detail)
        except NotSpooled as error:
            return answers.failed(FailureClass.RESULT_STORE_ERROR, error.detail)
        except TooLarge:
            limit = host.bounds.result_bytes_max
            return answers.failed(FailureClass.RESULT_TOO_LARGE, f"the result is larger than {limit} bytes")
        except (LostConnection, Unready, Refusal) as error:
            self._duration_s = self._loop.time() - self._started
            deadline.cancel()
            return await self._why(error)
        finally:
            deadline.cancel()

    async def _reply(self, request: bytes) -> FrameworkReply:
        """The platform's own framework is busy for a moment after a sidecar before us, with what that one left."""
        host = self._host
        until = self._loop.time() + _BUSY_S
        while True:
            try:
                bytes_max = host.bounds.reply_bytes_max
                return await host.framework.invoke(host.invoke_path, request, self._hear, bytes_max=bytes_max)
            except BrokenAnswer as error:
                waits = error.code == BUSY and host.own_framework and self._loop.time() < until
                if not waits or self._end is not None:
                    raise
            await asyncio.sleep(_BUSY_AGAIN_S)

    async def _why(self, error: NodeError) -> Outcome:
        """The connection is lost: the agent may know why."""
        host = self._host
        await asyncio.wait({host.ended}, timeout=_WHY_S)
        ended = host.ended.result() if host.ended.done() else None
        if ended is not None and ended.exit_class is ExitClass.OOM:
            detail = f"the worker used more memory than its limit of {host.memory_bytes} bytes"
            return answers.failed(FailureClass.OOM, detail)
        if isinstance(error, LostConnection) and await self._was_cut(error, ended):
            return answers.failed(FailureClass.FRAMEWORK_ERROR, f"truncated: {error.detail}")
        if ended is None:
            return answers.failed(FailureClass.WORKER_LOST, error.detail)
        return answers.failed(FailureClass.WORKER_LOST, f"the worker ended: {ended.detail or ended.exit_class}")

    async def _was_cut(self, error: LostConnection, ended: Ended | None) -> bool:
        """Whether the framework itself ended its answer too early. A word from the agent may be late, or the agent
        itself away; a framework that listens has not ended."""
        if ended is not None:
            return error.finished and ended.exit_class is ExitClass.EXITED
        return error.finished or (error.begun and await self._host.framework.listens())

    async def _payload(self) -> msgspec.Raw:
        if (wanted := self.dispatch.payloadRef) is None:
            return self.dispatch.payload
        return msgspec.Raw(await self._host.gateway.payload(self.dispatch, wanted))

    def _request(self, payload: msgspec.Raw) -> bytes:
        given = self.dispatch
        return _encode(
            FrameworkRequest(
                version=VERSION,
                invocationID=given.invocationID,
                serverlessRequestID=given.serverlessRequestID,
                workerName=given.workerName,
                workerNamespace=given.workerNamespace,
                mode=given.mode,
                state=State.RUNNING,
                contentType=given.contentType,
                headers=given.headers,
                attributes=given.attributes,
                payload=payload,
                timeoutSeconds=given.timeoutSeconds,
                dispatchedAt=given.dispatchedAt,
                attempt=given.attempt,
            )
        )

    async def _hear(self, frame: Frame) -> None:
        if self._end is not None:
            return
        if frame.call is not None:
            answers.check_json(frame.call.payload, what="payload of a call")
            self._host.call(self, frame.call)
        elif frame.object is not None:
            self._host.ask_object(self, frame.object)
        else:
            await self._voice.say(frame)

    def _settle(self, outcome: Outcome) -> bool:
        """Whether this is the end that counts."""
        if self._end is not None:
            if outcome.failure is not FailureClass.CANCELLED:
                _late.inc()
            return False
        if self._called and not self._duration_s:
            self._duration_s = self._loop.time() - self._started
        self._end = outcome
        return True

    def _expire(self) -> None:
        outcome = answers.expired(self.timeout_s)
        if self._settle(outcome):
            self._spawn(self._tell(outcome))
            self._stop("it took longer than its timeout")

    async def _tell(self, outcome: Outcome) -> None:
        await self._voice.flush()
        told = Told(
            dispatch=self.dispatch,
            outcome=outcome,
            started_at=self._started_at,
            duration_s=self._duration_s,
            wanted=lambda: not self._unwanted,
        )
        await self._host.tell(self, told)

    def _stop(self, why: str) -> None:
        if self._calling:
            self._spawn(self._make_stop(why))

    async def _make_stop(self, why: str) -> None:
        """Ask the framework to end it; end the unit if it does not."""
        until = self._loop.time() + self._host.bounds.grace_s
        body = _encode({"invocationID": self.dispatch.invocationID, "attempt": self.dispatch.attempt})
        try:
            async with asyncio.timeout(_CANCEL_S):
                await self._host.framework.ask("POST", CANCEL_PATH, body)
        except (NodeError, TimeoutError) as error:
            _log.info("cancel_unheard", invocation_id=self.dispatch.invocationID, error=str(error))
        try:
            async with asyncio.timeout_at(until):
                await self._let_go.wait()
        except TimeoutError:
            self._host.kill(f"the framework goes on with {self.dispatch.invocationID} although {why}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


async def _judged(reply: FrameworkReply) -> Outcome:
    """A large body is looked at elsewhere: the other workers' attempts go on meanwhile."""
    if len(memoryview(reply.body)) <= _SMALL_BYTES_MAX:
        return answers.judged(reply)
    return await asyncio.to_thread(answers.judged, reply)
