"""The statement that ends attempts. Only the current attempt's token counts, and only while nothing has ended it.

The token of the last attempt stays with its row, for last words that come by another way. An ending either ends the
invocation or makes it wait for another attempt: because its worker was lost, up to `LOST_MAX` times, or because the
function retries such failures. All that follows from an end is part of the statement: the worker's slot, the time used,
the callback that is owed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit.db import Reader
from penstock.serverless.model import LOST_MAX, Committed, Ending

_GIVEN: Final = (
    ("project_id", "text"),
    ("id", "text"),
    ("token", "bytea"),
    ("worker_id", "text"),
    ("state", "text"),
    ("status_code", "int"),
    ("content_type", "text"),
    ("headers", "jsonb"),
    ("body", "bytea"),
    ("body_ref", "jsonb"),
    ("encoding", "text"),
    ("failure_class", "text"),
    ("error", "text"),
    ("error_type", "text"),
    ("traceback", "text"),
    ("duration_ms", "bigint"),
    ("lost", "boolean"),
)
_NAMES: Final = ", ".join(name for name, _ in _GIVEN)
_ARRAYS: Final = ", ".join(f"${n}::{kind}[]" for n, (_, kind) in enumerate(_GIVEN, 1))
_RETURNED: Final = ", ".join(name for name in Committed.__dataclass_fields__ if name != "more")
#: What follows from an end, whoever brings it about: the callback that is owed, and the dead letter of what was given
#: up.
FOLLOWS: Final = """owed as (
        insert into serverless.callbacks (project_id, invocation_id, url)
        select project_id, id, webhook from {ended} where webhook is not null and not waiting
        on conflict do nothing
    ), buried as (
        insert into serverless.dead_letters (id, project_id, function_id, function_name, source, invocation_id,
            failure_class, error, subject, deliveries, payload)
        select 'dlt_' || lpad(to_hex((extract(epoch from clock_timestamp()) * 1000)::bigint), 12, '0')
            || substr(md5(gen_random_uuid()::text), 1, 14), project_id, function_id, function_name, 'invocation', id,
            failure_class, error, '', attempt, coalesce(payload, '')
        from {ended} where state = 'dead_lettered'
    )"""
#: Rows are found by their primary key alone, hence the expression around the worker: its index would be as good to a
#: planner that knows nothing of the table yet. A lost attempt is made again at once; the handler's failures wait,
#: longer each time.
_COMMIT: Final = f"""
    with given as materialized (
        select * from unnest({_ARRAYS}) as g ({_NAMES})
    ), matched as materialized (
        select i.project_id, i.id, i.lost + g.lost::int as lost_now, i.tries, i.function_id, v.retries, v.retry_for,
            v.retry_delay_s, g.token, g.worker_id, g.state, g.failure_class, g.error_type, g.lost
        from given g
        join serverless.invocations i on i.project_id = g.project_id and i.id = g.id and i.token = g.token
            and i.worker_id || '' = g.worker_id and i.finished_at is null
        join serverless.versions v on v.function_id = i.function_id and v.number = i.version
        order by i.project_id, i.id for update of i
    ), decided as (
        select *, (lost and lost_now < {LOST_MAX}) or (state = 'failed' and failure_class = 'handler_error'
            and tries < retries and (retry_for = '{{}}' or error_type = any(retry_for))) as again,
            lost and lost_now >= {LOST_MAX} as exhausted
        from matched
    ), done as (
        update serverless.invocations i set
            waiting = d.again, token = case when not d.again then i.token end,
            worker_id = case when not d.again then i.worker_id end,
            lost = d.lost_now, tries = i.tries + (not d.lost)::int,
            due_at = case when not d.again then i.due_at when d.lost then clock_timestamp()
                else clock_timestamp()
                    + make_interval(secs => least(d.retry_delay_s * 2 ^ least(d.tries, 20), 3600)) end,
            state = case when d.again then i.state when d.exhausted then 'dead_lettered' else g.state end,
            finished_at = case when not d.again then clock_timestamp() end,
            started_at = clock_timestamp() - make_interval(secs => g.duration_ms / 1000.0),
            duration_ms = i.duration_ms + g.duration_ms, status_code = g.status_code,
            result_type = g.content_type, result_headers = g.headers, result = g.body, result_ref = g.body_ref,
            failure_class = case when d.exhausted then 'retry_exhausted' else g.failure_class end,
            encoding = g.encoding, error = g.error, error_type = g.error_type, traceback = g.traceback
        from decided d join given g using (project_id, id, token, worker_id)
        where i.project_id = d.project_id and i.id = d.id
        returning i.*, d.worker_id as of_worker, d.token as of_token, g.duration_ms as took_ms
    ), held as materialized (
        select w.id from serverless.workers w where w.id in (select of_worker from done) order by w.id for update of w
    ), freed as (
        update serverless.workers w set inflight = w.inflight - d.n, served = w.served + d.n,
            active_at = clock_timestamp()
        from (select of_worker, count(*)::int as n from done group by of_worker) d join held on held.id = d.of_worker
        where w.id = d.of_worker and w.state <> 'gone'
    ), spent as (
        insert into serverless.spent as s
            (function_id, project_id, organisation_id, key_id, minute, invocations, duration_ms)
        select d.function_id, d.project_id, f.organisation_id, coalesce(d.key_id, ''),
            date_trunc('minute', clock_timestamp()), count(*) filter (where not d.waiting), sum(d.took_ms)::bigint
        from done d join serverless.functions f on f.id = d.function_id
        group by d.function_id, d.project_id, f.organisation_id, coalesce(d.key_id, '')
        order by d.function_id, coalesce(d.key_id, '')
        on conflict (function_id, key_id, minute) do update set
            invocations = s.invocations + excluded.invocations, duration_ms = s.duration_ms + excluded.duration_ms
    ), {FOLLOWS.format(ended="done")}
    select {_RETURNED.replace("worker_id", "of_worker as worker_id")}, of_token, exists (
        select 1 from serverless.invocations i
        where i.function_id = done.function_id and i.waiting and i.due_at <= statement_timestamp()) as more
    from done
