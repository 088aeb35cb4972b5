"""A TLS listener that holds its accept rate: so many handshakes a second, a short queue, and the rest is turned away.

A handshake costs as much as hundreds of messages. When a whole fleet dials at once, the connections that stand must not
wait behind it: those who dial are let in at a steady rate, and whoever does not fit into the queue is told the end
before a byte is read, which costs next to nothing. They come back by their own back-off.
"""

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from prometheus_client import Counter, Gauge

from penstock.kit.telemetry import logger

_log = logger(__name__)
#: With the rate this bounds how many handshakes are under way.
_HANDSHAKE_S: Final = 10.0
_BACKLOG: Final = 1024
#: While it is crowded inside it is looked so often, and one more is let in after so many looks.
_LOOK_S: Final = 0.01
_LOOKS_MAX: Final = 100
#: No file descriptor is left: look again so much later.
_EXHAUSTED_S: Final = 0.1
#: Who is turned away hears the end first and is closed a moment later: a reset within the first milliseconds of a
#: connection makes clients on uvloop lose track of their files.
_FAREWELL_S: Final = 1.0
_FAREWELLS_MAX: Final = 1024
_turned_away = Counter("penstock_connections_turned_away_total", "Connections ended because too many came at once.")
_waiting = Gauge("penstock_connections_waiting", "Connections that wait for their handshake.")


class Rate:
    """At most `burst` at once and `per_s` in the long run; the others wait their turn."""

    def __init__(self, *, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._burst = burst
        self._clock = clock
        self._level = float(burst)
        self._at = clock()

    def wait_s(self) -> float:
        """Take a turn; how long to wait for it."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self.per_s) - 1
        self._at = now
        return max(0.0, -self._level / self.per_s)


class Door:
    """The sockets that listen, and who waits before them."""

    def __init__(
        self,
        protocol: Callable[[], asyncio.BaseProtocol],
        *,
        tls: ssl.SSLContext,
        rate: Rate,
        waiting_max: int,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self._protocol = protocol
        self._tls = tls
        self._rate = rate
        self._crowded = crowded
        self._queue: asyncio.Queue[socket.socket] = asyncio.Queue(waiting_max)
        self._sockets: list[socket.socket] = []
        self._loops: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()
        self._leaving: set[socket.socket] = set()

    @property
    def ports(self) -> list[int]:
        """Where it listens."""
        return [listener.getsockname()[1] for listener in self._sockets]

    async def open(self, host: str, port: int) -> None:
        """Listen on all addresses of this name, or OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self._sockets.append(_listen(family, address))
        except OSError:
            self._close_sockets()
            raise
        self._loops = [asyncio.create_task(self._accept(listener)) for listener in self._sockets]
        self._loops.append(asyncio.create_task(self._admit()))

    async def close(self) -> None:
        """Listen no more; connections that stand are their protocols' business."""
        ending = [*self._loops, *self._shaking]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        self._close_sockets()
        while not self._queue.empty():
            self._queue.get_nowait().close()
        for connection in list(self._leaving):
            self._see_off(connection)

    def _close_sockets(self) -> None:
        while self._sockets:
            self._sockets.pop().close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("accept_failed", error=repr(error))
                await asyncio.sleep(_EXHAUSTED_S)
                continue
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        try:
            self._queue.put_nowait(connection)
        except asyncio.QueueFull:
            _turned_away.inc()
            self._turn_away(connection)

    def _turn_away(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        if len(self._leaving) >= _FAREWELLS_MAX:
            connection.close()
            return
        self._leaving.add(connection)
        asyncio.get_running_loop().call_later(_FAREWELL_S, self._see_off, connection)

    def _see_off(self, connection: socket.socket) -> None:
        self._leaving.discard(connection)
        connection.close()

    async def _admit(self) -> None:
        while True:
            connection = await self._queue.get()
            _waiting.set(self._queue.qsize())
            try:
                await asyncio.sleep(self._rate.wait_s())
                await self._until_calm()
            except asyncio.CancelledError:
                connection.close()
                raise
            task = asyncio.create_task(self._shake_hands(connection))
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _until_calm(self) -> None:
        """A handshake for somebody who would only wait inside is wasted; but nobody is held here for ever."""
        for _ in range(_LOOKS_MAX):
            if not self._crowded():
                return
            await asyncio.sleep(_LOOK_S)

    async def _shake_hands(self, connection: socket.socket) -> None:
        """Whoever fails is gone by itself: the loop closes the socket that it was given."""
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._tls, ssl_handshake_timeout=_HANDSHAKE_S
            )


def _listen(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
