"""The rows of deliveries: claimed with a lease, settled by whoever holds the claim, kept for a while.

An event waits for the earlier ones of its aggregate; otherwise the order is that of the feed. A claim is held by the
number of attempts: after another claim, the earlier holder settles nothing.
"""

from typing import Any, Final

from penstock.kit.db import Reader, Row, Tx
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.telemetry import correlation_id
from penstock.notices.model import Crowd, Delivery, DeliveryState, Due, Patience, Sealed

_COLUMNS: Final = (
    "id, seq, webhook_id, event_id, type as event_type, state, attempts, error, detail, status, created_at,"
    " finished_at, case when state = 'pending' then next_at end as next_try_at"
)
#: Loose scans: as many looks into the index as there are webhooks with something to send, however much that is.
_CLAIM: Final = """
with recursive waiting as (
    (select webhook_id from notices.deliveries where state = 'pending' order by webhook_id limit 1)
    union all
    select (select d.webhook_id from notices.deliveries d
             where d.state = 'pending' and d.webhook_id > w.webhook_id order by d.webhook_id limit 1)
      from waiting w where w.webhook_id is not null
), busy as (
    select d.webhook_id, w.project_id from notices.deliveries d join notices.webhooks w on w.id = d.webhook_id
     where d.lease_until > clock_timestamp()
), ready as (
    select w.id, w.project_id,
           case when w.failures > 0 then 1 else $3::int end
               - (select count(*) from busy b where b.webhook_id = w.id) as room
      from waiting join notices.webhooks w on w.id = waiting.webhook_id
     where w.state = 'active' and w.quiet_until <= clock_timestamp()
), due as (
    select d.id, d.seq, r.project_id, row_number() over (partition by r.project_id order by d.seq) as turn
      from ready r cross join lateral (
        select d.id, d.seq from notices.deliveries d
         where d.webhook_id = r.id and d.state = 'pending' and d.next_at <= clock_timestamp()
           and (d.lease_until is null or d.lease_until <= clock_timestamp())
           and not exists (
               select 1 from notices.deliveries e
                where e.webhook_id = d.webhook_id and e.aggregate_id = d.aggregate_id and e.state = 'pending'
                  and e.seq < d.seq)
         order by d.seq limit greatest(r.room, 0) for update skip locked
      ) d
), chosen as (
    select id from due
     where turn <= $2::int - (select count(*) from busy b where b.project_id = due.project_id)
     order by turn, seq limit $1
)
update notices.deliveries d
   set attempts = d.attempts + 1, lease_until = clock_timestamp() + make_interval(secs => $4)
  from chosen c, notices.webhooks w
 where d.id = c.id and w.id = d.webhook_id
returning d.id, d.seq, d.attempts, d.webhook_id, w.project_id as webhook_project_id, w.url, d.event_id,
    d.type as event_type, d.aggregate_id, d.version, d.organisation_id, d.project_id, d.correlation_id, d.occurred_at,
    d.payload
"""
_DELIVERED: Final = """
with done as (
    update notices.deliveries
       set state = 'delivered', error = '', detail = '', status = $3, lease_until = null,
           finished_at = clock_timestamp()
     where id = $1 and attempts = $2 and state = 'pending'
    returning webhook_id
), well as (
    update notices.webhooks w set failures = 0, failing_since = null, quiet_until = '-infinity'
      from done where w.id = done.webhook_id and w.failures > 0
)
select true from done
"""
_FAILED: Final = """
update notices.deliveries
   set error = $3, detail = $4, status = $5, lease_until = null,
       state = case when give_up_at <= clock_timestamp() then 'failed' else 'pending' end,
       finished_at = case when give_up_at <= clock_timestamp() then clock_timestamp() end,
       next_at = clock_timestamp()
           + make_interval(secs => least($7::float8, $6 * 2 ^ least($2 - 1, 20)) * (0.8 + 0.4 * random()))
 where id = $1 and attempts = $2 and state = 'pending'
returning true
"""
#: Failures that come while it is left alone anyway are of one outage with the last: they count once.
_UNWELL: Final = """
update notices.webhooks
   set failures = failures + (quiet_until <= clock_timestamp())::int,
       failing_since = coalesce(failing_since, clock_timestamp()),
       quiet_until = case when quiet_until > clock_timestamp() then quiet_until else clock_timestamp()
           + make_interval(secs => least($3::float8, $2 * 2 ^ least(failures, 20)) * (0.8 + 0.4 * random())) end
 where id = $1 and state = 'active'
returning failures, extract(epoch from clock_timestamp() - failing_since)::float8 as failing_s
"""


async def any_pending(conn: Reader) -> bool:
    """Whether there is anything to send at all."""
    return await conn.fetchval("select exists (select 1 from notices.deliveries where state = 'pending')")


async def claim(tx: Tx, crowd: Crowd, *, room: int, lease_s: float) -> list[Due]:
    """At most so many that are due, in order, for this process alone until the lease ends."""
    # One claims at a time, so that all see what the others hold; the statement after the lock sees what they committed.
    await tx.execute("select pg_advisory_xact_lock(7009)")
    rows = await tx.fetch(_CLAIM, room, crowd.per_project, crowd.per_webhook, lease_s)
    secrets = await _secrets(tx, {row["webhook_id"] for row in rows})
    return [_due(row, secrets) for row in sorted(rows, key=lambda row: row["seq"])]