"""  # noqa: S608


async def commit(conn: Reader, endings: Sequence[Ending]) -> dict[bytes, Committed]:
    """Those that counted, by token. No two endings are of the same invocation, worker and token."""
    columns = [[getattr(ending, name) for ending in endings] for name, _ in _GIVEN]
    rows = [dict(row) for row in await conn.fetch(_COMMIT, *columns)]
    return {row.pop("of_token"): msgspec.convert(row, Committed) for row in rows}


@dataclass(frozen=True, slots=True)
class Standing:
    """An invocation, as far as it explains why a result counted for nothing."""

    state: str
    token: bytes | None
    worker_id: str | None


async def standing(conn: Reader, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Standing]:
    """How these invocations are, by project and id; those that are unknown are missing."""
    rows = await conn.fetch(
        """
        select i.project_id, i.id, i.state, i.token, i.worker_id
        from unnest($1::text[], $2::text[]) as g (project_id, id) join serverless.invocations i using (project_id, id)
        """,
        [project_id for project_id, _ in keys],
        [invocation_id for _, invocation_id in keys],
    )
    return {(row["project_id"], row["id"]): Standing(row["state"], row["token"], row["worker_id"]) for row in rows}


async def started(conn: Reader, attempts: Sequence[tuple[str, str, str, int]]) -> None:
    """(project, id, worker, attempt): their handlers were called."""
    await conn.execute(
        """
        with begun as materialized (
            select i.project_id, i.id
            from unnest($1::text[], $2::text[], $3::text[], $4::int[]) as g (project_id, id, worker_id, attempt)
            join serverless.invocations i on i.project_id = g.project_id and i.id = g.id
                and i.worker_id || '' = g.worker_id and i.attempt = g.attempt
                and i.state in ('dispatching', 'running') and i.started_at is null and not i.waiting
            order by i.project_id, i.id for update of i
        )
        update serverless.invocations i set state = 'running', started_at = clock_timestamp()
        from begun where i.project_id = begun.project_id and i.id = begun.id
        """,
        *([each[n] for each in attempts] for n in range(4)),
    )
