"""Functions at the gateway: `POST /f/<function>` for callers, `/attempts/…` for sidecars with large bodies.

A caller gets the handler's own answer: its status, type and body. Whatever else happened is an error in our envelope,
and the invocation's id stands in a header in any case.
"""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol
from urllib.parse import parse_qs, unquote

import msgspec
from aiohttp import hdrs, web

from penstock.kit import parsing, queries
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import Invalid, NotFound, Unauthenticated
from penstock.kit.exchanges import Exchange, Exchanges
from penstock.kit.telemetry import correlation_id
from penstock.serverless.errors import NoFunction
from penstock.serverless.following import Followers
from penstock.serverless.model import Function, Mode, State
from penstock.serverless.ports import Bytes
from penstock.serverless.service.drafting import Asked, function_name
from penstock.serverless.service.invocations import raw_body
from penstock.serverless.service.invoke import ACTION, Invoker
from penstock.serverless.store import attempts
from penstock.serverless.store.attempts import Attempt
from penstock.serverless.unitobjects import UnitObjects
from penstock.wire.rest import InvocationAck
from penstock.wire.serverless import PAYLOAD_BYTES_MAX, RESULT_BYTES_MAX, STRIPPED_HEADERS, TIMEOUT_S_MAX, Result
from penstock.wire.unreadable import UNREADABLE

FUNCTIONS: Final = "/f/"
ATTEMPTS: Final = "/attempts/"
PICKLE: Final = "application/vnd.penstock.pickle"
_ID: Final = "Penstock-Invocation-Id"
_STATE: Final = "Penstock-State"
_WAIT: Final = "Penstock-Wait"
_TIMEOUT_S_MIN: Final = 0.001
#: What a failure is to whoever speaks HTTP: the function's fault, not the caller's and not ours.
_STATUS: Final = {
    State.FAILED: 502,
    State.EXPIRED: 504,
    State.CANCELLED: 409,
    State.DEAD_LETTERED: 502,
}
#: What a handler's headers may be: others would break the answer, and are left out.
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r"[\t -~]+")
_encode = msgspec.json.Encoder().encode


class Keys(Protocol):
    """Who a credential is."""

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        """The caller."""
        ...


@dataclass(frozen=True, slots=True)
class _Call:
    """One call by HTTP: who calls which function, with what below its name."""

    caller: Caller
    function: Function
    path: str
    query: str
    exchange: Exchange


