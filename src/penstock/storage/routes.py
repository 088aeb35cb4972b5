"""Objects over REST: bodies stream both ways, and a key is the rest of the path."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, cast

from litestar import Request, Response, Router, delete, get, head, put
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody, Schema
from litestar.params import QueryParameter
from litestar.response import Stream

from penstock.kit import paging
from penstock.kit.caller import Caller
from penstock.kit.edge import Head, Rejected
from penstock.kit.errors import Invalid
from penstock.kit.paging import PageQuery
from penstock.storage import bodies
from penstock.storage.errors import ObjectExists, TooLarge
from penstock.storage.model import Object, content_type, parse_range
from penstock.storage.service import Objects, Wanted
from penstock.wire import rest

#: The path of all objects, as requests have it.
PREFIX: Final = "/api/v1/objects/"
_HEX: Final = re.compile(r"[0-9A-Fa-f]{64}")
_DIGEST: Final = re.compile(r"sha-256=:?([A-Za-z0-9+/]{43}=):?", re.IGNORECASE)
#: Objects are anybody's bytes: a browser that is led to one shall not run it as a page of this server.
_INERT: Final = {"Content-Security-Policy": "sandbox; default-src 'none'", "Content-Disposition": "attachment"}
_ANY_BYTES: Final = {"application/octet-stream": OpenAPIMediaType(schema=Schema())}


@dataclass
class _Upload(Operation):
    """Says in the contract that the body is the object itself."""

    def __post_init__(self) -> None:
        """After Litestar, which finds no body among the parameters."""
        self.request_body = RequestBody(content=_ANY_BYTES, required=True)


@dataclass
class _Download(Operation):
    """Says in the contract that the answer is the object itself, or a part of it."""

    def __post_init__(self) -> None:
        """In the place of what Litestar makes of a stream."""
        answer = OpenAPIResponse(description="", content=_ANY_BYTES)
        self.responses = {**(self.responses or {}), "200": answer, "206": answer}


def router(objects: Objects) -> Router:
    """All routes of objects, below /api/v1."""
    return Router(path="/", route_handlers=[*_writes(objects), *_reads(objects)], tags=["storage"])


def _writes(objects: Objects) -> list[HTTPRouteHandler]:
    @put("/objects/{key:path}", operation_id="putObject", opt={"action": "objects.write"}, operation_class=_Upload)
    async def put_object(caller: Caller, request: Request[Any, Any, Any], key: str) -> rest.Object:  # noqa: ARG001
        """Put an object: the body is its content, of any type. It replaces one of the same key, whole or not at all.
        `If-None-Match: *` refuses to replace; `Content-SHA256` (hexadecimal) or `Content-Digest` is checked."""
        caller.require("objects.write")
        try:
            made = await objects.put(
                caller.project_id,
                _key(request),
                bodies.chunks(request.receive),
                actor=caller.actor,
                wanted=_wanted(request),
            )
        except ObjectExists as error:
            raise Rejected(412, error.code, error.detail) from error
        except TooLarge as error:
            raise Rejected(413, error.code, error.detail) from error
        return _shown(made)

    @delete("/objects/{key:path}", operation_id="deleteObject", opt={"action": "objects.write"})
    async def delete_object(caller: Caller, request: Request[Any, Any, Any], key: str) -> None:  # noqa: ARG001
        """Delete an object."""
        caller.require("objects.write")
        await objects.delete(caller.project_id, _key(request), actor=caller.actor)

    return [put_object, delete_object]


def _reads(objects: Objects) -> list[HTTPRouteHandler]:
    @get("/objects/{key:path}", operation_id="getObject", operation_class=_Download)
    async def get_object(caller: Caller, request: Request[Any, Any, Any], key: str) -> Stream:  # noqa: ARG001
        """An object's content. `Range` asks for one part of it; HEAD for its headers alone."""
        caller.require("objects.read")
        found = await objects.find(caller.project_id, _key(request))
        first, end = _part(request.headers, found)
        download = await objects.read(found, first, end)
        headers = _headers(found, end - first)
        if end - first == found.size:
            return Stream(download.chunks, headers=headers)
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{found.size}"
        return Stream(download.chunks, headers=headers, status_code=206)

    @head("/objects/{key:path}", include_in_schema=False)
    async def head_object(caller: Caller, request: Request[Any, Any, Any], key: str) -> Response[None]:  # noqa: ARG001
        """What GET would say without the content."""
        caller.require("objects.read")
        found = await objects.find(caller.project_id, _key(request))
        return Response(content=None, headers=_headers(found, found.size))

    @get("/objects", operation_id="listObjects")
    async def list_objects(
        caller: Caller,
        page: PageQuery,
        prefix: Annotated[str, QueryParameter(description="Only keys that begin so.")] = "",
        delimiter: Annotated[
            str, QueryParameter(description="`/` shows everything below a slash, after the prefix, as one entry.")
        ] = "",
    ) -> rest.ObjectPage:
        """The project's objects by key."""
        caller.require("objects.read")
        if delimiter not in ("", "/"):
            raise Invalid("delimiter must be /, or left out", field="delimiter")
        found = await objects.page(
            caller.project_id, prefix=prefix, after=_after(page), limit=page.limit, grouped=bool(delimiter)
        )
        cursor = paging.encode_cursor("object", found.after) if found.after else None
        return rest.ObjectPage(
            items=[_shown(each) for each in found.objects], prefixes=found.prefixes, next_cursor=cursor
        )

    return [get_object, head_object, list_objects]


