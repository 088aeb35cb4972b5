"""Calls of functions over HTTP: through the gateway where the caller waits, through the api where it does not.

A call that the gateway answers before its end goes on; it is then waited for at the api. A call that may have arrived
is looked up by its id; only one that nobody knows is sent again, under the same id, so that there is still one.
"""

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Final

import msgspec

from penstock.sdk.blocking import BlockingExecutor
from penstock.sdk.client import Client
from penstock.sdk.commands import with_gateway
from penstock.sdk.errors import BadAnswer, Exhausted, NotFound, Unreachable
from penstock.sdk.functions import transport, values
from penstock.sdk.functions.errors import ResultTimeout
from penstock.sdk.functions.function import in_thread
from penstock.sdk.functions.transport import Answer
from penstock.sdk.functions.values import Payload
from penstock.sdk.protocol import Answer as Response
from penstock.sdk.protocol import Request, Steps, decode
from penstock.sdk.remoteobjects import OutsideObjects
from penstock.sdk.serverless import ENDED, function_name
from penstock.sdk.target import Target
from penstock.wire.rest import Invocation
from penstock.wire.unreadable import UNREADABLE

#: Longer than the gateway waits for an end before it answers that there is none yet.
_GATEWAY_S: Final = 90.0
_POLL_S: Final = 20
_MAP_POLL_S: Final = 5
#: Of one map: invocations under way, those who wait for them, and what one request may bring.
_WINDOW: Final = 1000
_WAITERS: Final = 16
_BATCH_ITEMS: Final = 200
_BATCH_BYTES: Final = 1 << 20
_ID: Final = "Penstock-Invocation-Id"
_WAIT: Final = "Penstock-Wait"
#: So much later than the wait an answer may come.
_ANSWER_S: Final = 2.0


def new_invocation_id() -> str:
    """A fresh id for a call."""
    return f"inv-{secrets.token_hex(16)}"


def connect(client: Client) -> "Outside":
    """From now on, functions are called by this client."""
    outside = Outside(client)
    transport.use(lambda: outside)
    return outside


class Outside:
    """The way of calls from anywhere but a unit."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._gateway: BlockingExecutor | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections to the gateway; the client's own are the client's business."""
        with self._lock:
            gateway, self._gateway = self._gateway, None
        if gateway is not None:
            gateway.close()

    def call(
        self, function: str, payload: Payload, timeout_s: float | None, *, invocation_id: str | None = None
    ) -> Answer:
        """Invoke and wait for the end, for `timeout_s` at most; ResultTimeout then."""
        chosen = invocation_id or new_invocation_id()
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            answer = self._sync(function, payload, chosen, until)
        except Unreachable as error:
            if not error.sent:
                raise
            if until is not None and time.monotonic() >= until:
                raise ResultTimeout(f"nothing was heard of {chosen} in time") from error
            # The call may have arrived.
            try:
                return self._wait(chosen, until)
            except NotFound:
                answer = self._sync(function, payload, chosen, until)
        ended = _ended(answer)
        return ended or self._wait(answer.headers.get(_ID.lower(), chosen), until)

    def _sync(self, function: str, payload: Payload, invocation_id: str, until: float | None) -> Response:
        """The gateway's answer: the end, or that it goes on when the wait is over."""
        name = function_name(function)
        if until is None:
            return self._executor().run(_exchange(name, payload, invocation_id))
        left_s = max(0.0, until - time.monotonic())
        # A connection of its own, which ends with the wait also if the gateway says nothing.
        executor = BlockingExecutor(self._executor().target, timeout_s=min(_GATEWAY_S, left_s + _ANSWER_S))
        try:
            return executor.run(_exchange(name, payload, invocation_id, wait_s=left_s))
        finally:
            executor.close()

    async def call_async(self, function: str, payload: Payload, timeout_s: float | None) -> Answer:
        """The same in a thread."""
        return await in_thread(self.call, function, payload, timeout_s)

    def spawn(self, function: str, payload: Payload) -> str:
        """Invoke and go on."""
        return self._accepted(function, payload, "async")

    def _accepted(self, function: str, payload: Payload, mode: str) -> str:
        ack = self._client.functions.invoke(function, payload.text, mode=mode, content_type=payload.content_type)
        return ack.invocationID

    def wait(self, invocation_id: str, timeout_s: float | None) -> Answer:
        """The end of an invocation."""
        return self._wait(invocation_id, None if timeout_s is None else time.monotonic() + timeout_s)

    def _wait(
        self,
        invocation_id: str,
        until: float | None,
        *,
        poll_s: int = _POLL_S,
        given_up: "threading.Event | None" = None,
    ) -> Answer:
        while given_up is None or not given_up.is_set():
            left_s = math.inf if until is None else max(0.0, until - time.monotonic())
            wait_s = poll_s if left_s >= poll_s else math.ceil(left_s)
            found = self._client.invocations.get(invocation_id, wait_s=wait_s)
            if found.state in ENDED:
                return self.answer(found)
            if left_s <= wait_s:
                why = f": {found.waiting_for}" if found.waiting_for else ""
                raise ResultTimeout(f"{invocation_id} is still {found.state}{why}")
        raise ResultTimeout(f"nobody waits for {invocation_id} any more")

    def answer(self, found: Invocation) -> Answer:
        """How an invocation ended; a large result is fetched."""
        body, encoding = found.body, found.encoding
        if found.result is not None:
            body, encoding = read_result(found.content_type, b"".join(self._client.invocations.result(found.id))), ""
        return Answer(
            invocation_id=found.id,
            state=found.state,
            content_type=found.content_type,
            body=body,
            encoding=encoding,
            failure_class=found.failure_class,
            error=found.error,
            error_type=found.error_type,
            traceback=found.traceback,
        )

    def objects(self) -> OutsideObjects:
        """The way to the project's objects."""
        return OutsideObjects(self._client)

    def status(self, invocation_id: str) -> str:
        """The state of an invocation."""
        return self._client.invocations.get(invocation_id).state

    def cancel(self, invocation_id: str) -> None:
        """It is not wanted any more."""
        self._client.invocations.cancel(invocation_id)

    def stream(self, function: str, payload: Payload) -> Iterator[Any]:
        """What a generator yields, then how it ended."""
        for said in self._client.invocations.follow(self._accepted(function, payload, "stream")):
            if isinstance(said, Invocation):
                yield self.answer(said)
            elif said.kind == "chunk":
                yield _value(said.text)

    def map(self, function: str, payloads: Iterable[Payload], *, ordered: bool) -> Iterator[Answer]:
        """Batches of invocations, with a bounded number under way."""
        waiters = ThreadPoolExecutor(_WAITERS, "penstock-map")
        # Threads that wait keep a program from ending.
        given_up = threading.Event()
        under_way: deque[Future[Answer]] = deque()
        try:
            for batch in _batches(payloads):
                while len(under_way) + len(batch) > _WINDOW:
                    yield _next(under_way, ordered=ordered)
                while not (made := self._queued(function, batch, patient=bool(under_way))):
                    yield _next(under_way, ordered=ordered)
                for each in made:
                    under_way.append(waiters.submit(self._wait, each, None, poll_s=_MAP_POLL_S, given_up=given_up))
            while under_way:
                yield _next(under_way, ordered=ordered)
        finally:
            given_up.set()
            waiters.shutdown(wait=False, cancel_futures=True)

    def _queued(self, function: str, batch: list[Payload], *, patient: bool) -> list[str]:
        """The ids of a batch; none when the queue is full, where what is under way will make room."""
        texts = [msgspec.Raw(item.text) for item in batch]
        try:
            return self._client.functions.map(function, texts, content_type=batch[0].content_type).invocations
        except Exhausted:
            if not patient:
                raise
            return []

    def _executor(self) -> BlockingExecutor:
        with self._lock:
            if self._gateway is None:
                executor = self._client.executor
                target = executor.target = executor.run(with_gateway(executor.target))
                base = Target.of(
                    str(target.gateway_url), target.key, project=target.project, allow_http=target.allow_http
                )
                self._gateway = BlockingExecutor(base, timeout_s=_GATEWAY_S)
            return self._gateway


