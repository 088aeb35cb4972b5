"""Reading what happened: past events, live events, the audit log.

Events are ordered by (transaction, sequence). A reader never looks past the oldest transaction that still runs, so an
event that commits late is never skipped. NATS only wakes the readers of a stream; a lost message delays, never loses.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Row
from penstock.kit.errors import Invalid, Kind, PenstockError
from penstock.kit.paging import PageQuery, decode_cursor, encode_cursor
from penstock.wire import subjects
from penstock.wire.rest import AuditEntry, EventOut, Page

POLL_S: Final = 2.0
KEEP_ALIVE_S: Final = 15.0
BATCH: Final = 200
STREAMS_MAX: Final = 1000
STREAMS_PER_PROJECT_MAX: Final = 100

#: Each part follows an index of its own: with an `or` between them, a quiet project would be looked for in all the log.
_PART: Final = """
(select tx, seq, event_id, type, aggregate_id, version, project_id, correlation_id, occurred_at, payload
   from kit.outbox o
  where {whose} and (tx, seq) {{beyond}} ($3::text::xid8, $4) and tx < pg_snapshot_xmin(pg_current_snapshot())
    and ($5::text is null or type = $5) and ($6::text is null or aggregate_id = $6)
  order by o.tx {{order}}, seq {{order}} limit $7)
"""
_EVENTS: Final = (
    "select e.tx::text as tx, seq, event_id, type, aggregate_id, version, project_id, correlation_id, occurred_at,"  # noqa: S608
    " payload from ("
    + " union all ".join(
        _PART.format(whose=whose)
        for whose in (
            "project_id = $1",
            "project_id is null and organisation_id = $8 and not $2",
            "project_id is null and $2",
        )
    )
    + ") e order by e.tx {order}, seq {order} limit $7"
)
OLDEST_FIRST: Final = _EVENTS.format(beyond=">", order="asc")
NEWEST_FIRST: Final = _EVENTS.format(beyond="<", order="desc")
_AUDIT: Final = """
select id, at, actor_id, actor_kind, action, target_id, organisation_id, project_id, correlation_id, detail
  from kit.audit
 where (project_id = $1 or ($2 and project_id is null)) and ($3::text is null or id < $3)
   and ($4::text is null or actor_id = $4) and ($5::text is null or action = $5)
   and ($6::text is null or target_id = $6) and ($7::text is null or correlation_id = $7)
 order by id desc
 limit $8
"""
_AUDIT_OF_REQUEST: Final = """
select id, at, actor_id, actor_kind, action, target_id, organisation_id, project_id, correlation_id, detail
  from kit.audit where correlation_id = $1 order by seq limit $2
"""
_EVENTS_OF_REQUEST: Final = """
select tx::text as tx, seq, event_id, type, aggregate_id, version, project_id, correlation_id, occurred_at, payload
  from kit.outbox where correlation_id = $1 order by seq limit $2
"""

#: A transaction and a sequence number: after which event to go on.
Position: TypeAlias = tuple[int, int]
START: Final[Position] = (0, 0)
_END: Final[Position] = (2**63 - 1, 2**63 - 1)
_encoder = msgspec.json.Encoder()


class TooManyStreams(PenstockError):
    """All places for live streams are taken."""

    kind = Kind.EXHAUSTED
    code = "too_many_streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events."""

    event_type: str | None = None
    aggregate_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """Which audit rows."""

    actor_id: str | None = None
    action: str | None = None
    target_id: str | None = None
    correlation_id: str | None = None


def parse_position(text: str | None, *, default: Position = START) -> Position:
    """The position in a cursor."""
    if text is None:
        return default
    match decode_cursor(text):
        case ["e", int(tx), int(seq)]:
            return tx, seq
        case _:
            raise Invalid("invalid cursor", field="cursor")


async def read_events(
    conn: Reader, caller: Caller, only: EventFilter, after: Position, limit: int, *, newest_first: bool = False
) -> list[EventOut]:
    """Events of the caller's project; those of no project for operators, and of their own organisation for some."""
    rows = await conn.fetch(
        NEWEST_FIRST if newest_first else OLDEST_FIRST,
        caller.project_id,
        caller.operator,
        str(after[0]),
        after[1],
        only.event_type,
        only.aggregate_id,
        limit,
        caller.organisation_id if "events.read_organisation" in caller.actions else None,
    )
    return [_event(row) for row in rows]


def _event(row: Row) -> EventOut:
    return EventOut(
        cursor=encode_cursor("e", int(row["tx"]), row["seq"]),
        event_id=row["event_id"],
        event_type=row["type"],
        aggregate_id=row["aggregate_id"],
        version=row["version"],
        project_id=row["project_id"],
        correlation_id=row["correlation_id"],
        occurred_at=row["occurred_at"],
        payload=row["payload"],
    )


async def list_events(
    conn: Reader, caller: Caller, only: EventFilter, page: PageQuery, *, newest_first: bool
) -> Page[EventOut]:
    """One page of past events."""
    caller.require("events.read")
    after = parse_position(page.cursor, default=_END if newest_first else START)
    found = await read_events(conn, caller, only, after, page.limit + 1, newest_first=newest_first)
    shown = found[: page.limit]
    return Page(items=shown, next_cursor=shown[-1].cursor if len(found) > page.limit else None)


