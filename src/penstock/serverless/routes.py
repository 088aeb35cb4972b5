"""Functions over REST: deploy, show, roll back, delete; what they said; dead letters; the callbacks' key."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from litestar import Response, Router, delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, Schema
from litestar.params import HeaderParameter, QueryParameter

from penstock.kit import http, paging
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.paging import PageQuery
from penstock.serverless import invocationroutes, queries, schemas, unitroutes
from penstock.serverless.following import Followers
from penstock.serverless.schemas import Urls
from penstock.serverless.service import functions, invocations
from penstock.serverless.service.callbacks import Signing
from penstock.serverless.service.cancel import Cancel
from penstock.serverless.service.functions import Functions
from penstock.serverless.service.invocations import Again, Results
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.service.units import Units
from penstock.serverless.store import reads
from penstock.serverless.store.reads import Lines
from penstock.wire import rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the routes are made of."""

    db: Database
    functions: Functions
    invoker: Invoker
    cancel: Cancel
    results: Results
    again: Again
    followers: Followers
    signing: Signing
    urls: Urls


def router(parts: Parts) -> Router:
    """All routes of functions, below /api/v1."""
    handlers = [
        *_reading(parts),
        *_changing(parts),
        *_logs(parts),
        *_dead_letters(parts),
        *invocationroutes.handlers(parts),
        *unitroutes.handlers(parts.db, Units(parts.functions), parts.cancel),
    ]
    return Router(path="/", route_handlers=handlers, tags=["functions"])


def _reading(parts: Parts) -> list[HTTPRouteHandler]:
    db, urls = parts.db, parts.urls

    @get("/functions", operation_id="listFunctions")
    async def list_functions(caller: Caller, page: PageQuery) -> rest.Page[rest.Function]:
        """The project's functions by name."""
        async with db.read() as conn:
            found = await functions.page(conn, caller, after=queries.text(page, "fn") or "", limit=page.limit + 1)
        items = [schemas.function(each, urls) for each in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("fn", items[-1].name) if more else None)

    @get("/functions/{function:str}", operation_id="getFunction")
    async def get_function(caller: Caller, function: str) -> rest.Function:
        """One function: its definition, its workers and its queue."""
        async with db.read() as conn:
            return schemas.function(await functions.get(conn, caller, function), urls)

    @get("/functions/{function:str}/versions", operation_id="listFunctionVersions")
    async def list_versions(caller: Caller, page: PageQuery, function: str) -> rest.Page[rest.FunctionVersion]:
        """What the function is and was, newest first."""
        before = queries.number(page, "fv")
        async with db.read() as conn:
            found = await functions.versions(conn, caller, function, before=before, limit=page.limit + 1)
        items = [schemas.version(each) for each in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("fv", items[-1].number) if more else None)

    @get("/functions/{function:str}/workers", operation_id="listFunctionWorkers")
    async def list_workers(caller: Caller, page: PageQuery, function: str) -> rest.Page[rest.FunctionWorker]:
        """The workers that start, serve or drain."""
        after = queries.text(page, "fw") or ""
        async with db.read() as conn:
            found = await functions.workers(conn, caller, function, after=after, limit=page.limit + 1)
        items = [schemas.worker(each) for each in found[: page.limit]]
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("fw", items[-1].name) if more else None)

    @get("/serverless/signing-key", operation_id="getSigningKey")
    async def get_signing_key(caller: Caller) -> rest.SigningKey:
        """What the project's callbacks are signed with: receivers verify `Penstock-Signature` with it."""
        async with db.read() as conn:
            return await parts.signing.show(conn, caller)

    return [list_functions, get_function, list_versions, list_workers, get_signing_key]


def _changing(parts: Parts) -> list[HTTPRouteHandler]:
    db, urls = parts.db, parts.urls

    @put("/functions/{function:str}", operation_id="putFunction", opt={"action": "functions.write"})
    async def put_function(caller: Caller, function: str, data: rest.FunctionPut) -> rest.Function:
        """Deploy a function: a new version, unless this is what the current one is. Calls go to it as soon as it has a
        worker; what runs on workers of the version before finishes there."""
        name = await parts.functions.check(caller, function, data)
        async with db.transaction() as tx:
            return schemas.function(await parts.functions.put(tx, caller, name, data), urls)

    @post(
        "/functions/{function:str}/rollback",
        operation_id="rollbackFunction",
        opt={"action": "functions.write"},
        status_code=200,
    )
    async def rollback_function(caller: Caller, function: str, data: rest.Rollback) -> rest.Function:
        """Make an earlier version the current one."""
        async with db.transaction() as tx:
            done = await parts.functions.rollback(tx, caller, function.lower(), data.version)
            return schemas.function(done, urls)

    @delete("/functions/{function:str}", operation_id="deleteFunction")
    async def delete_function(caller: Caller, function: str) -> None:
        """Delete a function. What waits ends as failed with `no_worker_template`; what runs may finish."""
        async with db.transaction() as tx:
            function_id = await functions.delete(tx, caller, function.lower())
        await parts.cancel.drop_queue(function_id)

    return [put_function, rollback_function, delete_function]