def _key(request: Request[Any, Any, Any]) -> str:
    """As it was sent: the router's own parameter has lost doubled and trailing slashes, which a key may not have."""
    return _edge(request).path.removeprefix(PREFIX)


def _edge(request: Request[Any, Any, Any]) -> Head:
    return cast("dict[str, Any]", request.scope)["edge"]


def _wanted(request: Request[Any, Any, Any]) -> Wanted:
    edge = _edge(request)
    only_new = request.headers.get("if-none-match")
    if only_new not in (None, "*"):
        raise Invalid("If-None-Match can only be *", field="If-None-Match")
    kind = content_type(edge.content_type.decode("latin-1"))
    if kind is None:
        raise Invalid("Content-Type must look like type/subtype", field="Content-Type")
    return Wanted(
        size=None if edge.transfer_encoding else int(edge.content_length or 0),
        sha256=_digest(request.headers),
        content_type=kind,
        only_new=only_new is not None,
    )


def _digest(headers: Mapping[str, str]) -> bytes | None:
    if text := headers.get("content-sha256"):
        if not _HEX.fullmatch(text):
            raise Invalid("Content-SHA256 must be 64 hexadecimal digits", field="Content-SHA256")
        return bytes.fromhex(text)
    for name in ("Content-Digest", "Digest"):
        if text := headers.get(name.lower()):
            match = _DIGEST.fullmatch(text.strip())
            if match is None:
                raise Invalid(f"{name} must be sha-256 with its value in base64", field=name)
            try:
                return base64.b64decode(match[1], validate=True)
            except binascii.Error as error:
                raise Invalid(f"{name} is not base64", field=name) from error
    return None


def _part(headers: Mapping[str, str], found: Object) -> tuple[int, int]:
    """First byte and the one after the last. A range is only good for the object that it was meant for."""
    asked = headers.get("range", "")
    if headers.get("if-range", _etag(found)) != _etag(found):
        asked = ""
    part = parse_range(asked, found.size) if asked else None
    if part is None:
        return 0, found.size
    if part[0] == part[1]:
        raise Rejected(416, "range_not_satisfiable", f"the object has {found.size} bytes", close=False)
    return part


def _headers(found: Object, length: int) -> dict[str, Any]:
    return {
        "Content-Type": found.content_type,
        "Content-Length": str(length),
        "Accept-Ranges": "bytes",
        "ETag": _etag(found),
        "Content-SHA256": found.sha256.hex(),
        "Last-Modified": found.created_at.strftime("%a, %d %b %Y %H:%M:%S GMT"),
        **_INERT,
    }


def _etag(found: Object) -> str:
    return f'"{found.sha256.hex()}"'


def _after(page: PageQuery) -> str:
    if page.cursor is None:
        return ""
    match paging.decode_cursor(page.cursor):
        case ["object", str(after)]:
            return after
        case _:
            raise Invalid("invalid cursor", field="cursor")


def _shown(found: Object) -> rest.Object:
    return rest.Object(
        key=found.key,
        size=found.size,
        sha256=found.sha256.hex(),
        content_type=found.content_type,
        created_at=found.created_at,
        created_by=found.created_by,
    )
