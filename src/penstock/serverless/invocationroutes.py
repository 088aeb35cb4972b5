"""Invocations over REST: the source's route, and what it lacks: map, status, list, result, cancel, retry, events."""

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from litestar import MediaType, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import Stream

from penstock.kit import paging
from penstock.kit.caller import Caller
from penstock.kit.errors import Invalid
from penstock.kit.idempotency import Once
from penstock.kit.paging import PageQuery
from penstock.serverless import queries, schemas
from penstock.serverless.errors import NoInvocation
from penstock.serverless.following import WAIT_S_MAX
from penstock.serverless.model import State
from penstock.serverless.service import invocations
from penstock.serverless.service.functions import check_webhook
from penstock.serverless.service.invocations import Shown
from penstock.wire import rest
from penstock.wire.rest import Data, InvocationAck, InvocationOutcome
from penstock.wire.serverless import Result

if TYPE_CHECKING:
    from penstock.serverless.routes import Parts

_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: Results are anybody's bytes: a browser that is led to one shall not run it as a page of this server.
_INERT: Final = {"Content-Security-Policy": "sandbox; default-src 'none'", "Content-Disposition": "attachment"}


def handlers(parts: "Parts") -> list[HTTPRouteHandler]:
    """All of them."""
    return [*_sending(parts), *_reading(parts), *_ending(parts), *_streams(parts)]


def _sending(parts: "Parts") -> list[HTTPRouteHandler]:
    @post(
        "/serverless/invocations",
        operation_id="createInvocation",
        opt={"action": "functions.invoke"},
        status_code=202,
        responses={
            200: ResponseSpec(data_container=Data[InvocationOutcome] | Data[InvocationAck], generate_examples=False)
        },
    )
    async def create_invocation(
        caller: Caller, once: Once | None, data: rest.InvocationRequest
    ) -> Response[Data[InvocationAck]]:
        """Invoke a function. `async` is answered with 202, or 200 if the id came before; `sync` with 200 and the
        result, or with 202 when it was not there in time. The same id with another payload is a conflict."""
        if data.webhook is not None:
            caller.require("functions.invoke")
            await check_webhook(parts.functions.outward, data.webhook)
        if once is not None and data.invocationID is None:
            data = msgspec.structs.replace(data, invocationID=f"inv-{_of_key(once)}")
        answer = await parts.invoker.invoke(caller, data)
        if isinstance(answer, Result):
            return _json(Data(data=schemas.outcome(answer, parts.urls)), 200)
        return _json(Data(data=answer), 200 if answer.duplicate else 202)

    @post("/functions/{function:str}/map", operation_id="mapFunction", opt={"action": "functions.invoke"})
    async def map_function(
        caller: Caller, once: Once | None, function: str, data: rest.MapCreate
    ) -> Response[rest.MapCreated]:
        """Invoke a function once for each payload, asynchronously."""
        if once is not None and data.id is None:
            data = msgspec.structs.replace(data, id=f"map-{_of_key(once)}")
        return _json(await parts.invoker.map(caller, function, data), 201)

    return [create_invocation, map_function]


