"""WebSockets (RFC 6455) that carry tunnels: whole binary messages, read in place and written without a task.

aiohttp's own WebSocket copies each message five times and wakes a task for it, which is a third of what a tunnel costs.
This one joins a message once, and shows it to its receiver in the buffer where TLS decrypted it. It does no fragments,
no text and no extensions. Inside TLS between our own processes a mask protects nothing: the dialling end masks with
zeros.
"""

import asyncio
import base64
import hashlib
import os
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from aiohttp import web
from aiohttp.http_websocket import WS_KEY

from penstock.kit.telemetry import logger

_log = logger(__name__)

#: A gateway holds a tunnel of every node, and most are idle: the buffer is large only while much comes.
_BUFFER_BYTES: Final = 192 << 10
_IDLE_BUFFER_BYTES: Final = 4 << 10
_HEAD_BYTES_MAX: Final = 14
_ANSWER_BYTES_MAX: Final = 16 << 10
_UNSENT_BYTES_MAX: Final = 256 << 10
_HEARTBEAT_S: Final = 10.0
_CLOSE_S: Final = 2.0
_BINARY: Final = 0x2
_CLOSE: Final = 0x8
_PING: Final = 0x9
_PONG: Final = 0xA
_FINAL: Final = 0x80
_MASKED: Final = 0x80
_KEY: Final = b"sec-websocket-accept"
_NO_MASK: Final = b"\0\0\0\0"
NORMAL: Final = 1000
PROTOCOL_ERROR: Final = 1002
LOST: Final = 1006
TOO_BIG: Final = 1009
INTERNAL: Final = 1011
REFUSED: Final = 4400


