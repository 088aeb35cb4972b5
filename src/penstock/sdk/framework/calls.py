"""Calls of other functions from inside a unit: a frame goes out with the invocation's answer, the answer comes as a
request."""

import asyncio
import concurrent.futures
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, cast

from penstock.sdk.framework.exchange import Exchange
from penstock.sdk.framework.objects import InsideObjects
from penstock.sdk.functions import invocation
from penstock.sdk.functions.errors import FunctionCancelled, FunctionError, ResultTimeout
from penstock.sdk.functions.transport import Answer
from penstock.sdk.functions.values import Payload, dumps

Future = concurrent.futures.Future[Answer]

#: Calls of one `map` that are under way at once.
_WINDOW = 16
_WAIT_S_MAX = 24 * 3600.0


class Inside:
    """The way of calls in a unit."""

    def __init__(self) -> None:
        self._loop_thread = threading.get_ident()
        self._waiting: dict[str, tuple[Exchange, Future]] = {}
        self._objects = InsideObjects()

    def call(self, function: str, payload: Payload, timeout_s: float | None) -> Answer:
        """Block this thread until the other function has ended."""
        return self._result(self._send(function, payload, "sync", timeout_s))

    async def call_async(self, function: str, payload: Payload, timeout_s: float | None) -> Answer:
        """The same in code that runs on the loop."""
        return await asyncio.wrap_future(self._send(function, payload, "sync", timeout_s))

    def spawn(self, function: str, payload: Payload) -> str:
        """Leave it to itself; the id comes as soon as it is accepted."""
        return self._result(self._send(function, payload, "async", None)).invocation_id

    def map(self, function: str, payloads: Iterable[Payload], *, ordered: bool) -> Iterator[Answer]:
        """Some at a time, always in order: a window of them is under way."""
        del ordered
        under_way: deque[Future] = deque()
        for payload in payloads:
            if len(under_way) >= _WINDOW:
                yield self._result(under_way.popleft())
            under_way.append(self._send(function, payload, "sync", None))
        while under_way:
            yield self._result(under_way.popleft())

    def wait(self, invocation_id: str, timeout_s: float | None) -> Answer:  # noqa: ARG002 - as elsewhere
        """Not from here."""
        raise FunctionError(
            f"inside a function nobody can wait for {invocation_id}: use remote(), or map() for many at once"
        )

    def status(self, invocation_id: str) -> str:
        """Not from here."""
        raise FunctionError(f"inside a function the state of {invocation_id} is not known")

    def cancel(self, invocation_id: str) -> None:
        """Not from here."""
        raise FunctionError(f"inside a function {invocation_id} cannot be cancelled")

    def stream(self, function: str, payload: Payload) -> Iterator[Any]:
        """All chunks at the end: what a generator yields is its result for callers who do not follow."""
        ended = self.call(function, payload, None)
        if ended.state == "succeeded" and isinstance(ended.body, list):
            yield from cast("list[Any]", ended.body)
        yield ended

    def objects(self) -> InsideObjects:
        """The way to the project's objects."""
        return self._objects

    def answered(self, message: dict[str, Any]) -> bool:
        """The sidecar brings an answer; whether anybody waits for it."""
        found = self._waiting.pop(str(message.get("call")), None)
        if found is None:
            return self._objects.answered(message)
        future = found[1]
        if future.set_running_or_notify_cancel():
            future.set_result(_answer(message))
        return True

    def forget(self, exchange: Exchange) -> None:
        """The invocation is over or not wanted: whoever waits in it for another one need not."""
        self._objects.forget(exchange)
        # A copy: other threads make calls meanwhile.
        for call, (owner, future) in list(self._waiting.items()):
            if owner is not exchange or self._waiting.pop(call, None) is None:
                continue
            if future.set_running_or_notify_cancel():
                future.set_exception(FunctionCancelled("the invocation that made this call was cancelled or has ended"))

    def _send(self, function: str, payload: Payload, mode: str, timeout_s: float | None) -> Future:
        exchange = invocation.running()
        if not isinstance(exchange, Exchange):
            raise FunctionError("only code that runs for an invocation can call other functions here")
        if exchange.over or exchange.cancelled:
            raise FunctionCancelled("the invocation that makes this call was cancelled or has ended")
        call, future = os.urandom(8).hex(), Future()
        self._waiting[call] = (exchange, future)
        head = dumps({"call": call, "function": function, "mode": mode, "contentType": payload.content_type})
        wait = f',"timeoutSeconds":{timeout_s:.3f}'.encode() if timeout_s else b""
        exchange.say(b'{"call":' + head[:-1] + b',"payload":' + payload.text + wait + b"}}")
        return future

    def _result(self, future: Future) -> Answer:
        if threading.get_ident() == self._loop_thread:
            raise FunctionError("this would block the event loop: use `await f.remote.aio(…)` in asynchronous code")
        running = invocation.running()
        limit_s = running.invocation.timeout_s if running is not None else 0
        try:
            return future.result(min(limit_s or _WAIT_S_MAX, _WAIT_S_MAX))
        except concurrent.futures.TimeoutError:
            raise ResultTimeout("the call took as long as this invocation itself may take") from None


def _answer(message: dict[str, Any]) -> Answer:
    return Answer(
        invocation_id=str(message.get("invocationID", "")),
        state=str(message.get("state", "")),
        content_type=str(message.get("contentType") or "application/json"),
        body=message.get("body"),
        encoding=str(message.get("encoding", "")),
        failure_class=str(message.get("failureClass") or ""),
        error=str(message.get("error", "")),
        error_type=str(message.get("errorType", "")),
        traceback=str(message.get("traceback", "")),
    )