async def list_audit(conn: Reader, caller: Caller, only: AuditFilter, page: PageQuery) -> Page[AuditEntry]:
    """One page of the audit log, newest first."""
    caller.require("audit.read")
    rows = await conn.fetch(
        _AUDIT,
        caller.project_id,
        caller.operator,
        _audit_position(page.cursor),
        only.actor_id,
        only.action,
        only.target_id,
        only.correlation_id,
        page.limit + 1,
    )
    shown = [AuditEntry(**dict(row)) for row in rows[: page.limit]]
    more = len(rows) > page.limit
    return Page(items=shown, next_cursor=encode_cursor("u", shown[-1].id) if more else None)


async def audit_of_request(conn: Reader, correlation_id: str, *, limit: int) -> list[AuditEntry]:
    """What one request did, in all projects, oldest first."""
    rows = await conn.fetch(_AUDIT_OF_REQUEST, correlation_id, limit)
    return [AuditEntry(**dict(row)) for row in rows]


async def events_of_request(conn: Reader, correlation_id: str, *, limit: int) -> list[EventOut]:
    """The facts that one request led to, in all projects, oldest first."""
    return [_event(row) for row in await conn.fetch(_EVENTS_OF_REQUEST, correlation_id, limit)]


def _audit_position(text: str | None) -> str | None:
    if text is None:
        return None
    match decode_cursor(text):
        case ["u", str(before)]:
            return before
        case _:
            raise Invalid("invalid cursor", field="cursor")


class _Scope(msgspec.Struct):
    project_id: str | None = None


class Feed:
    """Live events of this process's clients: one subscription wakes the streams of the project concerned."""

    def __init__(self, db: Database, still_valid: Callable[[Caller], Awaitable[bool]]) -> None:
        self._db = db
        self._still_valid = still_valid
        self._streams: dict[str, set[asyncio.Event]] = {}
        self._closing = False
        self._scope = msgspec.json.Decoder(_Scope)

    async def watch(self, bus: Bus) -> None:
        """Let published events wake the streams."""
        await bus.on_hint(subjects.ALL_EVENTS, self._published)

    async def _published(self, _: str, envelope: bytes) -> None:
        if self._streams:
            project_id = self._scope.decode(envelope).project_id
            self._wake(list(self._streams) if project_id is None else (project_id,))

    def _wake(self, projects: Iterable[str]) -> None:
        for project_id in projects:
            for wake in self._streams.get(project_id, ()):
                wake.set()

    def close(self) -> None:
        """End all streams; their clients come back to another process with their last position."""
        self._closing = True
        self._wake(list(self._streams))

    def admit(self, caller: Caller) -> None:
        """Pass if there is a place for one more stream, or TooManyStreams."""
        caller.require("events.read")
        mine = self._streams.get(caller.project_id, ())
        if len(mine) >= STREAMS_PER_PROJECT_MAX or sum(map(len, self._streams.values())) >= STREAMS_MAX:
            raise TooManyStreams(f"max {STREAMS_PER_PROJECT_MAX} live streams in a project", retry_after_s=5)

    async def follow(self, caller: Caller, only: EventFilter, after: Position | None) -> AsyncIterator[bytes]:
        """Server-sent events for ever; ends when the caller's credential stops being valid, or at shutdown."""
        with self._place(caller.project_id) as wake:
            position = after or await self._now()
            yield b": connected\n\n"
            spoken = time.monotonic()
            while await self._goes_on(caller):
                wake.clear()
                async with self._db.read() as conn:
                    found = await read_events(conn, caller, only, position, BATCH)
                if found:
                    position = parse_position(found[-1].cursor)
                    yield b"".join(map(encode, found))
                    spoken = time.monotonic()
                elif time.monotonic() - spoken >= KEEP_ALIVE_S:
                    yield b": keep-alive\n\n"
                    spoken = time.monotonic()
                if len(found) < BATCH:
                    await _wait(wake)

    @contextmanager
    def _place(self, project_id: str) -> Iterator[asyncio.Event]:
        wake = asyncio.Event()
        mine = self._streams.setdefault(project_id, set())
        mine.add(wake)
        try:
            yield wake
        finally:
            mine.discard(wake)
            if not mine and self._streams.get(project_id) is mine:
                del self._streams[project_id]

    async def _goes_on(self, caller: Caller) -> bool:
        return not self._closing and await self._still_valid(caller)

    async def _now(self) -> Position:
        """Before whatever commits from now on."""
        async with self._db.read() as conn:
            return int(await conn.fetchval("select pg_snapshot_xmin(pg_current_snapshot())::text")), 0


async def _wait(wake: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(POLL_S):
            await wake.wait()
    except TimeoutError:
        return


def encode(event: EventOut) -> bytes:
    """One server-sent event. JSON has no line ends, so the data is one line."""
    head = f"id: {event.cursor}\nevent: {event.event_type}\ndata: ".encode()
    return head + _encoder.encode(event) + b"\n\n"
