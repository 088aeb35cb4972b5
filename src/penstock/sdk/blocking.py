"""Moves bytes for the blocking client, over plain sockets: it starts quickly and needs no event loop.

Every exchange ends within its time limit: each wait on the socket has what is left of it. Certificates are always
verified and redirects never followed. Connections are kept and reused; a connection is used by one thread at a time.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import h11

from penstock.sdk.commands import Command, CommandResult, with_gateway
from penstock.sdk.errors import SdkError, Unreachable
from penstock.sdk.failures import broken_off, not_connected
from penstock.sdk.http1 import Body, Http1
from penstock.sdk.outputs import Outputs, Said
from penstock.sdk.protocol import Answer, Listing, Request, Steps, decode
from penstock.sdk.sse import Follower
from penstock.sdk.target import Target
from penstock.sdk.transfers import Download, Source
from penstock.wire.rest import EventOut

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

_CONNECT_S: Final = 10.0
#: A stream that is silent for longer is taken for dead; the server sends comments more often.
_SILENCE_S: Final = 60.0
_CHUNK_BYTES: Final = 64 << 10
_IDLE_MAX: Final = 8


class BlockingExecutor:
    """Drives calls over blocking sockets."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._host = target.split.netloc
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None

    def run(self, steps: Steps[T]) -> T:
        """The call's value."""
        try:
            request = next(steps)
            while True:
                time.sleep(request.delay_s)
                try:
                    answer = self._exchange(request)
                except Unreachable as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as done:
            return done.value

    def items(self, listing: Listing[T]) -> Iterator[T]:
        """All items, page after page."""
        cursor, read = None, 0
        while True:
            page = self.run(listing.page(cursor, read=read))
            yield from page.items
            read += len(page.items)
            if (cursor := listing.next_cursor(page, read=read)) is None:
                return

    def execute(self, command: Command) -> CommandResult:
        """Run a command in a unit. It takes a WebSocket, so it runs in a loop of its own, in a thread of its own."""
        import concurrent.futures

        self.target = self.run(with_gateway(self.target))
        with concurrent.futures.ThreadPoolExecutor(1, "penstock-exec") as pool:
            return pool.submit(self._execute_in_loop, command).result()

    def _execute_in_loop(self, command: Command) -> CommandResult:
        import asyncio

        from penstock.sdk.asynchronous import AsyncExecutor

        async def once() -> CommandResult:
            executor = AsyncExecutor(self.target, timeout_s=self.timeout_s)
            try:
                return await executor.execute(command)
            finally:
                await executor.close()

        return asyncio.run(once())

    def follow(self, follower: Follower) -> Iterator[EventOut]:
        """The live events, over as many connections as it takes."""
        self.run(follower.begin())
        while True:
            lost: SdkError | None = None
            try:
                for chunk in self._stream(follower.request()):
                    yield from follower.feed(chunk)
            except SdkError as error:
                lost = error
            time.sleep(follower.lost(lost))

    def outputs(self, outputs: Outputs) -> Iterator[Said]:
        """What handlers say, over as many connections as it takes."""
        while not outputs.ended:
            lost: SdkError | None = None
            try:
                for chunk in self._stream(outputs.request()):
                    yield from outputs.feed(chunk)
            except SdkError as error:
                lost = error
            if not outputs.ended:
                time.sleep(outputs.lost(lost))

    def download(self, download: Download) -> Iterator[bytes]:
        """An object's bytes, over as many connections as it takes."""
        while not download.complete:
            lost: SdkError | None = None
            try:
                for chunk in self._stream(download.request(), opened=download.began):
                    yield download.feed(chunk)
            except SdkError as error:
                lost = error
            if not download.complete:
                time.sleep(download.lost(lost))
        download.finish()

    def close(self) -> None:
        """Drop the kept connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _exchange(self, request: Request) -> Answer:
        connection = self._connection()
        with self._bound(connection, self.timeout_s):
            connection.send(request)
            connection.within(self.timeout_s)
            body = Body(connection.head())
            while chunk := connection.body():
                body.add(chunk)
        self._keep(connection)
        return body.answer()

    def _stream(
        self, request: Request, *, opened: Callable[[Answer], None] | None = None
    ) -> Generator[bytes, None, None]:
        connection = self._connection()
        with self._bound(connection, self.timeout_s):
            connection.send(request)
            answer = connection.head()
            if answer.status not in (200, 206):
                body = Body(answer)
                while chunk := connection.body():
                    body.add(chunk)
                decode(body.answer(), type(None))
            if opened is not None:
                opened(answer)
        try:
            with self._bound(connection, _SILENCE_S):
                while chunk := connection.body():
                    yield chunk
                    connection.within(_SILENCE_S)
        finally:
            connection.close()

    @contextmanager
    def _bound(self, connection: "_Connection", seconds: float) -> Iterator[None]:
        """Bound what is done with a connection, and say what its failure means. Whatever fails closes it."""
        connection.within(seconds)
        try:
            yield
        except (OSError, h11.RemoteProtocolError) as error:
            connection.close()
            raise broken_off(self._host, error, seconds) from error
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> "_Connection":
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                return self._connect()
            if not kept.readable():
                return kept
            # The server closed it while it was idle.
            kept.close()

    def _keep(self, connection: "_Connection") -> None:
        with self._lock:
            if connection.http.reusable and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> "_Connection":
        parts = self.target.split
        host, secure = str(parts.hostname), parts.scheme == "https"
        try:
            sock = socket.create_connection((host, parts.port or (443 if secure else 80)), _CONNECT_S)
        except OSError as error:
            raise not_connected(self._host, error) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return _Connection(self._secured(sock, host) if secure else sock, Http1(self.target))
        except OSError as error:
            sock.close()
            raise not_connected(self._host, error) from error

    def _secured(self, sock: socket.socket, host: str) -> "ssl.SSLSocket":
        import ssl

        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls.wrap_socket(sock, server_hostname=host)


class _Connection:
    """A socket and the state of HTTP on it."""

    def __init__(self, sock: socket.socket, http: Http1) -> None:
        self.http = http
        self._sock = sock
        self._until = 0.0

    def within(self, seconds: float) -> None:
        """From now on, waits end after so many seconds in all."""
        self._until = time.monotonic() + seconds

    def send(self, request: Request) -> None:
        """Send a request. A server that refuses a body may do so before its end: the answer is worth more than the
        failure to go on."""
        self._write(self.http.begin(request))
        if not isinstance(request.body, Source):
            return
        try:
            for chunk in request.body.chunks():
                self.within(_SILENCE_S)
                self._write(self.http.more(chunk))
                if self._answered():
                    return
            self._write(self.http.end())
        except (BrokenPipeError, ConnectionResetError):
            return

    def head(self) -> Answer:
        """Wait for the answer's head."""
        while (answer := self.http.head()) is None:
            self._receive()
        return answer

    def body(self) -> bytes:
        """Wait for a piece of the body; empty at its end."""
        while (chunk := self.http.body()) is None:
            self._receive()
        return chunk

    def readable(self) -> bool:
        """Whether there are bytes, or the connection was closed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            return bool(selector.select(0))

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _answered(self) -> bool:
        if not self.readable():
            return False
        self._receive()
        return self.http.head() is not None

    def _write(self, data: bytes) -> None:
        unsent = memoryview(data)
        while unsent:
            self._wait_at_most()
            unsent = unsent[self._sock.send(unsent) :]

    def _receive(self) -> None:
        self._wait_at_most()
        self.http.feed(self._sock.recv(_CHUNK_BYTES))

    def _wait_at_most(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
