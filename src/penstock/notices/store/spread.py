"""From the log of events to deliveries: each event once for each webhook that asked for it.

Events are read in the order of (transaction, sequence), never past the oldest transaction that still runs. The place is
moved in the transaction that writes the deliveries. A webhook hears of transactions after the one that made it, so
what was read before it was there can be none of its own.
"""

from collections.abc import Sequence
from typing import Final

from penstock.kit.db import Reader, Tx
from penstock.kit.ids import new_id

#: Where to go on: the place, or after the transaction of the first listener if that is later. No listener, no row.
#: One bound and not two: an index scan begins at the first that it is given, which may be a month back.
_START: Final = """
select greatest(p.tx, l.since)::text as tx, case when l.since >= p.tx then 9223372036854775807 else p.seq end as seq
  from notices.progress p,
       (select since from notices.webhooks where state = 'active' order by since limit 1) l
"""
NEWS: Final = """
select exists (
    select 1 from kit.outbox o
     where (o.tx, o.seq) > ($1::text::xid8, $2) and o.tx < pg_snapshot_xmin(pg_current_snapshot()))
"""
BATCH: Final = """
with batch as (
    select o.tx, o.seq, o.type, o.organisation_id, o.project_id
      from kit.outbox o
     where (o.tx, o.seq) > ($1::text::xid8, $2) and o.tx < pg_snapshot_xmin(pg_current_snapshot())
     order by o.tx, o.seq limit $3
)
select b.tx::text as tx, b.seq, b.type, b.project_id, w.id as webhook_id
  from batch b left join lateral (
    select w.id from notices.webhooks w
     where w.state = 'active' and w.project_id = b.project_id and w.since < b.tx
       and exists (select 1 from unnest(w.event_types) t
                    where t in ('*', b.type) or (right(t, 2) = '.*' and starts_with(b.type, left(t, -1))))
    union all
    select w.id from notices.webhooks w
     where b.project_id is null and w.state = 'active' and w.organisation_id = b.organisation_id
       and w.sees_billing and w.since < b.tx
       and exists (select 1 from unnest(w.event_types) t
                    where (starts_with(t, 'billing.') or starts_with(t, 'payments.'))
                      and (t = b.type or (right(t, 2) = '.*' and starts_with(b.type, left(t, -1)))))
  ) w on true
 order by b.tx, b.seq, w.id
"""
_INSERT: Final = """
insert into notices.deliveries (id, webhook_id, event_id, type, aggregate_id, version, organisation_id, project_id,
    correlation_id, occurred_at, payload, give_up_at)
select n.id, n.webhook_id, o.event_id, o.type, o.aggregate_id, o.version, o.organisation_id, o.project_id,
       o.correlation_id, o.occurred_at, o.payload, clock_timestamp() + make_interval(secs => $4)
  from unnest($1::text[], $2::text[], $3::bigint[]) with ordinality as n (id, webhook_id, seq, position)
  join kit.outbox o on o.seq = n.seq
 order by n.position
on conflict (webhook_id, event_id) do nothing
"""


async def news(conn: Reader) -> bool:
    """Whether somebody listens and something happened; asked often, and cheap."""
    begin = await start(conn)
    return False if begin is None else bool(await conn.fetchval(NEWS, *begin))


async def lock(tx: Tx) -> bool:
    """Whether it is this process's turn."""
    return await tx.fetchval("select true from notices.progress for update skip locked") is not None


async def batch(tx: Tx, *, limit: int) -> list[tuple[str, int, str, str | None, str | None]]:
    """The next events in order: transaction, sequence, type, project, and the webhook that asked for it or none; an
    event that several asked for comes several times."""
    begin = await start(tx)
    if begin is None:
        return []
    rows = await tx.fetch(BATCH, *begin, limit)
    return [(row["tx"], row["seq"], row["type"], row["project_id"], row["webhook_id"]) for row in rows]


async def start(conn: Reader) -> tuple[str, int] | None:
    """Where to go on, as plain values: none when nobody is to be told yet, whatever has been said."""
    row = await conn.fetchrow(_START)
    return None if row is None else (row["tx"], row["seq"])


async def insert(tx: Tx, pairs: Sequence[tuple[str, int]], *, give_up_s: float) -> None:
    """A delivery for each (webhook, event's sequence), in this order."""
    await tx.execute(
        _INSERT,
        [new_id("dlv") for _ in pairs],
        [webhook_id for webhook_id, _ in pairs],
        [seq for _, seq in pairs],
        give_up_s,
    )


async def advance(tx: Tx, transaction: str, seq: int) -> None:
    """Go on after this event."""
    await tx.execute("update notices.progress set tx = $1::text::xid8, seq = $2", transaction, seq)
