"""Objects of the project, for handlers: a question comes as a frame, is asked of the gateway with the token of the
attempt, and answered to the framework.

A read, a list and a delete are asked again while the gateway is away. An upload is one request to the gateway, whose
parts come one by one; it is not repeated, and ends with its attempt.
"""

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from penstock.kit.telemetry import logger
from penstock.node.errors import NodeError
from penstock.node.sidecar.framework import Framework
from penstock.node.sidecar.gateway import Attempts, NotKept, tried
from penstock.wire.serverless import ANSWER_PATH, WorkerDispatchMessage
from penstock.wire.unitobjects import (
    OBJECTS_PATH,
    SHA256_HEADER,
    SIZE_HEADER,
    TYPE_HEADER,
    ObjectAnswer,
    ObjectAsk,
    ObjectEntry,
    ObjectPage,
)
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
_encode: Final = msgspec.json.Encoder().encode
_entry: Final = msgspec.json.Decoder(ObjectEntry)
_page: Final = msgspec.json.Decoder(ObjectPage)
#: Questions of one worker without an answer, and uploads that it has begun.
_OPEN_MAX: Final = 32
_UPLOADS_MAX: Final = 8
#: An upload whose handler sends nothing for so long is given up.
_IDLE_S: Final = 25.0
_ASK_S: Final = 30.0
_ANSWER_S: Final = 10.0
_TELL_AGAIN_S: Final = 1.0
_ERROR_BYTES_MAX: Final = 64 << 10
_PAGE_BYTES_MAX: Final = 8 << 20
_SIZE_DIGITS_MAX: Final = 18
_OK: Final = range(200, 300)
_AWAY: Final = (502, 503, 504)


class Unanswered(NodeError):
    """The gateway said no; `code` and `detail` are for the handler."""


class _Said(msgspec.Struct, frozen=True):
    code: str = "error"
    message: str = ""


class _Refusal(msgspec.Struct, frozen=True):
    error: _Said = _Said()


_refusal: Final = msgspec.json.Decoder(_Refusal)


@dataclass(eq=False, slots=True)
class _Upload:
    """Parts on their way into one request. `result` is its end, whatever that is."""

    dispatch: WorkerDispatchMessage
    parts: "asyncio.Queue[bytes | None]" = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    result: "asyncio.Task[ObjectEntry] | None" = None

    async def chunks(self) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout(_IDLE_S):
                part = await self.parts.get()
            if part is None:
                return
            yield part


