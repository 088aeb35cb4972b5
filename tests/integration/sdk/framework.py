"""A framework in a process of its own, made of the very files that a unit gets, and raw HTTP to its socket."""

import contextlib
import json
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.sdk import tenant

TENANTS = Path(__file__).parent / "tenants"
DEADLINE_S = 30.0


def install(folder: Path) -> Path:
    """The folder that the agent mounts."""
    for name, content in tenant.sources().items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder / tenant.ENTRY_NAME


class Framework:
    """One process and its socket."""

    def __init__(self, process: "subprocess.Popen[bytes]", path: Path) -> None:
        self.process = process
        self.path = path

    def connect(self) -> "Wire":
        """A connection, as soon as there is something to connect to."""
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                sock = socket.socket(socket.AF_UNIX)
                sock.settimeout(DEADLINE_S)
                sock.connect(str(self.path))
                return Wire(sock)
            except OSError:
                sock.close()
                assert self.process.poll() is None, self.output()
                assert time.monotonic() < until
                time.sleep(0.005)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """One request on a connection of its own."""
        with self.connect() as wire:
            wire.send(method, path, b"" if body is None else json.dumps(body).encode())
            return wire.receive()

    def invoke(self, payload: Any, **fields: Any) -> "Said":
        """An invocation to its end."""
        with self.connect() as wire:
            wire.invoke(payload, **fields)
            return wire.said()

    def call(self, method: str, *args: Any, **fields: Any) -> "Said":
        """A method of the kitchen, as the SDK calls it."""
        return self.invoke({"args": list(args), "kwargs": {}, "method": method, "accept": "pickle"}, **fields)

    def output(self) -> str:
        """What the process wrote, when it has ended."""
        return self.process.communicate(timeout=DEADLINE_S)[0].decode()

    def mode(self) -> int:
        """Of the socket."""
        return stat.S_IMODE(self.path.stat().st_mode)


class Said:
    """The frames of an answer, and its reply."""

    def __init__(self, frames: list[dict[str, Any]], reply: dict[str, Any]) -> None:
        self.frames = frames
        self.reply = reply

    @property
    def body(self) -> Any:
        """The result."""
        return self.reply.get("body")

    def of(self, kind: str) -> list[Any]:
        """All frames of a kind."""
        return [frame[kind] for frame in self.frames if kind in frame]


class Wire:
    """HTTP/1.1, byte by byte."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._sock.close()

    def raw(self, data: bytes) -> None:
        """Anything."""
        self._sock.sendall(data)

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """A request."""
        self.raw(f"{method} {path} HTTP/1.1\r\nHost: unit\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def invoke(self, payload: Any, **fields: Any) -> None:
        """A request as the sidecar makes it."""
        request = {
            "version": "v1",
            "invocationID": "inv-1",
            "serverlessRequestID": "kitchen",
            "workerName": "unit-kitchen-worker-1",
            "workerNamespace": "prj_default",
            "mode": "sync",
            "state": "running",
            "contentType": "application/json",
            "headers": {},
            "attributes": {},
            "payload": payload,
            "timeoutSeconds": 30.0,
            "dispatchedAt": "2026-01-01T00:00:00Z",
            "attempt": 1,
        }
        self.send("POST", "/invoke", json.dumps({**request, **fields}).encode())

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and fields of an answer."""
        status = self._file.readline()
        assert status, "the connection was closed"
        fields: dict[str, str] = {}
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            fields[name.lower()] = value.strip()
        return int(status.split()[1]), fields

    def receive(self) -> tuple[int, Any]:
        """A whole answer with a length."""
        status, fields = self.head()
        return status, json.loads(self._file.read(int(fields["content-length"])))

    def frames(self) -> Iterator[dict[str, Any]]:
        """The frames of an answer in chunks, as they come."""
        rest = b""
        while size := int(self._file.readline(), 16):
            *lines, rest = (rest + self._file.read(size)).split(b"\n")
            self._file.readline()
            yield from map(json.loads, lines)
        self._file.readline()
        assert not rest

    def said(self) -> Said:
        """An answer to an invocation, in either form."""
        status, fields = self.head()
        assert status == 200, (status, self._file.read(int(fields.get("content-length", 0))))
        if fields["content-type"] == "application/json":
            return Said([], json.loads(self._file.read(int(fields["content-length"]))))
        assert fields["content-type"] == "application/x-ndjson"
        *frames, last = self.frames()
        return Said(frames, last["reply"])

    def closed(self) -> bool:
        """Whether the other side ends it."""
        return self._file.read(1) == b""


@contextlib.contextmanager
def running(folder: Path, handler: str = "", *, code: Path = TENANTS, **variables: str) -> Iterator[Framework]:
    """Start one. `-S` and the empty environment leave it nothing but its own files and the standard library."""
    entry, path = install(folder / "opt"), folder / "framework.sock"
    environ = {
        tenant.SOCKET: str(path),
        tenant.CODE: str(code),
        "PYTHONDONTWRITEBYTECODE": "1",
        **({tenant.HANDLER: handler} if handler else {}),
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-S", str(entry)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield Framework(process, path)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)
