"""What is too large for a message, fetched from and brought to the gateway with the attempt's token.

The gateway may be away for a while: everything is tried again, for a bounded time. A refusal is final: the attempt is
not the current one any more.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from penstock.kit.clock import backoff_s
from penstock.node.errors import NodeError
from penstock.wire.serverless import ATTEMPTS_PATH, CALLED_PATH, Reference, WorkerDispatchMessage
from penstock.wire.unreadable import UNREADABLE

T = TypeVar("T")

_ASK_S: Final = 5.0
_FETCH_S: Final = 60.0
_STORE_S: Final = 300.0
_STALLED_S: Final = 30.0
_OK: Final = range(200, 300)
_REFUSED: Final = range(400, 500)
_AGAIN: Final = (408, 425, 429)
_TOO_LARGE: Final = 413
_ANSWER_BYTES_MAX: Final = 64 << 10
#: Large bodies on their way at once, of all workers.
_CALLED_MAX: Final = 4
_STORED_MAX: Final = 8
_reference: Final = msgspec.json.Decoder(Reference)


class NotKept(NodeError):
    """The gateway did not give or take it. `code`: refused, too_large, altered or away."""


class Attempts:
    """The gateway's attempts, at `url`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._called = asyncio.Semaphore(_CALLED_MAX)
        self._stored = asyncio.Semaphore(_STORED_MAX)

    async def wants(self, dispatch: WorkerDispatchMessage) -> bool:
        """Whether the attempt still counts. If nobody says so in time it does: better made twice than never."""
        try:
            await tried(lambda: self._fetch(dispatch, "current", 0), _ASK_S)
        except NotKept as error:
            return error.code != "refused"
        return True

    async def payload(self, dispatch: WorkerDispatchMessage, wanted: Reference) -> bytes:
        """The invocation's payload, checked against what the dispatch says of it."""
        data = await tried(lambda: self._fetch(dispatch, "payload", wanted.bytes), _FETCH_S)
        if not _is(data, wanted):
            raise NotKept("altered", "the payload is not the one that was accepted")
        return data

    async def called(self, dispatch: WorkerDispatchMessage, invocation_id: str, wanted: Reference) -> bytes:
        """The result of an invocation that this attempt made."""
        path = CALLED_PATH.format(invocation=quote(invocation_id, safe=""))
        async with self._called:
            data = await tried(lambda: self._fetch(dispatch, path, wanted.bytes), _FETCH_S)
        if not _is(data, wanted):
            raise NotKept("altered", "the result is not the one that was told")
        return data

    async def store(
        self, dispatch: WorkerDispatchMessage, content: Callable[[], tuple[int, Iterator[bytes]]], content_type: str
    ) -> Reference:
        """Keep a result's body; `content` makes it anew for every try."""
        async with self._stored:
            return await tried(lambda: self._put(dispatch, content, content_type), _STORE_S)

    def open(
        self,
        method: str,
        dispatch: WorkerDispatchMessage,
        path: str,
        *,
        data: AsyncIterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """One request below the attempt; `path` is quoted."""
        return self._session.request(
            method,
            URL(self._path(dispatch) + path, encoded=True),
            data=data,
            headers={**_bearer(dispatch), **(headers or {})},
            timeout=_patience(),
            allow_redirects=False,
        )

    async def _fetch(self, dispatch: WorkerDispatchMessage, path: str, bytes_max: int) -> bytes:
        async with self._session.get(
            self._path(dispatch) + path, headers=_bearer(dispatch), timeout=_patience(), allow_redirects=False
        ) as answer:
            _check(answer.status)
            data = bytearray()
            async for piece in answer.content.iter_any():
                data += piece
                if len(data) > bytes_max:
                    break
            return bytes(data)

    async def _put(
        self, dispatch: WorkerDispatchMessage, content: Callable[[], tuple[int, Iterator[bytes]]], content_type: str
    ) -> Reference:
        length, pieces = content()
        headers = {**_bearer(dispatch), "Content-Type": content_type, "Content-Length": str(length)}
        digest = hashlib.sha256()
        async with self._session.put(
            self._path(dispatch) + "result",
            data=_sent(pieces, digest.update),
            headers=headers,
            timeout=_patience(),
            allow_redirects=False,
        ) as answer:
            _check(answer.status)
            kept = _reference.decode(await answer.content.read(_ANSWER_BYTES_MAX))
        if (kept.bytes, kept.sha256) != (length, digest.hexdigest()):
            raise NotKept("altered", "the gateway kept something else than it was given")
        return kept

    def _path(self, dispatch: WorkerDispatchMessage) -> str:
        project, invocation = quote(dispatch.projectID, safe=""), quote(dispatch.invocationID, safe="")
        return self._url + ATTEMPTS_PATH.format(project=project, invocation=invocation)


def _is(data: bytes, wanted: Reference) -> bool:
    return len(data) == wanted.bytes and hashlib.sha256(data).hexdigest() == wanted.sha256


async def _sent(pieces: Iterator[bytes], seen: Callable[[bytes], object]) -> AsyncIterator[bytes]:
    for piece in pieces:
        seen(piece)
        yield piece


def _bearer(dispatch: WorkerDispatchMessage) -> dict[str, str]:
    return {"Authorization": f"Bearer {dispatch.token}"}


def _patience() -> aiohttp.ClientTimeout:
    """However large it is, as long as it moves."""
    return aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_STALLED_S)


def _check(status: int) -> None:
    if status == _TOO_LARGE:
        raise NotKept("too_large", "the gateway says that it is too large")
    if status in _REFUSED and status not in _AGAIN:
        raise NotKept("refused", f"the gateway refused with status {status}")
    if status not in _OK:
        raise aiohttp.ClientError(f"status {status}")


async def tried(act: Callable[[], Awaitable[T]], seconds: float) -> T:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    for attempt in range(1000):
        try:
            return await act()
        except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE) as error:
            wait_s = backoff_s(attempt, base_s=0.1, cap_s=5.0)
            if loop.time() + wait_s > until:
                raise NotKept("away", f"the gateway did not answer: {type(error).__name__}") from error
        await asyncio.sleep(wait_s)
    raise NotKept("away", "the gateway did not answer")
