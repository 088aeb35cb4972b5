"""Moves bytes for the asynchronous client, with aiohttp; the same bounds as the blocking one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import aiohttp

from penstock.sdk import execute
from penstock.sdk.commands import Collected, Command, CommandResult
from penstock.sdk.errors import BadAnswer, SdkError, Unreachable
from penstock.sdk.failures import unreachable
from penstock.sdk.outputs import Outputs, Said
from penstock.sdk.protocol import ANSWER_BYTES_MAX, Answer, Listing, Request, Steps, decode, excerpt
from penstock.sdk.sse import Follower
from penstock.sdk.target import Target
from penstock.sdk.transfers import Download, Source
from penstock.wire.rest import EventOut
from penstock.wire.tunnel import STDERR, STDOUT

T = TypeVar("T")

_CONNECT_S: Final = 10.0
_SILENCE_S: Final = 60.0
_CHUNK_BYTES: Final = 64 << 10


class AsyncExecutor:
    """Drives calls with aiohttp. Its session is made in the loop that uses it first."""

    def __init__(self, target: Target, *, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._host = target.split.netloc
        self._session: aiohttp.ClientSession | None = None

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

    def session(self) -> aiohttp.ClientSession:
        """The connections of this client."""
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_refuse_redirect)
            self._session = aiohttp.ClientSession(
                headers=self.target.headers(),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[trace],
            )
            # aiohttp repeats some requests by itself; here only the protocol decides that, for both clients alike.
            self._session._retry_connection = False  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _exchange(self, request: Request) -> Answer:
        limits = aiohttp.ClientTimeout(total=self.timeout_s, sock_connect=_CONNECT_S)
        if isinstance(request.body, Source):
            limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        try:
            async with self._open(request, limits) as response:
                return await _answer(response)
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._host, error, self.timeout_s) from error

    async def _stream(
        self, request: Request, *, opened: Callable[[Answer], None] | None = None
    ) -> AsyncIterator[bytes]:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
        try:
            async with self._open(request, limits) as response:
                if response.status not in (200, 206):
                    decode(await _answer(response), type(None))
                if opened is not None:
                    opened(Answer(status=response.status, headers=_headers(response), body=b""))
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._host, error, _SILENCE_S) from error

    def _open(
        self, request: Request, limits: aiohttp.ClientTimeout
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.session().request(
            request.method,
            self.target.api_url + request.path,
            data=_pieces(request.body) if isinstance(request.body, Source) else request.body,
            headers=request.headers,
            timeout=limits,
            allow_redirects=False,
        )


async def _refuse_redirect(
    _session: aiohttp.ClientSession, _context: object, seen: aiohttp.TraceRequestRedirectParams
) -> None:
    # Opening a WebSocket has no switch for this.
    target = excerpt(seen.response.headers.get("Location", "an unknown place"))
    raise BadAnswer(f"the server redirects to {target}; redirects are not followed", status=seen.response.status)


async def _answer(response: aiohttp.ClientResponse) -> Answer:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            response.close()
            raise BadAnswer(f"the answer is larger than {ANSWER_BYTES_MAX >> 20} MB", status=response.status)
        chunks.append(chunk)
    return Answer(status=response.status, headers=_headers(response), body=b"".join(chunks))


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.headers.items()}


async def _pieces(source: Source) -> AsyncIterator[bytes]:
    """Read in a thread, so that a slow disk stops nothing else."""
    chunks = source.chunks()
    while chunk := await asyncio.to_thread(next, chunks, b""):
        yield chunk