class Objects:
    """The questions of one worker's handlers."""

    def __init__(self, framework: Framework, gateway: Attempts) -> None:
        self._framework = framework
        self._gateway = gateway
        self._open: dict[asyncio.Task[None], WorkerDispatchMessage] = {}
        self._uploads: dict[str, _Upload] = {}

    def ask(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> None:
        """Find the answer, and tell it."""
        if len(self._open) >= _OPEN_MAX:
            refusal = ObjectAnswer(call=asked.call, code="busy", error="too many objects are asked for at once")
            self._spawn(dispatch, self._tell_once(refusal))
        else:
            self._spawn(dispatch, self._answer(dispatch, asked))

    def forget(self, dispatch: WorkerDispatchMessage) -> None:
        """The attempt is over: nobody waits, and what was only begun to be written is not written."""
        for task in [task for task, owner in self._open.items() if owner is dispatch]:
            task.cancel()
        for name in [name for name, upload in self._uploads.items() if upload.dispatch is dispatch]:
            self._give_up(name)

    def close(self) -> None:
        """Nobody waits any more."""
        for task in list(self._open):
            task.cancel()
        for name in list(self._uploads):
            self._give_up(name)

    async def _answer(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> None:
        try:
            answer = await self._do(dispatch, asked)
        except Unanswered as error:
            answer = ObjectAnswer(call=asked.call, code=error.code, error=error.detail)
        except NotKept as error:
            answer = ObjectAnswer(call=asked.call, code=error.code, error=error.detail)
        while True:
            if await self._tell(answer):
                break
            # The handler keeps its framework from listening.
            await asyncio.sleep(_TELL_AGAIN_S)

    async def _do(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> ObjectAnswer:
        match asked.op:
            case "read":
                return await tried(lambda: self._read(dispatch, asked), _ASK_S)
            case "list":
                page = await tried(lambda: self._list(dispatch, asked), _ASK_S)
                return ObjectAnswer(call=asked.call, page=page)
            case "delete":
                await tried(lambda: self._delete(dispatch, asked), _ASK_S)
                return ObjectAnswer(call=asked.call)
            case "write":
                return ObjectAnswer(call=asked.call, entry=await self._write(dispatch, asked))
            case "abort":
                self._give_up(asked.upload)
                return ObjectAnswer(call=asked.call)

    async def _read(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> ObjectAnswer:
        query = urlencode({"offset": asked.offset, "length": asked.length, "sha256": asked.sha256})
        async with self._gateway.open("GET", dispatch, f"{_path(asked.key)}?{query}") as answer:
            await _check(answer)
            data = await _bounded(answer, asked.length)
            entry = ObjectEntry(
                key=asked.key,
                size=_size(answer),
                sha256=answer.headers.get(SHA256_HEADER, ""),
                contentType=answer.headers.get(TYPE_HEADER, ""),
            )
        return ObjectAnswer(call=asked.call, entry=entry, data=base64.b64encode(data).decode())

    async def _list(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> ObjectPage:
        query = urlencode({"prefix": asked.prefix, "after": asked.after})
        async with self._gateway.open("GET", dispatch, f"{OBJECTS_PATH}?{query}") as answer:
            await _check(answer)
            return _page.decode(await _bounded(answer, _PAGE_BYTES_MAX))

    async def _delete(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> None:
        async with self._gateway.open("DELETE", dispatch, _path(asked.key)) as answer:
            await _check(answer)

    async def _write(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> ObjectEntry | None:
        """Take a part; the object when it was the last."""
        try:
            part = base64.b64decode(asked.data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise Unanswered("malformed", "the part is not base64") from error
        upload = self._upload(dispatch, asked)
        assert upload.result is not None
        for each in (part, None) if asked.last else (part,):
            if each != b"":
                await self._pass_on(upload, each)
        if upload.result.done() or asked.last:
            self._uploads.pop(asked.upload, None)
            return await _outcome(upload.result)
        return None

    async def _pass_on(self, upload: _Upload, part: bytes | None) -> None:
        """Into the request; one that has ended already takes nothing more."""
        assert upload.result is not None
        putting = asyncio.ensure_future(upload.parts.put(part))
        try:
            await asyncio.wait({putting, upload.result}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()

    def _upload(self, dispatch: WorkerDispatchMessage, asked: ObjectAsk) -> _Upload:
        found = self._uploads.get(asked.upload)
        if found is not None:
            if found.dispatch is not dispatch:
                raise Unanswered("not_found", "no such upload")
            return found
        if len(self._uploads) >= _UPLOADS_MAX:
            raise Unanswered("busy", f"a worker puts at most {_UPLOADS_MAX} objects at once")
        made = _Upload(dispatch)
        made.result = asyncio.get_running_loop().create_task(self._put(made, asked))
        # Looked at when the next part comes; that may be never.
        made.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._uploads[asked.upload] = made
        return made

    async def _put(self, upload: _Upload, asked: ObjectAsk) -> ObjectEntry:
        path = _path(asked.key) + ("?only_new=1" if asked.onlyNew else "")
        headers = {"Content-Type": asked.contentType}
        async with self._gateway.open("PUT", upload.dispatch, path, data=upload.chunks(), headers=headers) as answer:
            await _check(answer)
            return _entry.decode(await _bounded(answer, _ERROR_BYTES_MAX))

    def _give_up(self, name: str) -> None:
        upload = self._uploads.pop(name, None)
        if upload is not None and upload.result is not None:
            upload.result.cancel()

    async def _tell_once(self, answer: ObjectAnswer) -> None:
        await self._tell(answer)

    async def _tell(self, answer: ObjectAnswer) -> bool:
        """Whether the framework has heard it."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._framework.ask("POST", ANSWER_PATH, _encode(answer))
        except (NodeError, TimeoutError) as error:
            _log.info("object_answer_unheard", error=str(error))
            return False
        return True

    def _spawn(self, dispatch: WorkerDispatchMessage, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._open[task] = dispatch
        task.add_done_callback(lambda done: self._open.pop(done, None))


def _path(key: str) -> str:
    return f"{OBJECTS_PATH}/{quote(key)}"


def _size(answer: aiohttp.ClientResponse) -> int:
    text = answer.headers.get(SIZE_HEADER, "")
    if not (text.isascii() and text.isdecimal()) or len(text) > _SIZE_DIGITS_MAX:
        raise Unanswered("malformed", "the gateway's answer does not say how large the object is")
    return int(text)


async def _bounded(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    data = bytearray()
    async for piece in answer.content.iter_any():
        data += piece
        if len(data) > bytes_max:
            raise Unanswered("malformed", "the gateway's answer is too large")
    return bytes(data)


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Pass an answer that is well. Unanswered has the gateway's words; a ClientError may be asked again."""
    if answer.status in _OK:
        return
    try:
        said = _refusal.decode(await answer.content.read(_ERROR_BYTES_MAX)).error
    except UNREADABLE:
        said = _Said()
    if answer.status in _AWAY:
        raise aiohttp.ClientError(f"status {answer.status}: {said.message}")
    raise Unanswered(said.code, said.message or f"the gateway refused with status {answer.status}")


async def _outcome(result: "asyncio.Task[ObjectEntry]") -> ObjectEntry:
    try:
        return await result
    except (aiohttp.ClientError, OSError, TimeoutError, *UNREADABLE) as error:
        raise Unanswered("away", f"the object was not stored: {type(error).__name__}") from error