@dataclass
class _Logs(Operation):
    """Says in the contract that a stream may be asked for instead of a page."""

    def __post_init__(self) -> None:
        """Beside what Litestar makes of the page."""
        for answer in (self.responses or {}).values():
            if isinstance(answer, OpenAPIResponse) and answer.content and "application/json" in answer.content:
                answer.content["text/event-stream"] = OpenAPIMediaType(schema=Schema())


def _logs(parts: Parts) -> list[HTTPRouteHandler]:
    @get("/functions/{function:str}/logs", operation_id="listFunctionLogs", operation_class=_Logs)
    async def list_logs(
        caller: Caller,
        page: PageQuery,
        function: str,
        invocation: Annotated[str | None, QueryParameter(required=False, max_length=64)] = None,
        order: Annotated[Literal["asc", "desc"], QueryParameter(description="`desc` is newest first.")] = "asc",
        follow: Annotated[
            bool, QueryParameter(description="Server-sent events `output` from now on instead; `id` is the place.")
        ] = False,
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID", required=False)] = None,
    ) -> Response[rest.Page[rest.OutputLine]]:
        """What the function's handlers printed and reported. With `follow` as it happens, after `Last-Event-ID` if that
        is given."""
        only = Lines(invocation=invocation, newest_first=order == "desc")
        place = queries.number(page, "fl")
        async with parts.db.read() as conn:
            found = await functions.get(conn, caller, function)
            if not follow:
                lines = await reads.logs(conn, found.id, only, beyond=place, limit=page.limit + 1)
                answer: Any = _page_of_logs(lines, page.limit)
                return Response(content=answer)
            start = queries.place(last_event_id) if last_event_id else await reads.last_place(conn, found.id)
        parts.followers.admit(caller)
        events: Any = queries.stream(parts.followers.follow_logs(caller, found.id, start))
        return events

    return [list_logs]


def _page_of_logs(lines: list[rest.OutputLine], limit: int) -> rest.Page[rest.OutputLine]:
    more, lines = len(lines) > limit, lines[:limit]
    return rest.Page(items=lines, next_cursor=paging.encode_cursor("fl", lines[-1].place) if more else None)


def _dead_letters(parts: Parts) -> list[HTTPRouteHandler]:
    db = parts.db

    @get("/serverless/dead-letters", operation_id="listFunctionDeadLetters")
    async def list_letters(
        caller: Caller, page: PageQuery, function: Annotated[str | None, QueryParameter(required=False)] = None
    ) -> rest.Page[rest.DeadLetter]:
        """Invocations and messages that were given up, newest first."""
        before = queries.text(page, "dl")
        async with db.read() as conn:
            found = await invocations.letters(conn, caller, function=function, before=before, limit=page.limit + 1)
        items = list(found[: page.limit])
        more = len(found) > page.limit
        return rest.Page(items=items, next_cursor=paging.encode_cursor("dl", items[-1].id) if more else None)

    @post("/serverless/dead-letters/{letter_id:str}/replay", operation_id="replayFunctionDeadLetter")
    async def replay_letter(caller: Caller, letter_id: str) -> rest.Invocation:
        """Invoke the function again with what was given up, once: the new invocation."""
        made = await parts.again.replay(caller, http.path_id("dlt", letter_id))
        async with db.read() as conn:
            return schemas.invocation(await invocations.get(conn, caller, made), parts.urls)

    @delete("/serverless/dead-letters/{letter_id:str}", operation_id="deleteFunctionDeadLetter")
    async def delete_letter(caller: Caller, letter_id: str) -> None:
        """Forget it."""
        async with db.transaction() as tx:
            await invocations.drop_letter(tx, caller, http.path_id("dlt", letter_id))

    return [list_letters, replay_letter, delete_letter]
