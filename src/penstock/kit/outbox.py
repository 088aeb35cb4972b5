"""Facts, written in the transaction that made them true.

Handlers never publish: they append here, and the relay publishes after the commit. `version` is the aggregate's own
version after the change, so that consumers can tell order, gaps and repeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from penstock.kit.db import Reader, Tx
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id
from penstock.wire import subjects

#: Order holds within a shard; each shard is published by one relay at a time.
SHARDS: Final = 16

#: The columns of kit.outbox in the order of `columns()`. A CTE that moves a row may insert them in one statement:
#: `insert into kit.outbox (<COLUMNS>) select $n, …`. The database computes shard, time and transaction id itself.
COLUMNS: Final = "event_id, type, aggregate_id, version, organisation_id, project_id, correlation_id, payload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One fact about one aggregate. `organisation_id` and `project_id` say who may see it; none means operators."""

    type: str
    aggregate_id: str
    version: int
    organisation_id: str | None
    project_id: str | None
    payload: Mapping[str, Any]
    event_id: str = field(default_factory=lambda: new_id("evt"))

    def columns(self) -> tuple[object, ...]:
        """Values for `COLUMNS`."""
        return (
            self.event_id,
            self.type,
            self.aggregate_id,
            self.version,
            self.organisation_id,
            self.project_id,
            correlation_id(),
            dict(self.payload),
        )


async def append(tx: Tx, *events: Event) -> None:
    """Add facts to this transaction."""
    await tx.executemany(
        f"insert into kit.outbox ({COLUMNS}) values ($1, $2, $3, $4, $5, $6, $7, $8)",  # noqa: S608
        [event.columns() for event in events],
    )
    wake(tx)


def wake(tx: Tx) -> None:
    """Ask the relay to look after this commit; for statements that insert outbox rows themselves."""
    tx.hint(subjects.OUTBOX)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader of the log has come: a transaction and a sequence number."""

    tx: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A fact as it stands in the log."""

    at: Position
    event_id: str
    type: str
    organisation_id: str | None
    project_id: str | None
    occurred_at: datetime
    payload: Mapping[str, Any]


async def read(conn: Reader, event_type: str, after: Position, limit: int) -> tuple[list[Past], Position]:
    """Facts of one type in the order of the feed, and where to go on. No transaction that may still commit is passed,
    so none is ever skipped."""
    end = Position(int(await conn.fetchval("select pg_snapshot_xmin(pg_current_snapshot())::text")), 0)
    rows = await conn.fetch(
        """
        select tx::text as tx, seq, event_id, type, organisation_id, project_id, occurred_at, payload from kit.outbox
        where type = $1 and (tx, seq) > ($2::text::xid8, $3) and tx < $4::text::xid8 order by tx, seq limit $5
        """,
        event_type,
        str(after.tx),
        after.seq,
        str(end.tx),
        limit,
    )
    found = [Past(at=Position(int(row["tx"]), row["seq"]), **{name: row[name] for name in _PAST}) for row in rows]
    return found, found[-1].at if len(found) == limit else end


_PAST: Final = ("event_id", "type", "organisation_id", "project_id", "occurred_at", "payload")


async def oldest_waiting(conn: Reader, *, older_than_s: float) -> datetime | None:
    """When the oldest fact that still waits to be published was written, if that is longer ago than this."""
    return await conn.fetchval(
        "select occurred_at from kit.outbox where seq = (select min(seq) from kit.waiting where not dead)"
        " and occurred_at < clock_timestamp() - make_interval(secs => $1)",
        older_than_s,
    )
