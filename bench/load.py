"""A lean HTTP/1.1 load generator in a process of its own, so that the server and not the client is the limit."""

import asyncio
import json
import sys
import time

import uvloop


class Connection(asyncio.Protocol):
    """Sends the same request again as soon as the answer is complete."""

    def __init__(self, request: bytes, deadline: float, counts: dict[str, int]) -> None:
        self._request = request
        self._deadline = deadline
        self._counts = counts
        self._buffer = b""
        self._missing = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start."""
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count a whole answer, then ask again until time is up."""
        if self._missing:
            self._missing -= len(data)
        else:
            self._buffer += data
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            self._missing = _content_length(head) - len(rest)
            self._counts["good" if head.startswith(b"HTTP/1.1 2") else "bad"] += 1
            self._buffer = b""
        if self._missing <= 0:
            self._missing = 0
            if time.perf_counter() < self._deadline:
                self._transport.write(self._request)
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Over."""
        if not self.done.done():
            self.done.set_result(None)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _run(host: str, port: int, path: str, headers: dict[str, str], connections: int, seconds: float) -> None:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}:{port}", *(f"{name}: {value}" for name, value in headers.items())]
    request = ("\r\n".join(lines) + "\r\n\r\n").encode()
    counts = {"good": 0, "bad": 0}
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    deadline = began + seconds
    protocols = [
        (await loop.create_connection(lambda: Connection(request, deadline, counts), host, port))[1]
        for _ in range(connections)
    ]
    await asyncio.wait([protocol.done for protocol in protocols], timeout=seconds + 10)
    print(json.dumps({**counts, "per_s": counts["good"] / (time.perf_counter() - began)}))


async def requests_per_s(
    host: str, port: int, path: str, headers: dict[str, str], *, connections: int = 32, seconds: float = 4
) -> float:
    """Run the load in a child process; answers a second. Any answer that is not 2xx is a failure of the measurement."""
    arguments = json.dumps([host, port, path, headers, connections, seconds])
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load", arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    counts = json.loads(out)
    if counts["bad"]:
        raise RuntimeError(f"{counts['bad']} of the answers from {path} were not 2xx")
    return counts["per_s"]


if __name__ == "__main__":
    uvloop.run(_run(*json.loads(sys.argv[1])))