class Violation(Exception):
    """The other side does not keep to the protocol; the socket closes with this code."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Receiver(Protocol):
    """Where messages go. Called from the loop: must not block."""

    def message(self, data: memoryview) -> None:
        """A whole message, valid during this call only."""
        ...

    def writable(self) -> None:
        """What was unsent has left."""
        ...

    def lost(self) -> None:
        """The socket is gone."""
        ...


class TunnelSocket(asyncio.BufferedProtocol):
    """One end of a WebSocket after its handshake."""

    def __init__(
        self, *, dialled: bool, message_bytes_max: int, lost: Callable[[Exception | None], None] | None = None
    ) -> None:
        self.close_code = 0
        self.full = False
        self._dialled = dialled
        self._message_bytes_max = message_bytes_max
        self._lost = lost
        self._receiver: Receiver | None = None
        self._transport = cast("asyncio.Transport", None)
        self._buffer = memoryview(bytearray(_IDLE_BUFFER_BYTES))
        self._busy = False
        self._begin = 0
        self._end = 0
        self._closing = False
        self._heard = True
        self._timer: asyncio.TimerHandle | None = None
        self._shaking: tuple[asyncio.Future[None], bytes] | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def adopt(self, transport: asyncio.Transport, early: bytes = b"") -> None:
        """Take an upgraded connection over, with what was read beyond the handshake."""
        transport.set_protocol(self)
        self.connection_made(transport)
        self._make_room(len(early) + 1)
        self._buffer[: len(early)] = early
        self._end = len(early)

    async def shake_hands(self, host: str, path: str) -> None:
        """Ask for the upgrade and wait for the answer; ConnectionRefusedError when it is another."""
        key = base64.b64encode(os.urandom(16)).decode()
        self._shaking = (asyncio.get_running_loop().create_future(), _answer(key))
        self._transport.write(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
        )
        await self._shaking[0]
        self._shaking = None

    def abort(self) -> None:
        """End at once."""
        self._transport.abort()

    def receive(self, receiver: Receiver) -> None:
        """From now on messages go to `receiver`."""
        self._receiver = receiver
        self._parse()

    def get_extra_info(self, name: str) -> Any:
        """Of the transport, such as the peer's certificate."""
        return self._transport.get_extra_info(name)

    def send(self, parts: Sequence[bytes | memoryview], size: int) -> None:
        """Send a message of so many bytes. When `full` says so, wait for `Receiver.writable`."""
        if not self._closing:
            self._transport.write(b"".join((self._frame(_BINARY, size), *parts)))

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Say why, and end when the other side has answered or has had its time."""
        if self._closing or self._transport.is_closing():
            return
        self._closing = True
        self.close_code = self.close_code or code
        payload = code.to_bytes(2, "big") + reason.encode()[:120]
        self._transport.write(self._frame(_CLOSE, len(payload)) + payload)
        self._restart_timer(_CLOSE_S, self._transport.abort)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is ours."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES_MAX)
        self._restart_timer(_HEARTBEAT_S, self._beat)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Where to read to."""
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """So much was read."""
        self._end += nbytes
        self._heard = True
        if self._end == len(self._buffer) < _BUFFER_BYTES:
            self._resize(_BUFFER_BYTES)
        self._busy = self._busy or nbytes > _IDLE_BUFFER_BYTES // 2
        if self._receiver is not None:
            self._parse()
        elif self._shaking is not None:
            self._parse_answer(*self._shaking)

    def pause_writing(self) -> None:
        """Much is unsent."""
        self.full = True

    def resume_writing(self) -> None:
        """Little is unsent."""
        self.full = False
        if self._receiver is not None:
            self._receiver.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        """Gone."""
        self._closing = True
        self.close_code = self.close_code or LOST
        if self._timer is not None:
            self._timer.cancel()
        if self._receiver is not None:
            self._receiver.lost()
        if self._shaking is not None and not self._shaking[0].done():
            self._shaking[0].set_exception(ConnectionResetError("closed during the handshake"))
        if not self.closed.done():
            self.closed.set_result(None)
        if self._lost is not None:
            self._lost(exc)

    def _parse_answer(self, shaken: "asyncio.Future[None]", expected: bytes) -> None:
        held = bytes(self._buffer[: self._end])
        head, found, _ = held.partition(b"\r\n\r\n")
        if shaken.done() or not (found or len(held) > _ANSWER_BYTES_MAX):
            return
        status, *lines = head.split(b"\r\n")
        answers = [value.strip() for name, _, value in (line.partition(b":") for line in lines) if name.lower() == _KEY]
        if status.startswith(b"HTTP/1.1 101") and answers == [expected]:
            self._begin = len(head) + len(found)
            shaken.set_result(None)
        else:
            refused = ConnectionRefusedError(f"no WebSocket there: {status[:60].decode('latin-1')}")
            shaken.set_exception(refused)

    def _parse(self) -> None:
        try:
            while self._parse_frame():
                pass
        except Violation as error:
            _log.warning("websocket_violation", detail=str(error))
            self._end = self._begin = 0
            self.close(error.code, str(error))

    def _parse_frame(self) -> bool:
        """Handle one frame; false when the rest of it has not come yet."""
        held = self._end - self._begin
        if held < 2:
            return self._make_room(_HEAD_BYTES_MAX)
        first, second = self._buffer[self._begin], self._buffer[self._begin + 1]
        head, size = 2, second & 0x7F
        if size >= 126:
            head = 4 if size == 126 else 10
            if held < head:
                return self._make_room(_HEAD_BYTES_MAX)
            size = int.from_bytes(self._buffer[self._begin + 2 : self._begin + head], "big")
        if bool(second & _MASKED) is self._dialled:
            raise Violation(PROTOCOL_ERROR, "a client masks, and a server does not")
        if size > self._message_bytes_max:
            raise Violation(TOO_BIG, f"a message may have {self._message_bytes_max} bytes")
        head += 0 if self._dialled else 4
        if held < head + size:
            return self._make_room(head + size)
        start = self._begin + head
        payload = self._buffer[start : start + size]
        if not self._dialled and (mask := bytes(self._buffer[start - 4 : start])) != _NO_MASK:
            _unmask(mask, payload)
        self._begin = start + size
        self._handle(first, payload)
        return True

    def _make_room(self, size: int) -> bool:
        """Have room for a frame of this size from where the present one begins. Always false: more must be read."""
        held = self._end - self._begin
        if (self._begin and self._begin + size > len(self._buffer)) or not held:
            self._buffer[:held] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, held
        if size > len(self._buffer):
            self._resize(max(size, _BUFFER_BYTES))
        return False

    def _resize(self, size: int) -> None:
        other = memoryview(bytearray(size))
        other[: self._end] = self._buffer[: self._end]
        self._buffer = other

    def _handle(self, first: int, payload: memoryview) -> None:
        if first == _FINAL | _BINARY:
            if not self._closing and self._receiver is not None:
                self._receiver.message(payload)
        elif first == _FINAL | _PING and len(payload) < 126:
            if not self.full:
                self._transport.write(self._frame(_PONG, len(payload)) + bytes(payload))
        elif first == _FINAL | _CLOSE:
            code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else NORMAL
            self.close_code = self.close_code or code
            self.close(code)
            self._transport.close()
        elif first != _FINAL | _PONG:
            raise Violation(REFUSED, "only whole binary messages are understood")

    def _frame(self, opcode: int, size: int) -> bytes:
        """A frame's head."""
        mask = _MASKED if self._dialled else 0
        if size < 126:
            head = bytes((_FINAL | opcode, mask | size))
        elif size < 65536:
            head = struct.pack(">BBH", _FINAL | opcode, mask | 126, size)
        else:
            head = struct.pack(">BBQ", _FINAL | opcode, mask | 127, size)
        return head + _NO_MASK if self._dialled else head

    def _beat(self) -> None:
        """Ask for a sign of life; one that was not answered by the next time is the end."""
        if not self._heard:
            self._transport.abort()
            return
        if not self._busy and self._end == 0 and len(self._buffer) > _IDLE_BUFFER_BYTES:
            self._resize(_IDLE_BUFFER_BYTES)
        self._heard = self._busy = False
        self._transport.write(self._frame(_PING, 0))
        self._restart_timer(_HEARTBEAT_S, self._beat)

    def _restart_timer(self, seconds: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, call)


