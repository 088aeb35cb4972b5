"""The attempts of one worker: taken from the queue as slots are free, each made once however often it comes.

A message is believed for its MAC alone. What cannot be read is buried at once, what somebody else wrote is dropped.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error
from prometheus_client import Counter, Gauge

from penstock.kit.bus import Bus
from penstock.kit.clock import utc_now
from penstock.kit.publish import NotStored
from penstock.kit.pull import InProgress, Pull
from penstock.kit.telemetry import logger
from penstock.node.sidecar.attempt import Attempt, Bounds
from penstock.node.sidecar.calls import Calls
from penstock.node.sidecar.framework import Framework
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.letters import Letters, Malformed, Unbelievable, Unsupported
from penstock.node.sidecar.objects import Objects
from penstock.node.sidecar.reports import Reports
from penstock.node.sidecar.results import Results, Told
from penstock.wire.serverless import (
    DEAD_LETTER_ERROR_CHARS_MAX,
    MAC_HEADER,
    VERSION,
    DeadLetterMessage,
    FailureClass,
    FrameCall,
    State,
)
from penstock.wire.sidecar import Ended, Serve
from penstock.wire.unitobjects import ObjectAsk

_log = logger(__name__)
_inflight = Gauge("penstock_sidecar_inflight", "Attempts in hand, of all workers.")
_security = Counter("penstock_sidecar_security_events_total", "Messages that nobody honest sends, by kind.", ("kind",))
WORK: Final = "WORK"
_DONE_MAX: Final = 4096
#: Results that the stream does not have yet; with so many nothing new is taken.
_UNTOLD_MAX: Final = 256


class Desk:
    """Takes and makes one worker's attempts (it is their `Host`)."""

    def __init__(
        self,
        serve: Serve,
        letters: Letters,
        bus: Callable[[], Bus],
        *,
        framework: Framework,
        gateway: Attempts,
        bounds: Bounds,
        ended: "asyncio.Future[Ended]",
        kill: Callable[[str], None],
    ) -> None:
        self.framework = framework
        self.gateway = gateway
        self.bounds = bounds
        self.ended = ended
        self._kill = kill
        self._doomed = False
        self.invoke_path = serve.serving.invoke_path
        self.own_framework = serve.serving.framework
        self.memory_bytes = serve.memory_bytes
        self.reports = Reports(letters, bus, in_hand=self.in_hand, running=self._is_running)
        self._letters = letters
        self._bus = bus
        self._slots = serve.serving.slots
        self._project_id = serve.serving.project_id
        self._function = serve.serving.function
        self._results = Results(
            bus,
            gateway,
            letters.results,
            inline_bytes_max=bounds.inline_bytes_max,
            result_bytes_max=bounds.result_bytes_max,
        )
        self._calls = Calls(letters, bus, framework, gateway, again_s=bounds.call_again_s)
        self._objects = Objects(framework, gateway)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._busy = 0
        self._room = asyncio.Event()
        self._taking: asyncio.Task[None] | None = None
        self._progress = InProgress()

    async def open(self) -> None:
        """Take attempts from now on."""
        await self._progress.__aenter__()
        self._taking = asyncio.get_running_loop().create_task(self._take())
        self._taking.add_done_callback(self._taken)

    def _taken(self, task: "asyncio.Task[None]") -> None:
        """A worker that lives and takes nothing would be given more and more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("taking_failed", worker=self._letters.worker, exc_info=error)
            self.kill("its sidecar cannot take attempts")

    def drain(self) -> None:
        """Take nothing new; what was not begun goes back to the queue."""
        if self._taking is not None:
            self._taking.cancel()

    async def close(self, timeout_s: float) -> None:
        """Drain, give what is in hand so long to end, and give up the rest: the queue brings it again."""
        self.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        left = list(self._attempts.values())
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._taking] if self._taking else []), return_exceptions=True)
        for attempt in left:
            with suppress(Error):
                await attempt.message.nak()
        self._calls.close()
        self._objects.close()
        self.reports.close()
        if self._taking is not None:
            await self._progress.__aexit__(None, None, None)

    def in_hand(self) -> list[tuple[str, int]]:
        """Attempts whose end the stream does not have yet."""
        return list(self._attempts)

    def _is_running(self, key: tuple[str, int]) -> bool:
        attempt = self._attempts.get(key)
        return attempt is not None and attempt.running

    async def control(self, message: Msg) -> None:
        """An order: some attempts are not wanted, or nothing more is."""
        try:
            order = self._letters.control(message.data, _mac(message))
        except (Unbelievable, Malformed) as error:
            self._distrust("control", error)
            return
        for invocation_id, attempt in order.cancel:
            if (found := self._attempts.get((invocation_id, attempt))) is not None:
                found.call_off()
            else:
                self._remember((invocation_id, attempt))
        if order.drain:
            self.drain()

    async def answered(self, message: Msg) -> None:
        """What became of a handler's call."""
        try:
            self._calls.answer(self._letters.answer(message.data, _mac(message)))
        except (Unbelievable, Malformed) as error:
            self._distrust("answer", error)

    def started(self, attempt: Attempt) -> None:
        """A handler is called."""
        self.reports.started(attempt.key)

    def freed(self) -> None:
        """A slot is free."""
        self._busy -= 1
        self._room.set()

    def call(self, attempt: Attempt, call: FrameCall) -> None:
        """A handler calls another function."""
        self._calls.make(attempt.dispatch, call)

    def ask_object(self, attempt: Attempt, asked: ObjectAsk) -> None:
        """A handler reads or writes an object of its project."""
        self._objects.ask(attempt.dispatch, asked)

    def kill(self, reason: str) -> None:
        """The unit must end. It gets nothing more, and its function is told why."""
        self._kill(reason)
        if not self._doomed:
            self._doomed = True
            self.drain()
            self._spawn(self.reports.unhealthy(reason))

    async def say(self, batch: bytes) -> None:
        """Something that a handler said; lost while the queue is away."""
        with suppress(Error):
            await self._bus().client.publish(self._letters.outputs, batch)

    async def tell(self, attempt: Attempt, told: Told) -> None:
        """How an attempt ended; its message is acknowledged when the stream knows."""
        outcome = await self._results.tell(told)
        if outcome is not None:
            await self.reports.finished(told.dispatch, outcome)
        await self._acknowledge(attempt)

    async def _acknowledge(self, attempt: Attempt) -> None:
        self._remember(attempt.key)
        self._progress.let_go(attempt.message)
        with suppress(Error):
            await attempt.message.ack()

    async def _take(self) -> None:
        async with Pull(self._bus(), stream=WORK, consumer=self._letters.worker, batch=self._slots) as pull:
            while True:
                while self._busy >= self._slots or len(self._attempts) >= self._slots + _UNTOLD_MAX:
                    self._room.clear()
                    await self._room.wait()
                for message in await pull.take(self._slots - self._busy):
                    self._accept(message)

    def _accept(self, message: Msg) -> None:
        """Begin an attempt, or see to it that the message is not brought again."""
        try:
            dispatch = self._letters.dispatch(message.data, _mac(message))
        except Unbelievable as error:
            self._distrust("dispatch", error)
            self._spawn(self._bury(message, FailureClass.FOREIGN_MESSAGE, "it has no MAC under this worker's key"))
            return
        except Unsupported as error:
            self._spawn(self._bury(message, FailureClass.UNSUPPORTED_VERSION, str(error)))
            return
        except Malformed as error:
            self._spawn(self._bury(message, FailureClass.MALFORMED_MESSAGE, str(error)))
            return
        key = (dispatch.invocationID, dispatch.attempt)
        if key in self._done:
            self._spawn(_acknowledge(message))
        elif (known := self._attempts.get(key)) is None:
            self._begin(Attempt(self, dispatch, message))
        elif known.message.metadata.sequence.stream != message.metadata.sequence.stream:
            self._spawn(_acknowledge(message))
        else:
            self._progress.let_go(known.message)
            known.message = message
            self._progress.hold(message)

    def _begin(self, attempt: Attempt) -> None:
        self._busy += 1
        self._attempts[attempt.key] = attempt
        self._progress.hold(attempt.message)
        _inflight.inc()
        self._spawn(self._make(attempt))

    async def _make(self, attempt: Attempt) -> None:
        """A sidecar before us may have made one that comes again, and died before it could say so to the queue."""
        try:
            if (attempt.message.metadata.num_delivered or 1) > 1 and not await self.gateway.wants(attempt.dispatch):
                _log.info("attempt_over", worker=self._letters.worker, invocation_id=attempt.dispatch.invocationID)
                self.freed()
                await self._acknowledge(attempt)
            else:
                await attempt.run()
        finally:
            del self._attempts[attempt.key]
            self._calls.forget(attempt.dispatch)
            self._objects.forget(attempt.dispatch)
            self._progress.let_go(attempt.message)
            self._room.set()
            _inflight.dec()

    async def _bury(self, message: Msg, failure: FailureClass, error: str) -> None:
        """Off the queue at once, for it would come again as it is; whoever gave it out finds the attempt missing."""
        told = message.metadata
        letter = DeadLetterMessage(
            version=VERSION,
            source="dispatch",
            state=State.DEAD_LETTERED,
            failureClass=failure,
            originalSubject=message.subject,
            stream=WORK,
            failedAt=utc_now(),
            serverlessRequestID=self._function,
            projectID=self._project_id,
            workerName=self._letters.worker,
            consumer=self._letters.worker,
            streamSequence=told.sequence.stream or 0,
            consumerSequence=told.sequence.consumer or 0,
            deliveryCount=told.num_delivered or 0,
            error=error[:DEAD_LETTER_ERROR_CHARS_MAX],
        )
        _log.warning("dispatch_buried", worker=self._letters.worker, failure=failure, error=error)
        message_id = f"dlq-{self._letters.worker}-{told.sequence.stream}"
        try:
            await self._bus().publish(self._letters.dead_letters, msgspec.json.encode(letter), msg_id=message_id)
        except (NotStored, Error) as refusal:
            _log.warning("dead_letter_not_stored", worker=self._letters.worker, error=repr(refusal))
        await _terminate(message)

    def _distrust(self, kind: str, error: Exception) -> None:
        _security.labels(kind).inc()
        _log.warning("security_event", kind=kind, worker=self._letters.worker, error=type(error).__name__)

    def _remember(self, key: tuple[str, int]) -> None:
        self._done[key] = None
        if len(self._done) > _DONE_MAX:
            self._done.popitem(last=False)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _mac(message: Msg) -> str:
    return (message.headers or {}).get(MAC_HEADER, "")


async def _acknowledge(message: Msg) -> None:
    with suppress(Error):
        await message.ack()


async def _terminate(message: Msg) -> None:
    with suppress(Error):
        await message.term()
