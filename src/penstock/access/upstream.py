"""HTTP connections to unit ports, over streams of a tunnel, kept for the next request like any keep-alive connection.

aiohttp's own response parser runs on each; its client session is left out, because a proxy needs none of what it does
and it would be the largest part of the gateway's work per request. A connection is only ever reused for the same port
of the same unit.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from aiohttp.client_proto import ResponseHandler
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from penstock.kit.stream import Stream, StreamAborted
from penstock.kit.streamio import StreamTransport
from penstock.wire.tunnel import Target, UnitPort

#: Servers commonly close idle connections after five seconds: we are quicker.
_IDLE_S: Final = 4.0
#: A request that must not be sent twice takes a connection only this fresh.
_SURELY_OPEN_S: Final = 1.0
_IDLE_PER_PORT_MAX: Final = 256
_FIELD_BYTES_MAX: Final = 32 << 10
_HEADERS_MAX: Final = 256

Dial: TypeAlias = Callable[[str, Target], Awaitable[Stream]]


@dataclass(frozen=True, slots=True)
class PortKey:
    """Which port of which unit."""

    node_id: str
    unit_id: str
    port: int


class Connection:
    """One HTTP/1.1 connection to a unit's port."""

    __slots__ = ("_handler", "_transport", "idle_since", "key", "reused")

    def __init__(self, key: PortKey, stream: Stream) -> None:
        self.key = key
        self.reused = False
        self.idle_since = 0.0
        self._handler = ResponseHandler(asyncio.get_running_loop())
        self._transport = StreamTransport(stream, self._handler)

    @property
    def alive(self) -> bool:
        """Whether a request can be sent."""
        return self._handler.is_connected() and not self._handler.should_close

    @property
    def error(self) -> StreamAborted | None:
        """How the tunnel ended the stream, if it did."""
        return self._transport.stream.error

    def begin(self, *, without_body: bool, idle_s: float) -> None:
        """Expect a response."""
        self._handler.set_response_params(
            skip_payload=without_body,
            read_until_eof=True,
            auto_decompress=False,
            read_timeout=idle_s,
            max_line_size=_FIELD_BYTES_MAX,
            max_field_size=_FIELD_BYTES_MAX,
            max_headers=_HEADERS_MAX,
        )
        self._handler.start_timeout()

    def write(self, data: bytes) -> None:
        """Send; what is written in one go travels together."""
        self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the unit has taken most of it."""
        await self._transport.stream.drain()

    async def response(self) -> tuple[RawResponseMessage, StreamReader]:
        """The next response that is not a mere notice."""
        while True:
            message, payload = await self._handler.read()
            if not 100 <= message.code < 200 or message.code == 101:
                return message, payload

    def upgrade(self) -> tuple[Stream, bytes]:
        """The bare stream, and the bytes that came after the response's head."""
        rest = Collected()
        self._handler.set_parser(rest, rest)
        return self._transport.detach(), bytes(rest.data)

    def close(self) -> None:
        """Give it up."""
        self._handler.close()


class Collected:
    """A parser, for aiohttp's protocols, that keeps the bytes as they are."""

    def __init__(self) -> None:
        self.data = bytearray()

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Keep."""
        self.data += data
        return False, b""

    def feed_eof(self) -> None:
        """Nothing more comes."""


class Connections:
    """All connections to units' ports that wait for a request."""

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._idle: dict[PortKey, deque[Connection]] = {}

    async def acquire(self, key: PortKey, *, repeatable: bool) -> Connection:
        """A connection; the most recently used one, when it is surely still open or the request may be repeated."""
        idle = self._idle.get(key)
        limit = time.monotonic() - (_IDLE_S if repeatable else _SURELY_OPEN_S)
        while idle:
            connection = idle.pop()
            if connection.alive and connection.idle_since > limit:
                connection.reused = True
                return connection
            connection.close()
        return await self.fresh(key)

    async def fresh(self, key: PortKey) -> Connection:
        """A new connection."""
        return Connection(key, await self._dial(key.node_id, UnitPort(unit_id=key.unit_id, port=key.port)))

    def release(self, connection: Connection) -> None:
        """Keep it for the next request, if it can have one."""
        idle = self._idle.setdefault(connection.key, deque())
        if not connection.alive or len(idle) >= _IDLE_PER_PORT_MAX:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        idle.append(connection)

    async def sweep(self) -> None:
        """Close what nobody used for a while."""
        limit = time.monotonic() - _IDLE_S
        for key, idle in list(self._idle.items()):
            while idle and (idle[0].idle_since < limit or not idle[0].alive):
                idle.popleft().close()
            if not idle:
                del self._idle[key]

    def close(self) -> None:
        """Close all."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
