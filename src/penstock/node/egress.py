"""The way out of a unit: an HTTP proxy run by the agent, outside the sandbox.

A unit has no network. What it opens to its own loopback port 3128 arrives here as a connected socket, and gets through
only where its project's rules say so: the name is looked up once, every address that comes back must be public, and
that very address is connected to, so a name that changes its mind between check and use gains nothing. This host's own
addresses are refused too: from here, its firewall would not be in the way.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import urlsplit

from prometheus_client import Counter

from penstock.kit.addresses import Resolve, is_elsewhere, look_up
from penstock.kit.telemetry import logger
from penstock.node.foreign import open_streams
from penstock.wire import egress
from penstock.wire.egress import Address, Rule, address_of

_log = logger(__name__)
CONNECTIONS_MAX: Final = 256
_HEAD_BYTES_MAX: Final = 32 << 10
_CHUNK_BYTES: Final = 64 << 10
_HEAD_S: Final = 15.0
_LOOKUP_S: Final = 10.0
#: Of one unit at a time. They have threads of their own: slow name servers hold up nobody else.
_LOOKUPS_MAX: Final = 4
_CONNECT_S: Final = 15.0
_IDLE_S: Final = 600.0
_ADDRESSES_MAX: Final = 8
_HOP: Final = frozenset({b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"te", b"upgrade"})
_REASONS: Final = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway", 504: "Gateway Timeout"}
_connections = Counter("penstock_node_egress_total", "Connections out of units, by what became of them.", ("outcome",))


class Denied(Exception):
    """Why a connection is not made, as the unit is told."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass(frozen=True, slots=True)
class Request:
    """What the unit asked for. `first` is what the server gets before the rest; none for a tunnel."""

    host: str
    port: int
    first: bytes | None


class Proxy:
    """Carries the connections of one unit."""

    def __init__(
        self,
        unit_id: str,
        rules: Sequence[Rule],
        *,
        allocation_id: str = "",
        resolve: Resolve | None = None,
        permitted: Callable[[Address], bool] = is_elsewhere,
    ) -> None:
        self._unit_id = unit_id
        #: Told with each refusal: the log's own context is that of the unit's start, which stock has without a tenant.
        self._allocation_id = allocation_id
        self._rules = rules
        self._threads = ThreadPoolExecutor(_LOOKUPS_MAX, thread_name_prefix="egress")
        self._resolve = resolve or partial(look_up, self._threads)
        self._permitted = permitted
        self._carrying: set[asyncio.Task[None]] = set()

    def accept(self, connection: socket.socket) -> None:
        """Take over a connection that the unit opened."""
        if len(self._carrying) >= CONNECTIONS_MAX:
            _connections.labels("too_many").inc()
            connection.close()
            return
        task = asyncio.create_task(self._carry(connection), name=f"egress-{self._unit_id}")
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    def close(self) -> None:
        """End everything that is under way."""
        for task in self._carrying:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _carry(self, connection: socket.socket) -> None:
        try:
            reader, writer = open_streams(connection, limit=_HEAD_BYTES_MAX)
        except OSError:
            connection.close()
            return
        try:
            await self._serve(reader, writer)
        except Denied as denied:
            _connections.labels("denied" if denied.status == 403 else "failed").inc()
            _log.info("egress_refused", unit_id=self._unit_id, allocation_id=self._allocation_id, why=denied.why)
            writer.write(_refusal(denied))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            _connections.labels("broken").inc()
        except Exception:  # noqa: BLE001 - supervises one connection: the others go on
            _log.exception("egress_failed", unit_id=self._unit_id)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted = await _read(reader)
        up_reader, up_writer = await self._connect(wanted)
        _connections.labels("carried").inc()
        try:
            if wanted.first is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                up_writer.write(wanted.first)
            # Only when nothing passes either way is a connection idle: a long download sends nothing upwards.
            async with asyncio.timeout(_IDLE_S) as idle, asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, up_writer, idle))
                both.create_task(_pump(up_reader, writer, idle))
        except* (OSError, TimeoutError):
            _connections.labels("broken").inc()
        finally:
            up_writer.close()

    async def _connect(self, wanted: Request) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not any(rule.allows(wanted.host, wanted.port) for rule in self._rules):
            raise Denied(403, f"{wanted.host}:{wanted.port} is not on the project's egress list")
        for address in await self._addresses(wanted):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(str(address), wanted.port, limit=_CHUNK_BYTES)
            except (OSError, TimeoutError):
                continue
        raise Denied(504, f"{wanted.host}:{wanted.port} does not answer")

    async def _addresses(self, wanted: Request) -> Sequence[Address]:
        """Looked up once; if one of them is not public, none is used."""
        literal = address_of(wanted.host)
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found = [literal] if literal else await self._resolve(wanted.host, wanted.port)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Denied(502, f"{wanted.host} cannot be looked up") from error
        if not found or not all(map(self._permitted, found)):
            raise Denied(403, f"{wanted.host} is not a public address")
        return found[:_ADDRESSES_MAX]


