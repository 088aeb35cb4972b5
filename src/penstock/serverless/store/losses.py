"""Attempts that end with their worker, or that it never got: another one is made, a few times.

Invocations are locked before their worker, in the order of their ids, as by those who commit and cancel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit.db import Reader, Tx
from penstock.serverless.model import LOST_MAX, Committed
from penstock.serverless.store.commits import FOLLOWS

_ENDED: Final = ", ".join(name for name in Committed.__dataclass_fields__ if name != "more")
_GIVE_UP: Final = f"""
    update serverless.invocations i set
        token = null, lost = i.lost + 1,
        waiting = i.lost + 1 < {LOST_MAX}, worker_id = case when i.lost + 1 < {LOST_MAX} then null else i.worker_id end,
        due_at = clock_timestamp(),
        state = case when i.lost + 1 < {LOST_MAX} then i.state else 'dead_lettered' end,
        finished_at = case when i.lost + 1 < {LOST_MAX} then null else clock_timestamp() end,
        failure_class = case when i.lost + 1 < {LOST_MAX} then 'worker_lost' else 'retry_exhausted' end,
        status_code = 502, error = $2
"""  # noqa: S608


async def hold_attempts(tx: Tx, worker_id: str) -> None:
    """Lock what a worker has, before the worker: those who commit and cancel do it in this order too."""
    await tx.execute(
        "select 1 from serverless.invocations where worker_id = $1 and finished_at is null"
        " order by project_id, id for update",
        worker_id,
    )


async def lose(tx: Tx, worker_id: str, reason: str) -> list[Committed]:
    """Take everything from a worker that is gone."""
    rows = await tx.fetch(
        f"""
        with ended as ({_GIVE_UP} where i.worker_id = $1 and i.finished_at is null returning i.*),
        {FOLLOWS.format(ended="ended")}
        select {_ENDED.replace("worker_id", "$1::text as worker_id")} from ended
        """,  # noqa: S608
        worker_id,
        reason,
    )
    await tx.execute("update serverless.workers set inflight = 0 where id = $1", worker_id)
    return [msgspec.convert(dict(row), Committed) for row in rows]


async def missing(
    conn: Reader, worker_id: str, attempts: Sequence[tuple[str, int]], *, older_than_s: float
) -> list[tuple[str, int]]:
    """Attempts that were given to a worker a while ago and that are not among these."""
    rows = await conn.fetch(
        """
        select i.id, i.attempt from serverless.invocations i where i.worker_id = $1 and i.finished_at is null
            and i.dispatched_at < clock_timestamp() - make_interval(secs => $4)
            and not exists (select 1 from unnest($2::text[], $3::int[]) as had (id, attempt)
                where had.id = i.id and had.attempt = i.attempt)
        """,
        worker_id,
        *_columns(attempts),
        older_than_s,
    )
    return [(row["id"], row["attempt"]) for row in rows]


async def take_back(tx: Tx, worker_id: str, attempts: Sequence[tuple[str, int]]) -> list[Committed]:
    """Those of these attempts that have not ended: the worker never got them."""
    rows = await tx.fetch(
        f"""
        with lacking as materialized (
            select i.project_id, i.id from unnest($3::text[], $4::int[]) as g (id, attempt)
            join serverless.invocations i on i.worker_id = $1 and i.id = g.id and i.attempt = g.attempt
                and i.finished_at is null
            order by i.project_id, i.id for update of i
        ), ended as ({_GIVE_UP} from lacking where i.project_id = lacking.project_id and i.id = lacking.id
            returning i.*
        ), freed as (
            update serverless.workers set inflight = inflight - (select count(*) from ended) where id = $1
                and state <> 'gone' and exists (select 1 from ended)
        ), {FOLLOWS.format(ended="ended")}
        select {_ENDED.replace("worker_id", "$1::text as worker_id")} from ended
        """,  # noqa: S608
        worker_id,
        "the attempt did not reach its worker",
        *_columns(attempts),
    )
    return [msgspec.convert(dict(row), Committed) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwanted:
    """Attempts that a worker still has although they count for nothing."""

    request: str
    mac_key: bytes
    attempts: Sequence[tuple[str, int]]


async def unwanted(conn: Reader, worker_id: str, attempts: Sequence[tuple[str, int]]) -> Unwanted | None:
    """Those of a worker's attempts that are not its any more."""
    row = await conn.fetchrow(
        """
        select w.request, w.mac_key, array_agg(had.id) as ids, array_agg(had.attempt) as attempts
        from serverless.workers w cross join unnest($2::text[], $3::int[]) as had (id, attempt)
        where w.id = $1 and w.state <> 'gone' and not exists (
            select 1 from serverless.invocations i where i.project_id = w.project_id and i.id = had.id
                and i.attempt = had.attempt and i.worker_id = w.id and i.finished_at is null)
        group by w.id
        """,
        worker_id,
        *_columns(attempts),
    )
    if row is None:
        return None
    pairs = list(zip(row["ids"], row["attempts"], strict=True))
    return Unwanted(request=row["request"], mac_key=row["mac_key"], attempts=pairs)


def _columns(attempts: Sequence[tuple[str, int]]) -> tuple[list[str], list[int]]:
    return [invocation_id for invocation_id, _ in attempts], [attempt for _, attempt in attempts]
