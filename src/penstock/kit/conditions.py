"""Standing faults that a process sees and no row tells of: reported while they last, shown to operators.

A report that is not repeated within `FRESH_S` is no longer shown: its process ended, or the fault did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.kit.db import Database, Reader

FRESH_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One fault: what it is, of what, why, and what an operator can do."""

    kind: str
    id: str
    reason: str
    repair: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Condition):
    """A fault that lasts, and since when."""

    since: datetime


_REPORT: Final = """
insert into kit.conditions as c (kind, id, reason, repair) values ($1, $2, $3, $4)
on conflict (kind, id) do update set
    reason = excluded.reason, repair = excluded.repair, seen_at = excluded.seen_at,
    since = case when c.seen_at < excluded.seen_at - make_interval(secs => $5) then excluded.since else c.since end
"""


async def report(db: Database, condition: Condition) -> None:
    """The fault is there now."""
    async with db.read() as conn:
        await conn.execute(_REPORT, condition.kind, condition.id, condition.reason, condition.repair, FRESH_S)


async def clear(db: Database, *, kind: str, id: str) -> None:  # noqa: A002
    """The fault is over."""
    async with db.read() as conn:
        await conn.execute("delete from kit.conditions where kind = $1 and id = $2", kind, id)


async def standing(conn: Reader, *, limit: int) -> Sequence[Standing]:
    """Faults that were reported a moment ago, oldest first."""
    rows = await conn.fetch(
        "select kind, id, reason, repair, since from kit.conditions"
        " where seen_at > clock_timestamp() - make_interval(secs => $1) order by since, kind, id limit $2",
        FRESH_S,
        limit,
    )
    return [Standing(**row) for row in rows]
