"""REST of what kit keeps: events, the live stream, the audit log, dead letters."""

from typing import Annotated, Any, Literal

from litestar import Router, delete, get, post
from litestar.params import HeaderParameter, QueryParameter
from litestar.response import Stream

from penstock.kit import auditchain, deadletters, feed
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.feed import AuditFilter, EventFilter, Feed
from penstock.kit.http import path_id
from penstock.kit.paging import PageQuery
from penstock.wire import rest

Text = Annotated[str | None, QueryParameter(required=False, max_length=128)]


def router(db: Database, live: Feed) -> Router:
    """All routes of events, audit and dead letters, below /api/v1."""
    return Router(path="/", route_handlers=[*_events(db, live), *_audit(db), *_dead_letters(db)], tags=["events"])


def _events(db: Database, live: Feed) -> list[Any]:
    @get("/events", operation_id="listEvents")
    async def list_events(
        caller: Caller,
        page: PageQuery,
        event_type: Text = None,
        aggregate_id: Text = None,
        order: Annotated[Literal["asc", "desc"], QueryParameter(description="`desc` is newest first.")] = "asc",
    ) -> rest.Page[rest.EventOut]:
        """Past events of the project."""
        only = EventFilter(event_type=event_type, aggregate_id=aggregate_id)
        async with db.read() as conn:
            return await feed.list_events(conn, caller, only, page, newest_first=order == "desc")

    @get("/events/stream", operation_id="streamEvents", media_type="text/event-stream")
    async def stream_events(
        caller: Caller,
        after: Annotated[
            str | None, QueryParameter(required=False, description="Cursor of the last event seen.")
        ] = None,
        last_event_id: Annotated[str | None, HeaderParameter(name="Last-Event-ID", required=False)] = None,
        event_type: Text = None,
        aggregate_id: Text = None,
    ) -> Stream:
        """Events as they happen, as server-sent events: `id` is the cursor to resume after, `data` an EventOut."""
        resume = last_event_id or after
        position = feed.parse_position(resume) if resume else None
        only = EventFilter(event_type=event_type, aggregate_id=aggregate_id)
        live.admit(caller)
        return Stream(
            live.follow(caller, only, position), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    return [list_events, stream_events]


def _audit(db: Database) -> list[Any]:
    @get("/audit", operation_id="listAudit", tags=["audit"])
    async def list_audit(
        caller: Caller,
        page: PageQuery,
        actor_id: Text = None,
        action: Text = None,
        target_id: Text = None,
        correlation_id: Text = None,
    ) -> rest.Page[rest.AuditEntry]:
        """Who did what in the project, newest first."""
        only = AuditFilter(actor_id=actor_id, action=action, target_id=target_id, correlation_id=correlation_id)
        async with db.read() as conn:
            return await feed.list_audit(conn, caller, only, page)

    @get("/audit/chains", operation_id="listAuditChains", tags=["audit"])
    async def list_chains(caller: Caller) -> rest.Page[rest.AuditChain]:
        """The audit log's hash chains, one per organisation and `platform`, and where each ends; operators only."""
        async with db.read() as conn:
            return rest.Page(items=await auditchain.chains(conn, caller))

    @get("/audit/chains/{chain:str}", operation_id="readAuditChain", tags=["audit"])
    async def read_chain(caller: Caller, page: PageQuery, chain: str) -> rest.Page[rest.ChainedAudit]:
        """A chain from its beginning: enough to verify it without trusting the server; operators only."""
        async with db.read() as conn:
            return await auditchain.page(conn, caller, chain, page)

    return [list_audit, list_chains, read_chain]


def _dead_letters(db: Database) -> list[Any]:
    @get("/dead-letters", operation_id="listDeadLetters", tags=["dead letters"])
    async def list_dead_letters(caller: Caller, page: PageQuery) -> rest.Page[rest.DeadLetterOut]:
        """Events that the broker refused for good, oldest first; operators only."""
        caller.require("dead_letters.read")
        async with db.read() as conn:
            found = await deadletters.list_dead(conn, limit=page.limit)
        return rest.Page(items=[_dead_letter(letter) for letter in found])

    @post(
        "/dead-letters/{event_id:str}/requeue", operation_id="requeueDeadLetter", tags=["dead letters"], status_code=204
    )
    async def requeue(caller: Caller, event_id: str) -> None:
        """Let the relay try again."""
        caller.require("dead_letters.write")
        async with db.transaction() as tx:
            await deadletters.requeue(tx, caller.actor, path_id("evt", event_id))

    @delete("/dead-letters/{event_id:str}", operation_id="discardDeadLetter", tags=["dead letters"])
    async def discard(caller: Caller, event_id: str) -> None:
        """Never publish it; its aggregate goes on without it."""
        caller.require("dead_letters.write")
        async with db.transaction() as tx:
            await deadletters.discard(tx, caller.actor, path_id("evt", event_id))

    return [list_dead_letters, requeue, discard]


def _dead_letter(letter: deadletters.DeadLetter) -> rest.DeadLetterOut:
    return rest.DeadLetterOut(
        event_id=letter.event_id,
        event_type=letter.type,
        aggregate_id=letter.aggregate_id,
        version=letter.version,
        occurred_at=letter.occurred_at,
        attempts=letter.attempts,
        last_error=letter.last_error,
    )
