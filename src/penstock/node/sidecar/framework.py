"""One unit's framework, spoken to over its socket: is it well, do this, stop that.

Connections are kept for a moment and used again. Answers are read as they come: what a handler says before its end is
passed on at once, the reply is what ends an invocation.
"""

import asyncio
import mmap
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

import msgspec

from penstock.node.sidecar.errors import BrokenAnswer, LostConnection, Unready
from penstock.node.sidecar.http1 import Connection, Head
from penstock.node.sidecar.sockets import FrameworkSocket
from penstock.node.sidecar.spool import Spool
from penstock.wire.serverless import FRAMES, Frame, FrameworkReply

T = TypeVar("T")
Hear: TypeAlias = Callable[[Frame], Awaitable[None]]

_OK: Final = 200
_SUCCESS: Final = range(200, 300)
#: Shorter than any server's own patience with an idle connection, so that it does not close while we send.
_IDLE_S: Final = 2.0
_IDLE_MAX: Final = 64
_BUSY_S: Final = 1.0
_BUSY_AGAIN_S: Final = 0.005
_EXPLANATION_BYTES_MAX: Final = 4 << 10
_SMALL_BYTES_MAX: Final = 64 << 10
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
                status = await self.ask("GET", path)
        except TimeoutError:
            raise Unready("health_silent", f"{path} did not answer within {timeout_s:g} s") from None
        if status != _OK:
            raise Unready("health_status", f"{path} answered {status}")

    async def ask(self, method: str, path: str, body: bytes = b"") -> int:
        """The status of a small exchange; what comes with it is read and dropped."""
        connection = await self._connection()
        try:
            head = await connection.send(method, path, body)
            spool = Spool(_SMALL_BYTES_MAX)
            async for piece in connection.body(head):
                spool.add(piece)
        finally:
            self._release(connection)
        return head.status

    async def invoke(self, path: str, body: bytes, hear: Hear, *, bytes_max: int) -> FrameworkReply:
        """The reply. `hear` gets every frame before it, one after the other."""
        connection = await self._connection()
        try:
            head = await connection.send("POST", path, body)
            if head.status not in _SUCCESS:
                raise BrokenAnswer("bad_status", await _explanation(connection, head))
            if head.content_type == FRAMES:
                return await _read_frames(connection, head, hear, bytes_max)
            return await _read_reply(connection, head, bytes_max)
        finally:
            self._release(connection)

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


async def _explanation(connection: Connection, head: Head) -> str:
    """The status, and the beginning of what came with it: the tenant's own words for the tenant."""
    text = bytearray()
    async for piece in connection.body(head):
        text += piece
        if len(text) >= _EXPLANATION_BYTES_MAX:
            break
    said = text[:_EXPLANATION_BYTES_MAX].decode(errors="replace").strip()
    return f"the framework answered with status {head.status}" + (f": {said}" if said else "")


async def _read_reply(connection: Connection, head: Head, bytes_max: int) -> FrameworkReply:
    spool = Spool(bytes_max)
    try:
        async for piece in connection.body(head):
            spool.add(piece)
        if not spool:
            raise BrokenAnswer("empty", f"the framework's answer (status {head.status}) is empty")
        return _decoded(_reply, spool.take())
    finally:
        spool.close()


async def _read_frames(connection: Connection, head: Head, hear: Hear, bytes_max: int) -> FrameworkReply:
    """Line by line until the reply; nothing counts after it."""
    line = Spool(bytes_max)
    try:
        async for piece in connection.body(head):
            *ends, rest = piece.split(b"\n")
            for end in ends:
                line.add(end)
                if line:
                    frame = _decoded(_frame, line.take())
                    if frame.reply is not None:
                        return frame.reply
                    await hear(frame)
            line.add(rest)
    finally:
        line.close()
    raise LostConnection("the frames ended without a reply", begun=True)


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes | mmap.mmap) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BrokenAnswer("bad_answer", f"the framework's answer is not by the contract: {error}") from None
