"""Moves bytes for the asynchronous client, in its event loop; the same bounds as the blocking one."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import h11

from penstock.sdk import execute
from penstock.sdk.commands import Collected, Command, CommandResult
from penstock.sdk.errors import SdkError, Unreachable
from penstock.sdk.failures import broken_off, not_connected
from penstock.sdk.http1 import Body, Http1
from penstock.sdk.link import Link
from penstock.sdk.outputs import Outputs, Said
from penstock.sdk.protocol import Answer, Listing, Request, Steps, decode
from penstock.sdk.sse import Follower
from penstock.sdk.target import Target
from penstock.sdk.transfers import Download, Source
from penstock.wire.rest import EventOut
from penstock.wire.tunnel import STDERR, STDOUT

T = TypeVar("T")

_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 60.0
_IDLE_MAX: Final = 8
#: Requests and streams at once; further ones wait.
_CONNECTIONS_MAX: Final = 100


class AsyncExecutor:
    """Drives calls in one event loop: that of its first call."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._host = target.split.netloc
        self._idle: list[_Connection] = []
        self._places = asyncio.Semaphore(_CONNECTIONS_MAX)
        self._tls: ssl.SSLContext | None = None

    async def run(self, steps: Steps[T]) -> T:
        """The call's value."""
        try:
            request = next(steps)
            while True:
                await asyncio.sleep(request.delay_s)
                try:
                    answer = await self._exchange(request)
                except Unreachable as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as done:
            return done.value

    async def items(self, listing: Listing[T]) -> AsyncIterator[T]:
        """All items, page after page."""
        cursor, read = None, 0
        while True:
            page = await self.run(listing.page(cursor, read=read))
            for item in page.items:
                yield item
            read += len(page.items)
            if (cursor := listing.next_cursor(page, read=read)) is None:
                return

    async def execute(self, command: Command) -> CommandResult:
        """Run a command in a unit and keep what it writes."""
        output = Collected()
        code, exit_class = await execute.execute(self, command, stdin=execute.once(command.stdin), write=output.add)
        return CommandResult(
            exit_code=code, exit_class=exit_class, stdout=output.bytes(STDOUT), stderr=output.bytes(STDERR)
        )

    async def follow(self, follower: Follower) -> AsyncIterator[EventOut]:
        """The live events, over as many connections as it takes."""
        await self.run(follower.begin())
        while True:
            lost: SdkError | None = None
            try:
                async for chunk in self._stream(follower.request()):
                    for event in follower.feed(chunk):
                        yield event
            except SdkError as error:
                lost = error
            await asyncio.sleep(follower.lost(lost))

    async def outputs(self, outputs: Outputs) -> AsyncIterator[Said]:
        """What handlers say, over as many connections as it takes."""
        while not outputs.ended:
            lost: SdkError | None = None
            try:
                async for chunk in self._stream(outputs.request()):
                    for said in outputs.feed(chunk):
                        yield said
            except SdkError as error:
                lost = error
            if not outputs.ended:
                await asyncio.sleep(outputs.lost(lost))

    async def download(self, download: Download) -> AsyncIterator[bytes]:
        """An object's bytes, over as many connections as it takes."""
        while not download.complete:
            lost: SdkError | None = None
            try:
                async for chunk in self._stream(download.request(), opened=download.began):
                    yield download.feed(chunk)
            except SdkError as error:
                lost = error
            if not download.complete:
                await asyncio.sleep(download.lost(lost))
        download.finish()

    def tls(self) -> ssl.SSLContext:
        """How servers prove who they are."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    async def close(self) -> None:
        """Drop the kept connections."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def _exchange(self, request: Request) -> Answer:
        async with self._connection() as connection, self._bound(connection, self.timeout_s):
            # Each step of an upload has a time of its own, for it may be long.
            upload = isinstance(request.body, Source)
            async with asyncio.timeout(None if upload else self.timeout_s) as limit:
                body = Body(await connection.ask(request, self.timeout_s))
                if upload:
                    limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)
                while chunk := await connection.body():
                    body.add(chunk)
            return body.answer()

    async def _stream(
        self, request: Request, *, opened: Callable[[Answer], None] | None = None
    ) -> AsyncIterator[bytes]:
        async with self._connection() as connection, self._bound(connection, _SILENCE_S):
            async with asyncio.timeout(self.timeout_s):
                answer = await connection.ask(request, self.timeout_s)
                if answer.status not in (200, 206):
                    body = Body(answer)
                    while chunk := await connection.body():
                        body.add(chunk)
                    decode(body.answer(), type(None))
            if opened is not None:
                opened(answer)
            while chunk := await asyncio.wait_for(connection.body(), _SILENCE_S):
                yield chunk

    @asynccontextmanager
    async def _bound(self, connection: "_Connection", seconds: float) -> AsyncIterator[None]:
        """Say what a failure of the connection means. Whatever fails ends it."""
        try:
            yield
        except (OSError, h11.RemoteProtocolError) as error:
            connection.abort()
            raise broken_off(self._host, error, seconds) from error
        except BaseException:
            connection.abort()
            raise

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator["_Connection"]:
        """A connection, kept afterwards where that can be."""
        async with self._places:
            connection = self._kept() or await self._connect()
            yield connection
            if connection.usable and len(self._idle) < _IDLE_MAX:
                self._idle.append(connection)
            else:
                await connection.close()

    def _kept(self) -> "_Connection | None":
        while self._idle:
            if (kept := self._idle.pop()).usable:
                return kept
            kept.abort()
        return None

    async def _connect(self) -> "_Connection":
        parts = self.target.split
        secure = parts.scheme == "https"
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, link = await asyncio.get_running_loop().create_connection(
                    Link,
                    str(parts.hostname),
                    parts.port or (443 if secure else 80),
                    ssl=self.tls() if secure else None,
                )
        except OSError as error:
            raise not_connected(self._host, error) from error
        return _Connection(link, Http1(self.target))