def _reading(parts: "Parts") -> list[HTTPRouteHandler]:
    urls = parts.urls

    @get("/invocations", operation_id="listInvocations")
    async def list_invocations(
        caller: Caller,
        page: PageQuery,
        function: Annotated[str | None, QueryParameter(required=False, max_length=63)] = None,
        invocation_state: Annotated[str | None, QueryParameter(name="state", required=False, enum=list(State))] = None,
    ) -> rest.Page[rest.Invocation]:
        """The project's invocations without their results, newest first."""
        if invocation_state is not None and invocation_state not in list(State):
            raise Invalid(f"state must be one of {', '.join(State)}", field="state")
        before = queries.number(page, "iv")
        async with parts.db.read() as conn:
            found = await invocations.page(
                conn,
                caller,
                function=function.lower() if function else None,
                state=invocation_state,
                before=before,
                limit=page.limit + 1,
            )
        shown = found[: page.limit]
        cursor = paging.encode_cursor("iv", shown[-1].row.seq) if len(found) > page.limit else None
        return rest.Page(items=[schemas.invocation(each, urls) for each in shown], next_cursor=cursor)

    @get("/invocations/{invocation_id:str}", operation_id="getInvocation")
    async def get_invocation(
        caller: Caller,
        invocation_id: str,
        wait_s: Annotated[
            float, QueryParameter(ge=0, le=WAIT_S_MAX, description="Answer when it has ended, or after so long.")
        ] = 0,
    ) -> rest.Invocation:
        """One invocation: its state, why it waits, its result or where that is."""
        return schemas.invocation(await parts.followers.wait(caller, _id(invocation_id), wait_s), urls)

    @get(
        "/invocations/{invocation_id:str}/result",
        operation_id="getInvocationResult",
        media_type="application/octet-stream",
    )
    async def get_result(caller: Caller, invocation_id: str) -> Stream:
        """The answer of a handler that succeeded, byte for byte, with the handler's own Content-Type. 409
        `serverless.not_finished` before the end; 409 `serverless.no_result` with the error when it did not succeed."""
        found = await parts.results.open(caller, _id(invocation_id))
        headers = {"Content-Type": _header(found.content_type), "Content-Length": str(found.size), **_INERT}
        return Stream(found.chunks, headers=headers)

    return [list_invocations, get_invocation, get_result]


def _ending(parts: "Parts") -> list[HTTPRouteHandler]:
    urls = parts.urls

    @post("/invocations/{invocation_id:str}/cancel", operation_id="cancelInvocation", status_code=200)
    async def cancel_invocation(caller: Caller, invocation_id: str) -> rest.Invocation:
        """Cancel it: what waits never runs, what runs is stopped. One that has ended stays as it is."""
        done = Shown(row=await parts.cancel(caller, _id(invocation_id)), waiting_for="")
        return schemas.invocation(done, urls)

    @post("/invocations/{invocation_id:str}/retry", operation_id="retryInvocation", opt={"action": "functions.invoke"})
    async def retry_invocation(caller: Caller, once: Once | None, invocation_id: str) -> Response[rest.Invocation]:
        """Send the same payload again, as an invocation of its own."""
        made = await parts.again.retry(caller, _id(invocation_id), once)
        async with parts.db.read() as conn:
            return _json(schemas.invocation(await invocations.get(conn, caller, made), urls), 201)

    return [cancel_invocation, retry_invocation]


def _streams(parts: "Parts") -> list[HTTPRouteHandler]:
    @get("/invocations/{invocation_id:str}/events", operation_id="streamInvocation", media_type="text/event-stream")
    async def stream_invocation(
        caller: Caller,
        invocation_id: str,
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID", required=False)] = None,
    ) -> Stream:
        """What the invocation says, as server-sent events: `output` with an OutputLine for each line, report and chunk,
        and at last `end` with the Invocation. `Last-Event-ID` resumes after that event."""
        wanted, after = _id(invocation_id), queries.attempt_and_number(last_event_id)
        async with parts.db.read() as conn:
            await invocations.get(conn, caller, wanted)
        parts.followers.admit(caller)
        return queries.stream(parts.followers.follow(caller, wanted, after))

    return [stream_invocation]


def _id(text: str) -> str:
    """The id, or NotFound: nothing can have an id of another shape."""
    if not _ID.fullmatch(text):
        raise NoInvocation.named(text)
    return text


def _header(content_type: str) -> str:
    """What a handler said may be anything; a header may not."""
    return content_type if content_type.isascii() and content_type.isprintable() else "application/octet-stream"


def _of_key(once: Once) -> str:
    """An id that is the same for the same Idempotency-Key of the same caller."""
    return hashlib.sha256(f"{once.scope} {once.key}".encode()).hexdigest()[:32]


def _json(content: Any, status: int) -> Response[Any]:
    return Response(content=msgspec.json.encode(content), status_code=status, media_type=MediaType.JSON)