async def _read(reader: asyncio.StreamReader) -> Request:
    """The head of the unit's request."""
    try:
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError as error:
        raise Denied(400, f"the head of the request has more than {_HEAD_BYTES_MAX} bytes") from error
    line, *headers = head[:-4].split(b"\r\n")
    parts = line.split(b" ")
    if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
        raise Denied(400, "this is an HTTP proxy: ask with CONNECT host:port, or with a full http:// address")
    method, target, _ = parts
    if method == b"CONNECT":
        return _tunnel(target)
    return _plain(method, target, headers)


def _tunnel(target: bytes) -> Request:
    host, port = _authority(f"//{target.decode('latin-1')}", default_port=None)
    return Request(host, port, None)


def _plain(method: bytes, target: bytes, headers: Sequence[bytes]) -> Request:
    """A request in the clear, passed on as its server expects it; the connection ends with its answer."""
    text = target.decode("latin-1")
    if not text.lower().startswith("http://"):
        raise Denied(400, "this is an HTTP proxy: ask with CONNECT host:port, or with a full http:// address")
    host, port = _authority(text, default_port=80)
    path = text[text.index("//") + 2 :]
    path = path[path.index("/") :] if "/" in path else "/"
    kept = [header for header in headers if _name(header) not in _HOP and _name(header) != b"host"]
    shown = f"[{host}]" if ":" in host else host
    first = [
        b" ".join((method, path.encode("latin-1"), b"HTTP/1.1")),
        f"Host: {shown}{'' if port == 80 else f':{port}'}".encode("latin-1"),
        *kept,
        b"Connection: close",
    ]
    return Request(host, port, b"\r\n".join(first) + b"\r\n\r\n")


def _name(header: bytes) -> bytes:
    name, colon, _ = header.partition(b":")
    if not colon or name != name.strip():
        raise Denied(400, "a header of the request cannot be read")
    return name.lower()


def _authority(text: str, *, default_port: int | None) -> tuple[str, int]:
    try:
        parsed = urlsplit(text)
        host, port = (parsed.hostname or "").rstrip("."), parsed.port or default_port
    except ValueError as error:
        raise Denied(400, "the address cannot be read") from error
    if port is None or parsed.username is not None or not egress.is_host(host):
        raise Denied(400, "the address must be host:port")
    return host, port


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: asyncio.Timeout) -> None:
    """Pass on until the end, no faster than the other side takes it."""
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
        if not idle.expired():
            idle.reschedule(asyncio.get_running_loop().time() + _IDLE_S)
    if writer.can_write_eof():
        writer.write_eof()


def _refusal(denied: Denied) -> bytes:
    body = f"{denied.why}\n".encode()
    head = f"HTTP/1.1 {denied.status} {_REASONS[denied.status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