class FunctionEdge:
    """Answers requests of both kinds."""

    def __init__(
        self,
        db: Database,
        keys: Keys,
        invoker: Invoker,
        bytes_: Bytes,
        followers: Followers,
        objects: UnitObjects,
        exchanges: Exchanges,
    ) -> None:
        self._db = db
        self._keys = keys
        self._invoker = invoker
        self._bytes = bytes_
        self._followers = followers
        self._objects = objects
        self._exchanges = exchanges

    async def call(self, request: web.BaseRequest) -> web.StreamResponse:
        """`POST /f/<function>[/path]?mode=sync|async|stream`."""
        if request.method != hdrs.METH_POST:
            raise Invalid("call functions with POST", field="method")
        path, _, query = request.raw_path.removeprefix(FUNCTIONS).partition("?")
        text, _, rest = path.partition("/")
        caller = await self._keys.authenticate(
            request.headers.get(hdrs.AUTHORIZATION), request.headers.get("Penstock-Project")
        )
        caller.require(ACTION)
        function = await self._invoker.function(caller.project_id, function_name(unquote(text), caller.project_id))
        if function is None:
            raise NoFunction.named(caller.project_id, unquote(text))
        with self._exchanges.begin(lambda: caller) as exchange:
            return await self._invoke(request, _Call(caller, function, f"/{rest}", query, exchange))

    async def _invoke(self, request: web.BaseRequest, call: "_Call") -> web.StreamResponse:
        mode, caller = _mode(call.query), call.caller
        if mode is Mode.STREAM:
            caller.require("functions.read")
            self._followers.admit(caller)
        timeout_s = _timeout(request.headers.get("Penstock-Timeout"))
        asked = Asked(
            payload=await call.exchange.wait(partial(_payload, request)),
            id=_invocation_id(request),
            content_type=PICKLE if request.headers.get(hdrs.CONTENT_TYPE) == PICKLE else "application/json",
            mode=mode,
            headers=_passed_on(request),
            attributes={"method": "POST", "path": call.path, **({"query": call.query} if call.query else {})},
            timeout_s=timeout_s,
        )
        draft = await self._invoker.draft(caller, call.function, asked)
        wait_s = self._patience_s(request, timeout_s) if mode is Mode.SYNC else 0.0
        answer = await self._invoker.run(caller, draft, wait_s=wait_s)
        if mode is Mode.STREAM:
            return await self._stream(request, caller, draft.id)
        if isinstance(answer, InvocationAck):
            return _accepted(answer)
        return await self._result(request, call, answer)

    def _patience_s(self, request: web.BaseRequest, timeout_s: float | None) -> float:
        """How long the caller waits for the end: as it says, but no longer than callers do."""
        longest_s = self._invoker.limits.patience_s(timeout_s)
        asked = request.headers.get(_WAIT)
        return longest_s if asked is None else min(longest_s, _seconds(asked, _WAIT, at_least=0.0))

    async def _result(self, request: web.BaseRequest, call: "_Call", end: Result) -> web.StreamResponse:
        headers = {_ID: end.invocationID, _STATE: end.state, "X-Correlation-Id": correlation_id()}
        if end.state is not State.SUCCEEDED:
            return _failure(end, headers)
        kind = end.contentType if _VALUE.fullmatch(end.contentType) else "application/octet-stream"
        passed = {
            name: value
            for name, value in end.headers.items()
            if name.lower() not in _OURS and _NAME.fullmatch(name) and _VALUE.fullmatch(value)
        }
        # A status below 200 would say that the answer is still to come.
        status = max(end.statusCode, 200)
        if end.bodyRef is not None:
            size, chunks = await self._bytes.open(call.caller.project_id, end.bodyRef.key)
            headers |= passed | {hdrs.CONTENT_TYPE: kind, hdrs.CONTENT_LENGTH: str(size)}
            response = web.StreamResponse(status=status, headers=headers)
            return await _send(request, response, chunks, call.exchange)
        body = raw_body(bytes(end.body), content_type=end.contentType, encoding=end.encoding)
        headers |= passed | {hdrs.CONTENT_TYPE: kind}
        return web.Response(status=status, body=body, headers=headers)

    async def _stream(self, request: web.BaseRequest, caller: Caller, invocation_id: str) -> web.StreamResponse:
        headers = {
            hdrs.CONTENT_TYPE: "text/event-stream",
            hdrs.CACHE_CONTROL: "no-store",
            _ID: invocation_id,
            "X-Correlation-Id": correlation_id(),
        }
        events = self._followers.follow(caller, invocation_id, (0, -1))
        return await _send(request, web.StreamResponse(headers=headers), events)

    async def attempt(self, request: web.BaseRequest) -> web.StreamResponse:
        """`GET …/current`, `GET …/payload`, `GET …/calls/<invocation>`, `PUT …/result` and `…/objects/<key>` with the
        attempt's token."""
        path, _, query = request.raw_path.removeprefix(ATTEMPTS).partition("?")
        match [*map(unquote, path.split("/"))]:
            case project_id, invocation_id, "objects", *key:
                check = partial(self._current, request, project_id, invocation_id)
                return await self._objects.serve(request, project_id, "/".join(key), query, check)
            case pieces:
                queries.read(query, ())
                return await self._bodies(request, pieces)

    async def _bodies(self, request: web.BaseRequest, pieces: list[str]) -> web.StreamResponse:
        """Bodies that are too large for messages."""
        match request.method, *pieces:
            case hdrs.METH_GET, project_id, invocation_id, "current":
                await self._current(request, project_id, invocation_id)
                return web.Response(status=204)
            case hdrs.METH_GET, project_id, invocation_id, "payload":
                found = await self._current(request, project_id, invocation_id)
                return await self._give_payload(request, project_id, invocation_id, found)
            case hdrs.METH_GET, project_id, invocation_id, "calls", called_id:
                await self._current(request, project_id, invocation_id)
                return await self._give_called(request, project_id, invocation_id, called_id)
            case hdrs.METH_PUT, project_id, invocation_id, "result":
                found = await self._current(request, project_id, invocation_id)
            case _:
                raise NotFound("no such route")
        key = f"invocations/{invocation_id}/result-{found.attempt}"
        kept = await self._bytes.keep(project_id, key, _chunks(request), bytes_max=RESULT_BYTES_MAX)
        return web.Response(body=_encode(kept), content_type="application/json")

    async def _current(self, request: web.BaseRequest, project_id: str, invocation_id: str) -> Attempt:
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        try:
            secret = bytes.fromhex(token) if scheme.lower() == "bearer" else b""
        except ValueError:
            secret = b""
        async with self._db.read() as conn:
            found = await attempts.current(conn, project_id=project_id, invocation_id=invocation_id, token=secret)
        if found is None:
            raise Unauthenticated("this is not the token of the current attempt")
        return found

    async def _give_payload(
        self, request: web.BaseRequest, project_id: str, invocation_id: str, found: Attempt
    ) -> web.StreamResponse:
        if found.payload_ref is not None:
            return await self._give(request, project_id, found.payload_ref["key"])
        async with self._db.read() as conn:
            payload = await attempts.payload(conn, project_id=project_id, invocation_id=invocation_id)
        if payload is None:
            raise NotFound("the invocation has no payload")
        return web.Response(body=payload, content_type="application/octet-stream")

    async def _give_called(
        self, request: web.BaseRequest, project_id: str, parent_id: str, called_id: str
    ) -> web.StreamResponse:
        async with self._db.read() as conn:
            kept = await attempts.called(conn, project_id=project_id, parent_id=parent_id, invocation_id=called_id)
        if kept is None:
            raise NotFound("the attempt made no such call, or its result came with the answer")
        return await self._give(request, project_id, kept["key"])

    async def _give(self, request: web.BaseRequest, project_id: str, key: str) -> web.StreamResponse:
        size, chunks = await self._bytes.open(project_id, key)
        headers = {hdrs.CONTENT_TYPE: "application/octet-stream", hdrs.CONTENT_LENGTH: str(size)}
        return await _send(request, web.StreamResponse(headers=headers), chunks)


