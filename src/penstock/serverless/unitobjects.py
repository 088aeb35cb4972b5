"""Objects of a project for its handlers, at the gateway: `/attempts/<project>/<invocation>/objects/<key>`.

The token of the attempt is the only credential, so a handler reaches the objects of its own project, while its attempt
counts. An upload that ends after its attempt has ended changes nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from aiohttp import hdrs, web

from penstock.kit import queries
from penstock.kit.errors import Invalid, NotFound
from penstock.serverless.errors import TooManyUploads
from penstock.serverless.ports import ProjectObjects
from penstock.serverless.store.attempts import Attempt
from penstock.wire.unitobjects import PAGE_MAX, READ_BYTES_MAX, SHA256_HEADER, SIZE_HEADER, TYPE_HEADER

#: Of one project at once, in this process.
UPLOADS_MAX: Final = 8
#: Without a byte for so long, an upload is given up; after a minute it must have kept up a pace.
_IDLE_S: Final = 30.0
_PATIENCE_S: Final = 60.0
_PACE_BYTES_S: Final = 4 << 10
_LIST_PARAMETERS: Final = ("prefix", "after")
_PARAMETERS: Final = {hdrs.METH_GET: ("offset", "length", "sha256"), hdrs.METH_PUT: ("only_new",)}
_encode = msgspec.json.Encoder().encode

Check = Callable[[], Awaitable[Attempt]]


class UnitObjects:
    """Answers for handlers. `check` says whose attempt it is, or raises that there is none any more."""

    def __init__(self, objects: ProjectObjects) -> None:
        self._objects = objects
        self._uploads: Counter[str] = Counter()

    async def serve(
        self, request: web.BaseRequest, project_id: str, key: str, query: str, check: Check
    ) -> web.StreamResponse:
        """One request; `key` is empty for the list."""
        asked = queries.read(query, _PARAMETERS.get(request.method, ()) if key else _LIST_PARAMETERS)
        attempt = await check()
        if not key:
            return await self._list(request, project_id, asked)
        match request.method:
            case hdrs.METH_GET:
                return await self._read(request, project_id, key, asked)
            case hdrs.METH_PUT:
                with self._counted(project_id):
                    return await self._write(request, project_id, key, asked, attempt, check)
            case hdrs.METH_DELETE:
                await self._objects.delete(project_id, key, by=attempt.created_by)
                return web.Response(status=204)
            case _:
                raise NotFound("no such route")

    async def _list(self, request: web.BaseRequest, project_id: str, asked: dict[str, str]) -> web.Response:
        if request.method != hdrs.METH_GET:
            raise NotFound("no such route")
        page = await self._objects.page(
            project_id, prefix=asked.get("prefix", ""), after=asked.get("after", ""), limit=PAGE_MAX
        )
        return web.Response(body=_encode(page), content_type="application/json")

    async def _read(
        self, request: web.BaseRequest, project_id: str, key: str, asked: dict[str, str]
    ) -> web.StreamResponse:
        offset, length = _number(asked, "offset", 1 << 50), _number(asked, "length", READ_BYTES_MAX)
        entry, size, chunks = await self._objects.read(
            project_id, key, offset=offset, length=length, sha256=asked.get("sha256", "")
        )
        headers = {hdrs.CONTENT_TYPE: "application/octet-stream", hdrs.CONTENT_LENGTH: str(size)}
        described = {SIZE_HEADER: str(entry.size), SHA256_HEADER: entry.sha256, TYPE_HEADER: entry.contentType}
        response = web.StreamResponse(headers=headers | described)
        await response.prepare(request)
        async for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        return response

    async def _write(
        self,
        request: web.BaseRequest,
        project_id: str,
        key: str,
        asked: dict[str, str],
        attempt: Attempt,
        check: Check,
    ) -> web.Response:
        entry = await self._objects.write(
            project_id,
            key,
            _paced(request, check),
            content_type=request.headers.get(hdrs.CONTENT_TYPE, ""),
            only_new=asked.get("only_new") == "1",
            by=attempt.created_by,
        )
        return web.Response(body=_encode(entry), content_type="application/json")

    @contextmanager
    def _counted(self, project_id: str) -> Iterator[None]:
        if self._uploads[project_id] >= UPLOADS_MAX:
            raise TooManyUploads(f"handlers of a project put at most {UPLOADS_MAX} objects at once", retry_after_s=2)
        self._uploads[project_id] += 1
        try:
            yield
        finally:
            self._uploads[project_id] -= 1
            if not self._uploads[project_id]:
                del self._uploads[project_id]


async def _paced(request: web.BaseRequest, check: Check) -> AsyncIterator[bytes]:
    """The body, from a sidecar that must keep up; at its end the attempt must still count."""
    began, size = time.monotonic(), 0
    while True:
        try:
            async with asyncio.timeout(_IDLE_S):
                chunk = await request.content.readany()
        except TimeoutError as error:
            raise Invalid(f"nothing of the body came for {_IDLE_S:g} s") from error
        size += len(chunk)
        if time.monotonic() - began > _PATIENCE_S + size / _PACE_BYTES_S:
            raise Invalid(f"the body comes slower than {_PACE_BYTES_S} bytes a second")
        if not chunk:
            break
        yield chunk
    await check()


def _number(asked: dict[str, str], name: str, most: int) -> int:
    text = asked.get(name, "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 16 or int(text) > most:
        raise Invalid(f"{name} must be a number up to {most}", field=name)
    return int(text)