class _Connection:
    """A link and the state of HTTP on it."""

    def __init__(self, link: Link, http: Http1) -> None:
        self._link = link
        self._http = http

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._http.reusable and self._link.quiet

    async def ask(self, request: Request, timeout_s: float) -> Answer:
        """Send a request and wait for the answer's head."""
        async with asyncio.timeout(timeout_s):
            await self._link.send(self._http.begin(request))
        if isinstance(request.body, Source):
            return await self._upload(request.body, timeout_s)
        return await self._head()

    async def body(self) -> bytes:
        """Wait for a piece of the body; empty at its end."""
        while (chunk := self._http.body()) is None:
            self._http.feed(await self._link.receive())
        return chunk

    def abort(self) -> None:
        """End at once."""
        self._link.abort()

    async def close(self) -> None:
        """End, and wait until it has."""
        await self._link.close()

    async def _head(self) -> Answer:
        while (answer := self._http.head()) is None:
            self._http.feed(await self._link.receive())
        return answer

    async def _upload(self, source: Source, timeout_s: float) -> Answer:
        """Send a body of any length. A server that refuses it may do so before its end: the answer is worth more than
        the failure to go on."""
        sending = asyncio.create_task(self._send(source))
        reading = asyncio.create_task(self._head())
        try:
            await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not isinstance(sending.exception(), ConnectionError):
                sending.result()
            return await asyncio.wait_for(reading, timeout_s)
        finally:
            for task in (sending, reading):
                task.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)

    async def _send(self, source: Source) -> None:
        """Read in a thread, so that a slow disk stops nothing else. Each piece has its time."""
        chunks = source.chunks()
        while chunk := await asyncio.to_thread(next, chunks, b""):
            await asyncio.wait_for(self._link.send(self._http.more(chunk)), _SILENCE_S)
        await asyncio.wait_for(self._link.send(self._http.end()), _SILENCE_S)