_OURS: Final = STRIPPED_HEADERS | {"content-length", "content-type", "date", "server", _ID.lower(), _STATE.lower()}


def _text(value: str) -> str:
    """Bytes of a header that are no text are shown as such."""
    return value.encode(errors="surrogateescape").decode(errors="replace")


def _mode(query: str) -> Mode:
    given = parse_qs(query).get("mode", ["sync"])[0]
    try:
        return Mode(given)
    except ValueError:
        raise Invalid("mode must be sync, async or stream", field="mode") from None


def _timeout(text: str | None) -> float | None:
    return None if text is None else _seconds(text, "Penstock-Timeout", at_least=_TIMEOUT_S_MIN)


def _seconds(text: str, header: str, *, at_least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not at_least <= value <= TIMEOUT_S_MAX:
        raise Invalid(f"{header} must be a number of seconds up to {TIMEOUT_S_MAX}", field=header)
    return value


def _invocation_id(request: web.BaseRequest) -> str | None:
    given = request.headers.get(_ID) or request.headers.get("Idempotency-Key")
    if given is None:
        return None
    if not 1 <= len(given) <= 64 or not given.isascii() or not given.replace("-", "").replace("_", "").isalnum():
        raise Invalid(f"{_ID} must be 1 to 64 letters, digits, - and _", field=_ID)
    return given


def _passed_on(request: web.BaseRequest) -> dict[str, str]:
    """Headers of the caller's own; what proxies and browsers add stays here."""
    found = {
        name: _text(value)
        for name, value in request.headers.items()
        if name.lower().startswith("x-") and not name.lower().startswith(("x-forwarded-", "x-real-", "x-correlation-"))
    }
    if len(found) > 64 or sum(map(len, found.values())) > 8192:
        raise Invalid("headers: at most 64 of the form X-…, with 8192 characters in all", field="headers")
    return found


async def _payload(request: web.BaseRequest) -> bytes:
    """The body, which must be JSON; none is null."""
    if request.content_length is not None and request.content_length > PAYLOAD_BYTES_MAX:
        raise Invalid(f"body: max {PAYLOAD_BYTES_MAX} bytes", field="body")
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > PAYLOAD_BYTES_MAX:
            raise Invalid(f"body: max {PAYLOAD_BYTES_MAX} bytes", field="body")
    return await parsing.parse(len(body), _checked, body or bytearray(b"null"))


def _checked(body: bytearray) -> bytes:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
        body.decode()
    except UNREADABLE as error:
        raise Invalid("body must be JSON", field="body") from error
    return bytes(body)


def _failure(end: Result, headers: dict[str, str]) -> web.Response:
    detail = {
        "code": end.failureClass or end.state,
        "message": end.error or f"the invocation is {end.state}",
        "correlation_id": correlation_id(),
        "invocation_id": end.invocationID,
        "state": end.state,
        "error_type": end.errorType,
        "traceback": end.traceback,
    }
    status = end.statusCode if end.state is State.FAILED and 400 <= end.statusCode <= 599 else _STATUS[end.state]
    return web.Response(
        status=status, body=_encode({"error": detail}), content_type="application/json", headers=headers
    )


def _accepted(ack: InvocationAck) -> web.Response:
    headers = {_ID: ack.invocationID, _STATE: ack.state, hdrs.LOCATION: f"/api/v1/invocations/{ack.invocationID}"}
    return web.Response(status=202, body=_encode(ack), content_type="application/json", headers=headers)


async def _chunks(request: web.BaseRequest) -> AsyncIterator[bytes]:
    async for chunk in request.content.iter_any():
        yield chunk


async def _send(
    request: web.BaseRequest,
    response: web.StreamResponse,
    chunks: AsyncIterator[bytes],
    exchange: Exchange | None = None,
) -> web.StreamResponse:
    """All of it; a credential that is revoked meanwhile ends the exchange in its middle."""
    await response.prepare(request)
    async for chunk in chunks:
        write = partial(response.write, chunk)
        await (write() if exchange is None else exchange.wait(write))
    await response.write_eof()
    return response