async def _secrets(conn: Reader, webhook_ids: set[str]) -> dict[str, list[Sealed]]:
    """What to sign with: the current secret first, then the one before it while it is good."""
    rows = await conn.fetch(
        "select webhook_id, version, key_id, sealed from notices.secrets where webhook_id = any($1)"
        " and (expires_at is null or expires_at > clock_timestamp()) order by version desc",
        list(webhook_ids),
    )
    found: dict[str, list[Sealed]] = {}
    for row in rows:
        found.setdefault(row["webhook_id"], []).append(Sealed(row["version"], row["key_id"], row["sealed"]))
    return found


async def delivered(conn: Reader, due: Due, *, status: int) -> bool:
    """It was taken; whether this claim still held."""
    return await conn.fetchval(_DELIVERED, due.id, due.attempts, status) is not None


async def failed(
    tx: Tx, due: Due, patience: Patience, *, error: str, detail: str, status: int | None
) -> tuple[int, float] | None:
    """It was not; how often in a row and for how long the webhook has failed now, or none if the claim was lost."""
    settled = await tx.fetchval(
        _FAILED, due.id, due.attempts, error, detail, status, patience.retry_first_s, patience.retry_max_s
    )
    if settled is None:
        return None
    row = await tx.fetchrow(_UNWELL, due.webhook_id, patience.retry_first_s, patience.retry_max_s)
    return (row["failures"], row["failing_s"]) if row else None


async def page(conn: Reader, webhook_id: str, *, before: int | None, state: str | None, limit: int) -> list[Delivery]:
    """What was and is to be delivered, newest first."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from notices.deliveries where webhook_id = $1 and ($2::bigint is null or seq < $2)"  # noqa: S608
        " and ($3::text is null or state = $3) order by seq desc limit $4",
        webhook_id,
        before,
        state,
        limit,
    )
    return [_delivery(row) for row in rows]


async def count_waiting(conn: Reader, webhook_id: str, event_type: str) -> int:
    """How many events of this type wait to be delivered."""
    return await conn.fetchval(
        "select count(*) from notices.deliveries where webhook_id = $1 and state = 'pending' and type = $2",
        webhook_id,
        event_type,
    )


async def insert(tx: Tx, webhook_id: str, event: Event, *, give_up_s: float) -> Delivery:
    """An event for this webhook alone."""
    row = await tx.fetchrow(
        "insert into notices.deliveries (id, webhook_id, event_id, type, aggregate_id, version, organisation_id,"  # noqa: S608
        " project_id, correlation_id, payload, occurred_at, give_up_at) values ($1, $2, $3, $4, $5, $6, $7, $8, $9,"
        f" $10, clock_timestamp(), clock_timestamp() + make_interval(secs => $11)) returning {_COLUMNS}",
        new_id("dlv"),
        webhook_id,
        event.event_id,
        event.type,
        event.aggregate_id,
        event.version,
        event.organisation_id,
        event.project_id,
        correlation_id(),
        dict(event.payload),
        give_up_s,
    )
    assert row is not None
    return _delivery(row)


async def again(tx: Tx, webhook_id: str, delivery_id: str, *, give_up_s: float) -> Delivery | None:
    """Due now, whatever became of it; one that is under way stays so."""
    row = await tx.fetchrow(
        "update notices.deliveries set state = 'pending', finished_at = null, next_at = clock_timestamp(),"  # noqa: S608
        " give_up_at = clock_timestamp() + make_interval(secs => $3)"
        f" where id = $1 and webhook_id = $2 returning {_COLUMNS}",
        delivery_id,
        webhook_id,
        give_up_s,
    )
    return _delivery(row) if row else None


async def give_up(conn: Reader, *, limit: int) -> int:
    """End those whose time is over, such as the ones of a webhook that is paused; how many."""
    return await conn.fetchval(
        "with over as (select id from notices.deliveries where state = 'pending' and give_up_at <= clock_timestamp()"
        " and (lease_until is null or lease_until <= clock_timestamp()) limit $1 for update skip locked),"
        " ended as (update notices.deliveries d set state = 'failed', finished_at = clock_timestamp(),"
        " lease_until = null, error = case when error = '' then 'expired' else error end"
        " from over where d.id = over.id returning 1) select count(*) from ended",
        limit,
    )


async def prune(conn: Reader, *, older_than_s: float, limit: int) -> int:
    """Delete those that ended so long ago, and whatever is of a webhook that is no more; how many."""
    return await conn.fetchval(
        "with old as ((select id from notices.deliveries"
        " where finished_at < clock_timestamp() - make_interval(secs => $1) limit $2)"
        " union all (select d.id from notices.webhooks w join notices.deliveries d on d.webhook_id = w.id"
        " where w.state = 'deleted' limit $2)),"
        " gone as (delete from notices.deliveries d using old where d.id = old.id returning 1)"
        " select count(*) from gone",
        older_than_s,
        limit,
    )


async def forget_deleted(conn: Reader) -> None:
    """Delete the rows of deleted webhooks that nothing is left of, and secrets that have ended."""
    await conn.execute(
        "delete from notices.webhooks w where state = 'deleted'"
        " and not exists (select 1 from notices.deliveries d where d.webhook_id = w.id)"
    )
    await conn.execute("delete from notices.secrets where expires_at <= clock_timestamp()")


async def count_pending(conn: Reader) -> int:
    """How many wait."""
    return await conn.fetchval("select count(*) from notices.deliveries where state = 'pending'")


def _delivery(row: Row) -> Delivery:
    values: dict[str, Any] = dict(row)
    values["state"] = DeliveryState(row["state"])
    return Delivery(**values)


def _due(row: Row, secrets: dict[str, list[Sealed]]) -> Due:
    values: dict[str, Any] = {name: value for name, value in row.items() if name != "seq"}
    return Due(**values, secrets=secrets.get(row["webhook_id"], []))
