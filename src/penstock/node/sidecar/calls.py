"""Calls of other functions that handlers make, and the way of the answers back to them."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec
from nats.errors import Error

from penstock.kit.bus import Bus
from penstock.kit.telemetry import logger
from penstock.node.errors import NodeError
from penstock.node.sidecar.framework import Framework
from penstock.node.sidecar.letters import Letters
from penstock.wire.serverless import (
    ANSWER_PATH,
    VERSION,
    CallAnswer,
    CallMessage,
    FailureClass,
    FrameCall,
    State,
    WorkerDispatchMessage,
)

_log = logger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_OPEN_MAX: Final = 4096
_ANSWER_S: Final = 10.0


class Calls:
    """The calls of one worker's handlers that have no answer yet."""

    def __init__(self, letters: Letters, bus: Callable[[], Bus], framework: Framework) -> None:
        self._letters = letters
        self._bus = bus
        self._framework = framework
        self._open: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def make(self, dispatch: WorkerDispatchMessage, call: FrameCall) -> None:
        """Pass a handler's call on; what cannot be passed on is answered with why."""
        self._open[call.call] = None
        if len(self._open) > _OPEN_MAX:
            self._open.popitem(last=False)
        self._spawn(self._make(dispatch, call))

    def answer(self, answer: CallAnswer) -> None:
        """Tell the handler; answers that nobody waits for are dropped."""
        if answer.call in self._open:
            del self._open[answer.call]
            self._spawn(self._answer(_encode(answer)))

    def close(self) -> None:
        """Nobody waits any more."""
        for task in list(self._tasks):
            task.cancel()

    async def _make(self, dispatch: WorkerDispatchMessage, call: FrameCall) -> None:
        message = CallMessage(
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
        try:
            await self._bus().client.publish(self._letters.calls, _encode(message))
        except Error as error:
            self.answer(_refusal(call, f"the call could not be made: {type(error).__name__}"))

    async def _answer(self, body: bytes) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._framework.ask("POST", ANSWER_PATH, body)
        except (NodeError, TimeoutError) as error:
            _log.info("answer_unheard", worker=self._letters.worker, error=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refusal(call: FrameCall, error: str) -> CallAnswer:
    return CallAnswer(
        call=call.call,
        invocationID="",
        state=State.FAILED,
        statusCode=502,
        failureClass=FailureClass.DISPATCH_ERROR,
        error=error,
    )
