"""One unit's framework, spoken to over its socket: is it well, do this, stop that.

Connections are kept for a moment and used again. Answers are read as they come: what a handler says before its end is
passed on at once, the reply is what ends an invocation.
"""

import asyncio
import mmap
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias, TypeVar

import msgspec

from penstock.node.sidecar.errors import BrokenAnswer, LostConnection, Refusal, Unready
from penstock.node.sidecar.http1 import Connection, Head
from penstock.node.sidecar.sockets import FrameworkSocket
from penstock.node.sidecar.spool import Spool
from penstock.wire.serverless import FRAMES, Frame, FrameworkReply
from penstock.wire.unreadable import UNREADABLE

T = TypeVar("T")
Hear: TypeAlias = Callable[[Frame], Awaitable[None]]

_OK: Final = 200
_UNAVAILABLE: Final = 503
_SUCCESS: Final = range(200, 300)
#: Shorter than any server's own patience with an idle connection, so that it does not close while we send.
_IDLE_S: Final = 2.0
_IDLE_MAX: Final = 64
_BUSY_S: Final = 1.0
_BUSY_AGAIN_S: Final = 0.005
_EXPLANATION_CHARACTERS_MAX: Final = 16 << 10
_SMALL_BYTES_MAX: Final = 64 << 10
#: Above this, all but a reply's body must be small: it becomes objects in the memory that all units share.
_LARGE_BYTES: Final = 4 << 20
_AROUND_BYTES_MAX: Final = 1 << 20
_INTERNAL: Final = 500
#: The code of a framework that says itself that it is of no use.
BROKEN: Final = "broken"
#: And of one that says that it takes nothing now.
BUSY: Final = "busy"
_reply: Final = msgspec.json.Decoder(FrameworkReply)
_frame: Final = msgspec.json.Decoder(Frame)


class Framework:
    """Owns the way to the socket and all connections on it."""

    def __init__(self, way: FrameworkSocket) -> None:
        self._way = way
        self._idle: list[tuple[Connection, float]] = []
        self._open: set[Connection] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End all connections, whatever is under way on them; once is enough."""
        if self._closed:
            return
        self._closed = True
        for connection in list(self._open):
            self._drop(connection)
        self._idle.clear()
        self._way.close()

    async def check_health(self, path: str, timeout_s: float) -> None:
        """Return when it is well; otherwise Unready, Refusal, BrokenAnswer or LostConnection say why not."""
        try:
            async with asyncio.timeout(timeout_s):
                status, said = await self.ask("GET", path)
        except TimeoutError:
            raise Unready("health_silent", f"{path} did not answer within {timeout_s:g} s") from None
        if status != _OK:
            code = BROKEN if status == _INTERNAL else "health_status"
            raise Unready(code, f"{path} answered {status}" + (f": {said}" if said else ""))

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        """The status of a small exchange, and what came with it in words."""
        connection = await self._connection()
        try:
            head = await connection.send(method, path, body)
            return head.status, await _words(connection, head)
        finally:
            self._release(connection)

    async def invoke(self, path: str, body: bytes, hear: Hear, *, bytes_max: int) -> FrameworkReply:
        """The reply. `hear` gets every frame before it, one after the other."""
        connection = await self._connection()
        try:
            head = await connection.send("POST", path, body)
            if head.status not in _SUCCESS:
                said = await _words(connection, head)
                status = f"the framework answered with status {head.status}"
                code = BUSY if head.status == _UNAVAILABLE else "bad_status"
                raise BrokenAnswer(code, f"{status}: {said}" if said else status)
            if head.content_type == FRAMES:
                return await _read_frames(connection, head, hear, bytes_max)
            return await _read_reply(connection, head, bytes_max)
        finally:
            self._release(connection)

    async def listens(self) -> bool:
        """Whether it still takes connections."""
        if self._closed:
            return False
        try:
            (await self._dial()).close()
        except (Unready, Refusal):
            return False
        return True

    async def _connection(self) -> Connection:
        if self._closed:
            raise LostConnection("the unit ended", begun=False)
        now = self._loop.time()
        while self._idle:
            connection, since = self._idle.pop()
            if connection.reusable and now - since < _IDLE_S:
                return connection
            self._drop(connection)
        connection = await Connection.over(await self._dial())
        if self._closed:
            connection.close()
            raise LostConnection("the unit ended", begun=False)
        self._open.add(connection)
        return connection

    async def _dial(self) -> socket.socket:
        """Connect; a framework whose queue is full gets a moment."""
        until = self._loop.time() + _BUSY_S
        while True:
            try:
                return self._way.connect()
            except Unready as error:
                if error.code != "socket_busy" or self._loop.time() >= until:
                    raise
            await asyncio.sleep(_BUSY_AGAIN_S)

    def _release(self, connection: Connection) -> None:
        if connection in self._open and connection.reusable and len(self._idle) < _IDLE_MAX:
            self._idle.append((connection, self._loop.time()))
        else:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()


class _Trouble(msgspec.Struct, frozen=True):
    """How the platform's own framework says what is wrong."""

    error: str
    traceback: str = ""


