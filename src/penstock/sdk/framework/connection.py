"""HTTP/1.1 on the framework's socket: one request at a time, with a Content-Length, kept alive.

Whatever is not such a request is answered with a status of 400 and more, and the connection closed.
"""

import asyncio
import json
from collections.abc import Callable

_HEAD_BYTES_MAX = 16 << 10
#: The largest payload of the platform, as base64 and with all around it.
BODY_BYTES_MAX = 48 << 20
_REASONS = {200: "OK", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}
_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection of the sidecar's. `serve` is called with each whole request, `lost` when nobody listens any more.
    `resumed` is called when there is room to write."""

    FRAMES_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"

    def __init__(self, serve: "Callable[[Connection, str, str, bytes], None]") -> None:
        self._serve = serve
        self.lost: Callable[[], None] | None = None
        self.resumed: Callable[[], None] | None = None
        self.paused = False
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head: tuple[str, str] | None = None
        self._wanted = 0
        self._busy = False
        self._drained: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio calls it
        """It is closed; what runs for it is not wanted any more."""
        self._transport = None
        self.resume_writing()
        if self.lost is not None:
            self.lost()

    def pause_writing(self) -> None:
        """The sidecar reads too slowly."""
        self.paused = True

    def resume_writing(self) -> None:
        """It has caught up."""
        self.paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self.resumed is not None:
            self.resumed()

    async def drained(self) -> None:
        """When there is room for more."""
        if self.paused:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def data_received(self, data: bytes) -> None:
        """More of a request, or of the next one, which then waits for its turn."""
        self._buffer += data
        if not self._busy:
            self._next()
        elif len(self._buffer) > BODY_BYTES_MAX:
            self._refuse(413, "too much is sent ahead")

    def _next(self) -> None:
        if self._head is None and not self._read_head():
            return
        if self._head is None or len(self._buffer) < self._wanted:
            return
        (method, path), body = self._head, bytes(self._buffer[: self._wanted])
        del self._buffer[: self._wanted]
        self._head, self._busy = None, True
        self._serve(self, method, path, body)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if max(end, 0 if end >= 0 else len(self._buffer)) > _HEAD_BYTES_MAX:
            self._refuse(431, f"the head is longer than {_HEAD_BYTES_MAX} bytes")
            return False
        if end < 0:
            return False
        line, *fields = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        parts = line.split(" ")
        if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
            self._refuse(400, "this is not a request of HTTP/1.1")
            return False
        return self._read_fields(parts[0], parts[1], fields)

    def _read_fields(self, method: str, path: str, fields: list[str]) -> bool:
        length = "0"
        for field in fields:
            name, _, value = field.partition(":")
            lowered = name.lower()
            if lowered == "content-length":
                length = value.strip()
            elif lowered == "transfer-encoding":
                self._refuse(411, "send a Content-Length")
                return False
        if not (length.isascii() and length.isdecimal()):
            self._refuse(400, "the Content-Length is not a number")
        elif len(length) > 10 or int(length) > BODY_BYTES_MAX:
            self._refuse(413, f"the body is longer than {BODY_BYTES_MAX} bytes")
        else:
            self._head, self._wanted = (method, path.partition("?")[0]), int(length)
            return True
        return False

    def write(self, data: bytes) -> None:
        """Send this, if anybody listens."""
        if data and self._transport is not None:
            self._transport.write(data)

    def answer(self, status: int, body: bytes) -> None:
        """Answer with JSON and take the next request."""
        if status == 200:
            self.answered(_OK % len(body) + body)
            return
        head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Refused')}\r\nContent-Type: application/json\r\n"
        self.answered(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def answered(self, data: bytes) -> None:
        """The last of an answer."""
        self.write(data)
        self.lost = self.resumed = None
        self._busy = False
        if self._buffer:
            self._next()

    def _refuse(self, status: int, why: str) -> None:
        body = json.dumps({"error": why}).encode()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._buffer.clear()
        self._busy = True
        if self._transport is not None:
            self._transport.close()
