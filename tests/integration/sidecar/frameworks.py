"""A framework of the test's own making: it listens on a Unix socket and answers as its script says, byte by byte."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.wire.serverless import SOCKET_NAME


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


Script = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def response(body: bytes, *, status: str = "200 OK", content_type: str = "application/json", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{extra}\r\n"
    return head.encode() + body


def replies(reply: Any) -> Script:
    """Answers with this JSON reply."""
    return says(response(reply if isinstance(reply, bytes) else msgspec.json.encode(reply)))


def says(raw: bytes, *, close: bool = False) -> Script:
    """Answers with these bytes."""

    async def script(_: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        if close:
            writer.close()

    return script


def frames(*lines: Any) -> Script:
    body = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    return says(response(body, content_type="application/x-ndjson"))


@dataclass
class ScriptedFramework:
    """`invoke` is the script of POST /invoke; `health` that of GET /healthz."""

    folder: Path
    invoke: Script = field(default_factory=lambda: replies({"body": "done"}))
    health: Script = field(default_factory=lambda: says(response(b"")))
    mode: int = 0o660
    name: str = SOCKET_NAME
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        path = self.folder / self.name
        self._server = await asyncio.start_unix_server(self._serve, path, limit=64 << 20)
        path.chmod(self.mode)

    async def stop(self) -> None:
        """Like a process that is killed: connections break, nobody listens."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def invokes(self) -> list[Request]:
        return [request for request in self.requests if request.path == "/invoke"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._answer(await _read(reader), writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        self.requests.append(request)
        if request.path == "/invoke":
            await self.invoke(request, writer)
        elif request.path == "/healthz":
            await self.health(request, writer)
        elif request.path == "/answer":
            writer.write(response(b""))
        else:
            writer.write(response(b"", status="404 Not Found"))


async def _read(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.split("\r\n")
    length = next((int(line.split(":")[1]) for line in lines if line.lower().startswith("content-length")), 0)
    method, path, _ = first.split(" ")
    return Request(method, path, await reader.readexactly(length))