_trouble: Final = msgspec.json.Decoder(_Trouble)


async def _words(connection: Connection, head: Head) -> str:
    """The beginning of what came: the tenant's own words for the tenant. Of more than a little the rest is not read,
    and the connection is then not used again."""
    text = bytearray()
    # The status has come: words that break off change nothing about it.
    with suppress(LostConnection, BrokenAnswer):
        async for piece in connection.body(head):
            text += piece
            if len(text) >= _SMALL_BYTES_MAX:
                break
    try:
        trouble = _trouble.decode(text)
        said = f"{trouble.error}\n{trouble.traceback}"
    except UNREADABLE:
        said = text.decode(errors="replace")
    return said.strip()[:_EXPLANATION_CHARACTERS_MAX]


async def _read_reply(connection: Connection, head: Head, bytes_max: int) -> FrameworkReply:
    spool = Spool(bytes_max)
    try:
        await _collect(connection, head, spool)
        if not spool:
            raise BrokenAnswer("empty", f"the framework's answer (status {head.status}) is empty")
        data = spool.take()
        if len(data) > _LARGE_BYTES:
            _check_around(data, _decoded(_outline, data))
        return _decoded(_reply, data)
    finally:
        spool.close()


async def _collect(connection: Connection, head: Head, spool: Spool) -> None:
    try:
        async for piece in connection.body(head):
            spool.add(piece)
    except LostConnection as error:
        raise LostConnection(error.detail, begun=True, finished=True) from error


async def _read_frames(connection: Connection, head: Head, hear: Hear, bytes_max: int) -> FrameworkReply:
    """Line by line until the reply; nothing counts after it."""
    line = Spool(bytes_max)
    try:
        async for piece in connection.body(head):
            *ends, rest = piece.split(b"\n")
            for end in ends:
                line.add(end)
                if line:
                    data = line.take()
                    if len(data) > _LARGE_BYTES:
                        _check_around(data, _decoded(_framed, data).reply)
                    frame = _decoded(_frame, data)
                    if frame.reply is not None:
                        return frame.reply
                    await hear(frame)
            line.add(rest)
    finally:
        line.close()
    raise LostConnection("the frames ended without a reply", begun=True)


class _Outline(msgspec.Struct, frozen=True):
    """A reply of which nothing but its body is looked at; all else is passed over."""

    body: msgspec.Raw = msgspec.Raw()


class _Framed(msgspec.Struct, frozen=True):
    reply: _Outline | None = None


_outline: Final = msgspec.json.Decoder(_Outline)
_framed: Final = msgspec.json.Decoder(_Framed)


def _check_around(data: bytes | mmap.mmap, outline: _Outline | None) -> None:
    if outline is None or len(data) - len(memoryview(outline.body)) > _AROUND_BYTES_MAX:
        raise BrokenAnswer("bad_answer", f"apart from a body, an answer has at most {_AROUND_BYTES_MAX} bytes")


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes | mmap.mmap) -> T:
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        raise BrokenAnswer("bad_answer", f"the framework's answer is not by the contract: {error}") from None
