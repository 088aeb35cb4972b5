"""HTTP connections to unit ports, over streams of a tunnel, kept for the next request like any keep-alive connection.

Most responses are simple: a well-formed head and a Content-Length. These pass from the tunnel to the client as they
come, without a queue or a task in between, because that is most of the gateway's work. Everything else goes through
aiohttp's own response parser. A connection is only ever reused for the same port of the same unit.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias

from aiohttp.client_proto import ResponseHandler
from aiohttp.http_parser import RawResponseMessage
from aiohttp.streams import StreamReader

from penstock.access.headers import SimpleHead, simple_head
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


class PortKey(NamedTuple):
    """Which port of which unit."""

    node_id: str
    unit_id: str
    port: int


class Relay(Protocol):
    """Where a simple response goes. Called from the tunnel's reading loop: must not block."""

    def head(self, head: SimpleHead) -> None:
        """The response begins."""
        ...

    def body(self, data: bytes | memoryview) -> bool:
        """More of it; whether yet more can be taken now."""
        ...


class Progress(Enum):
    """What became of a request."""

    RELAYED = "relayed"
    CONGESTED = "congested"
    PARSED = "parsed"


class Disconnected(ConnectionError):
    """The connection ended before the response did. `error` is the tunnel's reason; none when the unit just closed."""

    def __init__(self, error: StreamAborted | None) -> None:
        super().__init__(str(error or "the unit closed the connection"))
        self.error = error


