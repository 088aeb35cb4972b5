"""The same load for all who are called over HTTP: plain sockets, keep-alive, one request at a time on each."""

import asyncio
import json
import statistics
import sys
import time
from urllib.parse import urlsplit

CONCURRENCY = 16
SINGLES = 300
SECONDS = 4.0
ROUNDS = 3


class Connection:
    """One keep-alive connection."""

    def __init__(self, url: str, headers: dict[str, str], body: bytes) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"POST {target} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._request = "\r\n".join([*lines, "", ""]).encode() + body

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address)

    async def ask(self) -> None:
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 202")):
            raise RuntimeError(head.decode(errors="replace"))
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            while (size := int(await self._reader.readline(), 16)) > 0:
                await self._reader.readexactly(size + 2)
            await self._reader.readexactly(2)
            return
        at = lower.index(b"content-length:") + 15
        await self._reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))

    def close(self) -> None:
        self._writer.close()


async def singles(connection: Connection, number: int = SINGLES) -> list[float]:
    samples: list[float] = []
    for _ in range(number):
        began = time.perf_counter()
        await connection.ask()
        samples.append((time.perf_counter() - began) * 1000)
    return samples


async def crowd(connections: list[Connection], seconds: float = SECONDS) -> float:
    ends = time.perf_counter() + seconds
    done = 0

    async def work(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < ends:
            await connection.ask()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(work(connection) for connection in connections))
    return done / (time.perf_counter() - began)


async def measure(url: str, headers: dict[str, str] | None = None, body: bytes = b"{}") -> dict[str, float]:
    given = {"Content-Type": "application/json", **(headers or {})}
    connections = [Connection(url, given, body) for _ in range(CONCURRENCY)]
    for connection in connections:
        await connection.open()
    await singles(connections[0], 50)
    latencies = [statistics.median(await singles(connections[0])) for _ in range(ROUNDS)]
    rates = [await crowd(connections) for _ in range(ROUNDS)]
    for connection in connections:
        connection.close()
    return {"p50_ms": statistics.median(latencies), "per_s": statistics.median(rates)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(sys.argv[1]))))