def _exchange(function: str, payload: Payload, invocation_id: str, *, wait_s: float | None = None) -> Steps[Response]:
    headers = {"Content-Type": payload.content_type, "Accept": "*/*", _ID: invocation_id}
    if wait_s is not None:
        headers[_WAIT] = f"{min(wait_s, _GATEWAY_S):.3f}"
    return (yield Request(method="POST", path=f"/f/{function}?mode=sync", headers=headers, body=payload.text))


def _ended(answer: Response) -> Answer | None:
    """The result; None where the api has to be asked: it goes on, or it failed and more is to be known about it."""
    invocation_id = answer.headers.get(_ID.lower(), "")
    if answer.status == 202 or (answer.status >= 400 and invocation_id):
        return None
    if answer.status >= 300:
        decode(answer, type(None))
    content_type = answer.headers.get("content-type", values.JSON).partition(";")[0].strip()
    return Answer(invocation_id, "succeeded", content_type, read_result(content_type, answer.body))


def read_result(content_type: str, body: bytes) -> Any:
    """Raw bytes of a result as a value, or as the bytes that they are."""
    if content_type == values.JSON or (content_type == values.PICKLE and body.startswith(b'"')):
        return _value(body) if body else None
    return body.decode("utf-8", "replace") if content_type.startswith("text/") else body


def _batches(payloads: Iterable[Payload]) -> Iterator[list[Payload]]:
    """Of one content type each, and of bounded length."""
    batch: list[Payload] = []
    size = 0
    for payload in payloads:
        full = len(batch) >= _BATCH_ITEMS or size + len(payload.text) > _BATCH_BYTES
        if batch and (full or payload.content_type != batch[0].content_type):
            yield batch
            batch, size = [], 0
        batch.append(payload)
        size += len(payload.text)
    if batch:
        yield batch


def _next(under_way: "deque[Future[Answer]]", *, ordered: bool) -> Answer:
    if not ordered:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        first = done.pop()
        under_way.remove(first)
        return first.result()
    return under_way.popleft().result()


def _value(text: str | bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (UnicodeEncodeError, *UNREADABLE) as error:
        raise BadAnswer(f"what the function answered is not JSON: {error}") from error