class Connection:
    """One HTTP/1.1 connection to a unit's port: the sink of its stream."""

    __slots__ = (
        "_buffer",
        "_handler",
        "_left",
        "_over",
        "_progress",
        "_relay",
        "_silent_s",
        "_transport",
        "_without_body",
        "active_at",
        "key",
        "reused",
        "stream",
    )

    def __init__(self, key: PortKey, stream: Stream, *, silent_s: float) -> None:
        self.key = key
        self.stream = stream
        self._silent_s = silent_s
        self.reused = False
        self.active_at = time.monotonic()
        self._over = False
        self._relay: Relay | None = None
        self._buffer = b""
        self._left = 0
        self._without_body = False
        self._progress: asyncio.Future[Progress] | None = None
        self._handler: ResponseHandler | None = None
        self._transport: StreamTransport | None = None
        stream.attach(self)

    @property
    def alive(self) -> bool:
        """Whether a further request can be sent."""
        if self._handler is not None:
            return self._handler.is_connected() and not self._handler.should_close
        return not self._over and self._progress is None

    @property
    def error(self) -> StreamAborted | None:
        """How the tunnel ended the stream, if it did."""
        return self.stream.error

    def begin(self, relay: Relay | None, *, without_body: bool) -> None:
        """Expect a response; a simple one goes to `relay`, if there is one."""
        self.active_at = time.monotonic()
        self._relay = relay
        self._left = 0
        self._buffer = b""
        self._without_body = without_body
        self._progress = asyncio.get_running_loop().create_future()
        if relay is None or self._handler is not None:
            self._parse()
            self._tell(Progress.PARSED)

    def write(self, data: bytes) -> None:
        """Send; what is written in one tick travels together. After the end it is dropped, as sockets do."""
        if self.stream.over or self.stream.ending:
            return
        self.stream.write(data)
        self.active_at = time.monotonic()
        if self._handler is not None:
            self._handler.start_timeout()

    async def drain(self) -> None:
        """Wait until the unit has taken most of it."""
        await self.stream.drain()

    async def progress(self) -> Progress:
        """Wait for the whole response to be relayed, for the relay to be full, or for a response that is not simple."""
        assert self._progress is not None
        found = await self._progress
        if found is Progress.RELAYED:
            self._progress = None
        elif found is Progress.CONGESTED:
            self._progress = asyncio.get_running_loop().create_future()
        return found

    async def parsed(self) -> tuple[RawResponseMessage, StreamReader]:
        """The next response that is not a mere notice, after progress said PARSED."""
        assert self._handler is not None
        while True:
            message, payload = await self._handler.read()
            if not 100 <= message.code < 200 or message.code == 101:
                return message, payload

    def upgrade(self) -> tuple[Stream, bytes]:
        """The bare stream, and the bytes that came after the response's head."""
        assert self._handler is not None
        assert self._transport is not None
        rest = Collected()
        self._handler.set_parser(rest, rest)
        self._transport.detach()
        return self.stream, bytes(rest.data)

    def close(self) -> None:
        """Give it up; whoever waits for its response hears that it ended."""
        self._over = True
        self._fail(Disconnected(None))
        if self._handler is not None:
            self._handler.close()
        elif not self.stream.over:
            self.stream.abort("cancelled")

    def expire(self, now: float) -> None:
        """End the exchange if the unit was silent for too long; aiohttp's parser watches that by itself."""
        if self._handler is None and self.active_at < now - self._silent_s:
            self._fail(TimeoutError("the unit was silent for too long"))

    def data(self, channel: int, payload: bytes) -> None:  # noqa: ARG002 (a connection has one channel)
        """From the unit."""
        self.active_at = time.monotonic()
        if self._left:
            self._body(payload)
        elif self._relay is not None:
            self._head(payload)
        else:
            # More than the response had, or something that nobody asked for.
            self.close()

    def ended(self) -> None:
        """The unit closed."""
        self._over = True
        self.stream.end()
        self._fail(Disconnected(None))

    def aborted(self, error: StreamAborted) -> None:
        """The stream is gone."""
        self._over = True
        self._fail(Disconnected(error))

    def blocked(self) -> None:
        """Uploads await `drain`."""

    def writable(self) -> None:
        """Uploads await `drain`."""

    def _head(self, payload: bytes) -> None:
        assert self._relay is not None
        data = self._buffer + payload if self._buffer else payload
        end = data.find(b"\r\n\r\n")
        if end < 0 and len(data) < _FIELD_BYTES_MAX and data[:7] == b"HTTP/1."[: len(data)]:
            self._buffer = data
            return
        head = simple_head(data[:end]) if end >= 0 else None
        if head is None:
            self._parse()
            self._tell(Progress.PARSED)
            assert self._handler is not None
            self._handler.data_received(data)
            return
        self._left = head.length
        self._relay.head(head)
        self._body(memoryview(data)[end + 4 :])

    def _body(self, payload: bytes | memoryview) -> None:
        assert self._relay is not None
        if len(payload) > self._left:
            self._over = True
            payload = payload[: self._left]
        self._left -= len(payload)
        more = self._relay.body(payload)
        if not self._left:
            self._relay = None
            self._tell(Progress.RELAYED)
        elif not more:
            self.stream.pause()
            self._tell(Progress.CONGESTED)

    def _parse(self) -> None:
        """From here on aiohttp's parser reads this connection."""
        self._relay = None
        if self._handler is None:
            self._handler = ResponseHandler(asyncio.get_running_loop())
            self._transport = StreamTransport(self.stream, self._handler)
        self._handler.set_response_params(
            skip_payload=self._without_body,
            read_until_eof=True,
            auto_decompress=False,
            read_timeout=self._silent_s,
            max_line_size=_FIELD_BYTES_MAX,
            max_field_size=_FIELD_BYTES_MAX,
            max_headers=_HEADERS_MAX,
        )

    def _tell(self, found: Progress) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_result(found)

    def _fail(self, error: Exception) -> None:
        if self._progress is not None and not self._progress.done():
            self._progress.set_exception(error)
            # Whoever waits hears it; a request that was cancelled does not.
            self._progress.exception()


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
    """All connections to units' ports, at work or waiting for a request."""

    def __init__(self, dial: Dial, *, silent_s: float) -> None:
        self._dial = dial
        self._silent_s = silent_s
        self._idle: dict[PortKey, deque[Connection]] = {}
        self._busy: set[Connection] = set()

    async def acquire(self, key: PortKey, *, repeatable: bool) -> Connection:
        """A connection; the most recently used one, when it is surely still open or the request may be repeated."""
        idle = self._idle.get(key)
        limit = time.monotonic() - (_IDLE_S if repeatable else _SURELY_OPEN_S)
        while idle:
            connection = idle.pop()
            if connection.alive and connection.active_at > limit:
                connection.reused = True
                self._busy.add(connection)
                return connection
            connection.close()
        return await self.fresh(key)

    async def fresh(self, key: PortKey) -> Connection:
        """A new connection."""
        target = UnitPort(unit_id=key.unit_id, port=key.port)
        connection = Connection(key, await self._dial(key.node_id, target), silent_s=self._silent_s)
        self._busy.add(connection)
        return connection

    def release(self, connection: Connection) -> None:
        """The exchange is complete: keep the connection for the next request, if it can have one."""
        self._busy.discard(connection)
        idle = self._idle.setdefault(connection.key, deque())
        if not connection.alive or len(idle) >= _IDLE_PER_PORT_MAX:
            connection.close()
            return
        connection.active_at = time.monotonic()
        idle.append(connection)

    def discard(self, connection: Connection) -> None:
        """The exchange is not complete, so neither is the connection of use."""
        self._busy.discard(connection)
        connection.close()

    async def sweep(self) -> None:
        """Close what nobody used for a while, and end exchanges in which the unit was silent for too long."""
        now = time.monotonic()
        for key, idle in list(self._idle.items()):
            while idle and (idle[0].active_at < now - _IDLE_S or not idle[0].alive):
                idle.popleft().close()
            if not idle:
                del self._idle[key]
        for connection in list(self._busy):
            connection.expire(now)

    def close(self) -> None:
        """Close all."""
        for connections in (*self._idle.values(), list(self._busy)):
            for connection in connections:
                connection.close()
        self._idle.clear()
        self._busy.clear()