def _unmask(mask: bytes, payload: memoryview) -> None:
    """For clients other than ours, in place."""
    size = len(payload)
    key = int.from_bytes(mask * (size // 4 + 1), "big") >> (8 * ((size // 4 + 1) * 4 - size))
    payload[:] = (int.from_bytes(payload, "big") ^ key).to_bytes(size, "big")


class _Kept:
    """A parser, for aiohttp's server, that keeps what comes after the handshake."""

    def __init__(self) -> None:
        self.data = b""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Keep."""
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """Nothing more comes."""


def accept(request: web.BaseRequest, *, message_bytes_max: int) -> TunnelSocket | None:
    """Answer the handshake and take the connection over; none when it is no handshake."""
    headers, transport, handler = request.headers, request.transport, request.protocol
    key = headers.get("Sec-WebSocket-Key", "")
    wanted = headers.get("Upgrade", "").lower() == "websocket" and headers.get("Sec-WebSocket-Version") == "13"
    if transport is None or not wanted or len(key) != 24:
        return None
    kept = _Kept()
    handler.set_parser(kept)  # pyright: ignore[reportArgumentType]
    transport.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: %b\r\n\r\n" % _answer(key)
    )
    socket = TunnelSocket(dialled=False, message_bytes_max=message_bytes_max, lost=handler.connection_lost)
    socket.adopt(transport, kept.data)
    return socket


def _answer(key: str) -> bytes:
    return base64.b64encode(hashlib.sha1(key.encode() + WS_KEY, usedforsecurity=False).digest())


async def dial(host: str, port: int, path: str, *, tls: ssl.SSLContext, message_bytes_max: int) -> TunnelSocket:
    """Connect and shake hands, or OSError. Whose certificate it is (`peercert`) is for the caller to check."""
    socket = TunnelSocket(dialled=True, message_bytes_max=message_bytes_max)
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: socket, host, port, ssl=tls, server_hostname=host)
    try:
        await socket.shake_hands(f"{host}:{port}", path)
    except BaseException:
        socket.abort()
        raise
    return socket
