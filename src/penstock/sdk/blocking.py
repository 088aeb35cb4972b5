"""Moves bytes for the blocking client, with the standard library alone: it starts quickly and needs no event loop.

Every exchange ends within its time limit, whatever the server does: a timer shuts the socket down. Certificates are
always verified and redirects never followed. Connections are kept and reused; a connection is used by one thread at a
time.
"""

import concurrent.futures
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from penstock.sdk.commands import Command, CommandResult, with_gateway
from penstock.sdk.errors import BadAnswer, SdkError, Unreachable
from penstock.sdk.outputs import Outputs, Said
from penstock.sdk.protocol import ANSWER_BYTES_MAX, Answer, Listing, Request, Steps, decode
from penstock.sdk.sse import Follower
from penstock.sdk.target import Target
from penstock.sdk.transfers import Download, Source
from penstock.wire.rest import EventOut

T = TypeVar("T")

_CONNECT_S: Final = 10.0
#: A stream that is silent for longer is taken for dead; the server sends comments more often.
_SILENCE_S: Final = 60.0
_CHUNK_BYTES: Final = 64 << 10
_IDLE_MAX: Final = 8


class BlockingExecutor:
    """Drives calls with `http.client`."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._headers = target.headers()
        self._host = target.split.netloc
        self._path = target.split.path
        self._idle: list[http.client.HTTPConnection] = []
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
        try:
            if isinstance(request.body, Source):
                self._send_source(connection, request, request.body)
            with self._deadline(connection):
                response = self._send(connection, request)
                body = _read(response)
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._keep(connection)
        return Answer(status=response.status, headers=_headers(response), body=body)

    def _stream(self, request: Request, *, opened: Callable[[Answer], None] | None = None) -> Iterator[bytes]:
        connection = self._connection()
        try:
            with self._deadline(connection):
                response = self._send(connection, request)
                if response.status not in (200, 206):
                    body = _read(response)
                    decode(Answer(status=response.status, headers=_headers(response), body=body), type(None))
                if opened is not None:
                    opened(Answer(status=response.status, headers=_headers(response), body=b""))
            while chunk := self._chunk(response):
                yield chunk
        finally:
            connection.close()

    def _chunk(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read1(_CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"the stream from {self._host} broke off: {error}", sent=True) from error

    def _send_source(self, connection: http.client.HTTPConnection, request: Request, source: Source) -> None:
        """A body of any length: each piece has its time, and the answer its own. A server that refuses may do so before
        the end, and its answer is worth more than the failure to go on."""
        headers = self._headers | dict(request.headers)
        try:
            connection.request(request.method, self._path + request.path, body=source.chunks(), headers=headers)
        except (BrokenPipeError, ConnectionResetError):
            return
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self._host} broke off: {_reason(error)}", sent=True) from error

    def _send(self, connection: http.client.HTTPConnection, request: Request) -> http.client.HTTPResponse:
        if isinstance(request.body, Source):
            return connection.getresponse()
        connection.request(
            request.method, self._path + request.path, body=request.body, headers=self._headers | dict(request.headers)
        )
        return connection.getresponse()

    def _connection(self) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                kept = self._idle.pop() if self._idle else None
            if kept is None:
                return self._connect()
            if not select.select([kept.sock], [], [], 0)[0]:
                return kept
            # The server closed it while it was idle.
            kept.close()

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._new_connection()
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sock.settimeout(max(self.timeout_s, _SILENCE_S))
        except OSError as error:
            connection.close()
            raise _unreachable(self._host, error) from error
        return connection

    def _new_connection(self) -> http.client.HTTPConnection:
        parts = self.target.split
        if parts.scheme == "http":
            return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_CONNECT_S)
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=_CONNECT_S, context=self._tls)

    @contextmanager
    def _deadline(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """Bound the whole exchange, also when the server sends one byte at a time."""
        expired = threading.Event()
        sock: socket.socket = connection.sock

        def expire() -> None:
            expired.set()
            with _quietly():
                # Not the TLS socket's own method: that one may not be called while another thread reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout_s, expire)
        timer.daemon = True
        timer.start()
        late = f"{self._host} did not answer within {self.timeout_s:g} s"
        try:
            yield
            if expired.is_set():
                # What was cut off can look like the end of an answer.
                raise TimeoutError
        except (OSError, http.client.HTTPException, ValueError) as error:
            timed_out = expired.is_set() or isinstance(error, TimeoutError)
            message = late if timed_out else f"{self._host} broke off: {_reason(error)}"
            raise Unreachable(message, sent=True) from error
        finally:
            timer.cancel()


@contextmanager
def _quietly() -> Iterator[None]:
    try:
        yield
    except OSError:
        return


def _read(response: http.client.HTTPResponse) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := response.read1(_CHUNK_BYTES):
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            raise BadAnswer(f"the answer is larger than {ANSWER_BYTES_MAX >> 20} MB", status=response.status)
        chunks.append(chunk)
    # It is read to its end: without this, the connection would take it for still under way.
    response.close()
    return b"".join(chunks)


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def _unreachable(host: str, error: OSError) -> Unreachable:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unreachable(f"the certificate of {host} is not valid: {error.verify_message}", sent=False, passing=False)
    if isinstance(error, ssl.SSLError):
        return Unreachable(f"no TLS connection with {host}: {_reason(error)}", sent=False, passing=False)
    if isinstance(error, socket.gaierror):
        passing = error.errno == socket.EAI_AGAIN
        return Unreachable(f"cannot find the host {host}: {error.strerror}", sent=False, passing=passing)
    return Unreachable(f"cannot connect to {host}: {_reason(error)}", sent=False)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
