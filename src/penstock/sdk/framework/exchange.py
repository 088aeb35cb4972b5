"""One invocation on its way: what it says, how it ends, how it is cancelled.

Until the handler says something, nothing is written; if it never does, the whole answer is one JSON object in one
write. Otherwise the answer is lines of frames, the last with the reply. What waits to be written is bounded: threads
wait for room, and on the loop, where nothing may wait, lines of output are dropped and counted.
"""

import asyncio
import json
import threading
from typing import Any, Protocol

from penstock.sdk.framework import failures
from penstock.sdk.framework.connection import Connection
from penstock.sdk.framework.threads import Interrupt
from penstock.sdk.functions import values
from penstock.sdk.functions.invocation import Invocation

CANCEL_GRACE_S = 1.5
CANCELLED = b'{"statusCode":499,"error":"cancelled","errorType":"InvocationCancelled"}'
_UNSENT_BYTES_MAX = 1 << 20
_LINE_CHARS_MAX = 16 << 10
#: A thread that waits for room looks this often whether it still has to.
_ROOM_S = 1.0


class Owner(Protocol):
    """Whoever runs the handlers."""

    def ended(self, exchange: "Exchange") -> None:
        """It was answered."""
        ...

    def overdue(self, exchange: "Exchange") -> None:
        """It was cancelled, and its handler goes on."""
        ...

    def returned(self, exchange: "Exchange") -> None:
        """Its handler ended after it was answered."""
        ...


class Exchange:
    """The sidecar's request and our answer to it."""

    def __init__(self, connection: Connection, request: dict[str, Any], owner: Owner) -> None:
        self.invocation = _invocation(request)
        self.content_type = self.invocation.content_type
        self.payload = request.get("payload")
        self.over = False
        self.cancelled = False
        self.interrupt = Interrupt()
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._lock = threading.RLock()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._scheduled = False
        self._started = False
        self._dropped = 0
        self._partial: dict[str, str] = {}
        self._room = threading.Event()
        self._room.set()

    def progress(self, report: Any) -> None:
        """How far the handler is."""
        try:
            text = json.dumps(report, default=str, allow_nan=False)
        except ValueError:
            # A number that JSON does not have.
            text = json.dumps(str(report))
        self.say(b'{"progress":' + text.encode() + b"}")

    def write(self, stream: str, text: str) -> None:
        """What the handler prints, line by line."""
        with self._lock:
            *lines, rest = (self._partial.pop(stream, "") + str(text)).split("\n")
            while len(rest) > _LINE_CHARS_MAX:
                lines.append(rest[:_LINE_CHARS_MAX])
                rest = rest[_LINE_CHARS_MAX:]
            if rest:
                self._partial[stream] = rest
        for line in lines:
            for start in range(0, len(line) or 1, _LINE_CHARS_MAX):
                self.say(_line(stream, line[start : start + _LINE_CHARS_MAX]), droppable=True)

    def say(self, frame: bytes, *, droppable: bool = False) -> None:
        """Send one frame, from whatever thread."""
        on_loop = threading.get_ident() == self._loop_thread
        with self._lock:
            if self.over:
                return
            if on_loop and droppable and (self._unsent_bytes > _UNSENT_BYTES_MAX or self._connection.paused):
                self._dropped += 1
                return
            self._unsent.append(frame)
            self._unsent_bytes += len(frame)
            if self._unsent_bytes > _UNSENT_BYTES_MAX or self._connection.paused:
                self._room.clear()
            scheduled, self._scheduled = self._scheduled, True
        if not scheduled:
            self._loop.call_soon_threadsafe(self._flush)
        if not on_loop:
            self._wait_for_room()

    def _wait_for_room(self) -> None:
        while not self.over and not self.cancelled and not self._room.wait(_ROOM_S):
            pass

    async def drained(self) -> None:
        """The same for what runs on the loop."""
        await asyncio.sleep(0)
        await self._connection.drained()

    def _flush(self) -> None:
        if not self.over:
            self._connection.write(self._pending())
        self.has_room()

    def has_room(self) -> None:
        """The connection takes more, or it does not matter any more."""
        if not self._connection.paused:
            self._room.set()

    def _pending(self, last: bytes = b"") -> bytes:
        with self._lock:
            frames, self._unsent, self._unsent_bytes, self._scheduled = self._unsent, [], 0, False
        content = b"".join(frame + b"\n" for frame in (*frames, last) if frame)
        if not content:
            return b""
        head = b"" if self._started else self._connection.FRAMES_HEAD
        self._started = True
        return head + b"%x\r\n%b\r\n" % (len(content), content)

    def finish(self, reply: bytes) -> None:
        """The end, on the loop. Only the first one counts."""
        if self.over:
            self._owner.returned(self)
            return
        with self._lock:
            for stream, rest in self._partial.items():
                self._unsent.append(_line(stream, rest))
            if self._dropped:
                self._unsent.append(_line("stderr", f"[{self._dropped} lines were dropped: they came too quickly]"))
            self.over = True
        self._room.set()
        if self._started or self._unsent:
            content = self._pending(b'{"reply":' + reply + b"}")
            self._connection.answered(content + b"0\r\n\r\n")
        else:
            self._connection.answer(200, reply)
        self._owner.ended(self)

    def finish_soon(self, reply: bytes) -> None:
        """The end, from another thread."""
        self._loop.call_soon_threadsafe(self.finish, reply)

    def cancel(self) -> None:
        """Ask the handler to end, and make sure that it does."""
        if self.over or self.cancelled:
            return
        self.cancelled = True
        self._room.set()
        if self.task is not None:
            self.task.cancel()
        else:
            self.interrupt.send()
        self._loop.call_later(CANCEL_GRACE_S, self._overdue)

    def _overdue(self) -> None:
        if not self.over:
            self._owner.overdue(self)


def _line(stream: str, line: str) -> bytes:
    return json.dumps({stream: failures.clean(line)}).encode()


def succeeded(value: Any, *, sdk: bool) -> bytes:
    """The reply with a result; a value that cannot be sent is the handler's failure."""
    try:
        content_type, body, encoding = values.encode_result(value, sdk=sdk)
    except Exception as error:  # noqa: BLE001 - a tenant's own class may fail in any way when it is pickled
        return failed(error, sdk=sdk)
    if content_type == values.JSON:
        return b'{"body":%b}' % body
    return b'{"contentType":"%b","encoding":"%b","body":%b}' % (content_type.encode(), encoding.encode(), body)


def failed(error: BaseException, *, sdk: bool, status: int = 500) -> bytes:
    """The reply with an exception. Callers who can open it get the exception itself."""
    reply: dict[str, Any] = {
        "statusCode": status,
        "error": failures.message(error) or type(error).__name__,
        "errorType": type(error).__name__,
        "traceback": failures.traceback(error),
    }
    exception = values.encode_exception(error) if sdk else None
    if exception:
        reply["body"] = {"exception": exception}
    return values.dumps(reply)


def _invocation(request: dict[str, Any]) -> Invocation:
    return Invocation(
        id=str(request.get("invocationID", "")),
        function=str(request.get("serverlessRequestID", "")),
        attempt=int(request.get("attempt") or 0),
        mode=str(request.get("mode", "")),
        timeout_s=float(request.get("timeoutSeconds") or 0),
        content_type=str(request.get("contentType") or values.JSON),
        worker=str(request.get("workerName", "")),
        headers=request.get("headers") or {},
        attributes=request.get("attributes") or {},
    )
