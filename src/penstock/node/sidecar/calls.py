"""Calls of other functions that handlers make, and the way of the answers back to them.

A call is sent again until it is answered or its attempt is over: both ways go over messages that may be lost. It has
the same id each time, so it is made once. An answer that is kept at the gateway is fetched from there.
"""

import asyncio
import base64
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from nats.errors import Error

from penstock.kit.bus import Bus
from penstock.kit.telemetry import logger
from penstock.node.errors import NodeError
from penstock.node.sidecar import answers
from penstock.node.sidecar.framework import Framework
from penstock.node.sidecar.gateway import Attempts, NotKept
from penstock.node.sidecar.letters import Letters
from penstock.wire.serverless import (
    ANSWER_PATH,
    INLINE_BYTES_MAX,
    VERSION,
    CallAnswer,
    CallMessage,
    FailureClass,
    FrameCall,
    Reference,
    State,
    WorkerDispatchMessage,
)
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_json: Final = msgspec.json.Decoder(msgspec.Raw)
_OPEN_MAX: Final = 4096
#: What open calls of one worker may hold, since each is kept to be sent again.
_OPEN_BYTES_MAX: Final = 64 << 20
_AGAIN_CAP_S: Final = 30.0
_ANSWER_S: Final = 10.0
#: In base64 it still fits what the platform's own framework takes.
_BODY_BYTES_MAX: Final = 32 << 20


@dataclass(eq=False, slots=True)
class _Open:
    """A call whose handler has no answer; `task` sends it or, when it is `answered`, tells the handler."""

    dispatch: WorkerDispatchMessage
    call: str
    body: bytes
    task: "asyncio.Task[None]"
    answered: bool = False


class Calls:
    """The calls of one worker's handlers that have no answer yet. `again_s` is the first pause before a repetition."""

    def __init__(
        self,
        letters: Letters,
        bus: Callable[[], Bus],
        framework: Framework,
        gateway: Attempts,
        *,
        again_s: float,
    ) -> None:
        self._letters = letters
        self._bus = bus
        self._framework = framework
        self._gateway = gateway
        self._again_s = again_s
        self._open: dict[str, _Open] = {}
        self._open_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def make(self, dispatch: WorkerDispatchMessage, call: FrameCall) -> None:
        """Pass a handler's call on; what cannot be passed on is answered with why."""
        if call.call in self._open:
            return
        size = len(memoryview(call.payload))
        if size > INLINE_BYTES_MAX:
            error = f"a call between functions carries at most {INLINE_BYTES_MAX} bytes: pass an object's key"
            self._spawn(self._tell_once(_refusal(call.call, error)))
        elif len(self._open) >= _OPEN_MAX or self._open_bytes + size > _OPEN_BYTES_MAX:
            self._spawn(self._tell_once(_refusal(call.call, "too many calls are under way in this worker")))
        else:
            body = _encode(_message(dispatch, call))
            self._open[call.call] = _Open(dispatch, call.call, body, self._spawn(self._send(body)))
            self._open_bytes += len(body)

    def answer(self, answer: CallAnswer) -> None:
        """Tell the handler; answers that nobody waits for are dropped."""
        made = self._open.get(answer.call)
        if made is not None and not made.answered:
            made.answered = True
            made.task.cancel()
            made.task = self._spawn(self._answer(made, answer))

    def forget(self, dispatch: WorkerDispatchMessage) -> None:
        """The attempt is over: nobody waits for what it called."""
        for made in [made for made in self._open.values() if made.dispatch is dispatch]:
            made.task.cancel()
            self._close(made)

    def close(self) -> None:
        """Nobody waits any more."""
        for task in list(self._tasks):
            task.cancel()

    def _close(self, made: _Open) -> None:
        if self._open.pop(made.call, None) is not None:
            self._open_bytes -= len(made.body)

    async def _send(self, body: bytes) -> None:
        wait_s = self._again_s
        while True:
            try:
                await self._bus().client.publish(self._letters.calls, body)
            except Error as error:
                _log.info("call_not_sent", worker=self._letters.worker, error=repr(error))
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, _AGAIN_CAP_S)

    async def _answer(self, made: _Open, answer: CallAnswer) -> None:
        if answer.bodyRef is not None:
            answer = await self._fetched(made, answer, answer.bodyRef)
        while True:
            if await self._tell(answer):
                break
            # The handler keeps its framework from listening.
            await asyncio.sleep(self._again_s)
        self._close(made)

    async def _fetched(self, made: _Open, answer: CallAnswer, kept: Reference) -> CallAnswer:
        """The same answer with its body in it."""
        if kept.bytes > _BODY_BYTES_MAX:
            error = f"a call between functions brings at most {_BODY_BYTES_MAX} bytes back: pass an object's key"
            return _failed(answer, FailureClass.RESULT_TOO_LARGE, error)
        try:
            data = await self._gateway.called(made.dispatch, answer.invocationID, kept)
            if answers.is_json(answer.contentType):
                return _with_body(answer, _json.decode(data))
            if answer.contentType.startswith("text/"):
                return _with_body(answer, msgspec.Raw(_encode(data.decode())))
        except NotKept as error:
            return _failed(answer, FailureClass.RESULT_STORE_ERROR, f"the result could not be fetched: {error.detail}")
        except UNREADABLE:
            return _failed(answer, FailureClass.FRAMEWORK_ERROR, "the result is not what its content type says")
        return _with_body(answer, msgspec.Raw(b'"' + base64.b64encode(data) + b'"'), encoding=answers.BASE64)

    async def _tell_once(self, answer: CallAnswer) -> None:
        await self._tell(answer)

    async def _tell(self, answer: CallAnswer) -> bool:
        """Whether the framework has heard it; what it says to that is its own business."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._framework.ask("POST", ANSWER_PATH, _encode(answer))
        except (NodeError, TimeoutError) as error:
            _log.info("answer_unheard", worker=self._letters.worker, error=str(error))
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _message(dispatch: WorkerDispatchMessage, call: FrameCall) -> CallMessage:
    return CallMessage(
        version=VERSION,
        projectID=dispatch.projectID,
        invocationID=dispatch.invocationID,
        workerName=dispatch.workerName,
        token=dispatch.token,
        call=call.call,
        function=call.function,
        mode=call.mode,
        contentType=call.contentType,
        payload=call.payload,
        timeoutSeconds=call.timeoutSeconds,
    )


def _refusal(call: str, error: str) -> CallAnswer:
    return CallAnswer(
        call=call,
        invocationID="",
        state=State.FAILED,
        statusCode=answers.BAD_GATEWAY,
        failureClass=FailureClass.DISPATCH_ERROR,
        error=error,
    )


def _with_body(answer: CallAnswer, body: msgspec.Raw, *, encoding: str = "") -> CallAnswer:
    return msgspec.structs.replace(answer, bodyRef=None, body=body, encoding=encoding)


def _failed(answer: CallAnswer, failure: FailureClass, error: str) -> CallAnswer:
    """The call was made, and there is nothing to show for it."""
    return CallAnswer(
        call=answer.call,
        invocationID=answer.invocationID,
        state=State.FAILED,
        statusCode=answers.BAD_GATEWAY,
        failureClass=failure,
        error=error,
    )
