"""The rows of node tasks and the fences of allocations."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.fleet.model import Task, TaskOutcome, TaskState
from penstock.kit.db import Reader, Row, Tx
from penstock.wire.tasks import SignedTask

_COLUMNS = "id, node_id, type, allocation_id, state, fence, attempts, error_code, detail, created_at, finished_at, seq"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTask:
    """A task that was just signed."""

    id: str
    node_id: str
    type: str
    allocation_id: str | None
    fence: int
    dedupe_key: str
    signed: SignedTask
    correlation_id: str
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A task on its way, and how long it waited."""

    id: str
    signed: SignedTask
    waited_s: float


@dataclass(frozen=True, slots=True)
class Want:
    """So many tasks of the node are wanted for this link."""

    node_id: str
    link_id: str
    count: int


def _values(row: Row) -> dict[str, Any]:
    values: dict[str, Any] = dict(row)
    values["state"] = TaskState(row["state"])
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Before a task is signed: the database's time, the task that was dispatched under its key before, the allocation's
    fence, and whether this is the first that the fleet hears of it."""

    at: datetime
    repeated: str | None
    fence: int
    first: bool


#: An inserted row has no other version, which is what `xmax` tells.
_PREPARE = """
with repeated as (
    select id from fleet.tasks where dedupe_key = $1
), raised as (
    insert into fleet.fences as f (allocation_id, fence)
    select $2, $3 where $2::text is not null and not exists (select 1 from repeated)
    on conflict (allocation_id) do update
       set fence = greatest(f.fence, excluded.fence), changed_at = clock_timestamp()
    returning fence, xmax = 0 as first
)
select clock_timestamp() as at, (select id from repeated) as repeated,
       coalesce((select fence from raised), $3) as fence, coalesce((select first from raised), true) as first
"""


async def prepare(tx: Tx, dedupe_key: str, allocation_id: str | None, fence: int) -> Ready:
    """Look for the task, and raise the allocation's fence, unless it is higher already or the task is there."""
    row = await tx.fetchrow(_PREPARE, dedupe_key, allocation_id, fence)
    assert row is not None
    return Ready(**row)


async def fence_off(tx: Tx, allocation_id: str, fence: int) -> list[str]:
    """End the open tasks under lower fences. One that was never sent has certainly had no effect."""
    rows = await tx.fetch(
        "update fleet.tasks set state = case when attempts = 0 then 'refused' else 'expired' end,"
        " error_code = 'stale_fence', detail = 'a task under a higher fence was dispatched',"
        " finished_at = clock_timestamp()"
        " where allocation_id = $1 and fence < $2 and state in ('queued', 'leased') returning id",
        allocation_id,
        fence,
    )
    return [row["id"] for row in rows]


_WITHDRAW = """
update fleet.tasks t
   set state = 'refused', error_code = 'withdrawn', detail = 'the node did not take it', finished_at = clock_timestamp()
 where id = $1 and created_at < clock_timestamp() - make_interval(secs => $2)
   and (state = 'queued' and attempts = 0
        or type = any($3) and state in ('queued', 'leased') and exists (
            select 1 from fleet.heartbeats h
             where h.node_id = t.node_id and h.at < clock_timestamp() - make_interval(secs => $4)))
returning id
"""


async def withdraw(tx: Tx, task_id: str, *, older_than_s: float, harmless: Sequence[str], silent_for_s: float) -> bool:
    """End a task that has waited so long and was never sent: it has certainly had no effect, and never will. One of the
    harmless types is ended also when it was sent, once its node has been silent for so long."""
    return bool(await tx.fetch(_WITHDRAW, task_id, older_than_s, list(harmless), silent_for_s))


async def insert(tx: Tx, task: NewTask) -> str:
    """Queue it; the id of the first task with this key."""
    made = await tx.fetchval(
        "insert into fleet.tasks (id, node_id, type, allocation_id, fence, dedupe_key, body, key_id, signature,"
        " correlation_id, expires_at) values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
        " on conflict (dedupe_key) do nothing returning id",
        task.id,
        task.node_id,
        task.type,
        task.allocation_id,
        task.fence,
        task.dedupe_key,
        task.signed.body,
        task.signed.key_id,
        task.signed.signature,
        task.correlation_id,
        task.expires_at,
    )
    return made or await tx.fetchval("select id from fleet.tasks where dedupe_key = $1", task.dedupe_key)


#: Nothing waits for the disk here: a lease that a crash of the database takes back is given again.
_LEASE = """
with picked as (
    select t.id, w.link_id
      from unnest($1::text[], $2::text[], $3::int[]) w(node_id, link_id, count)
      join fleet.links l on l.node_id = w.node_id and l.link_id = w.link_id
      cross join lateral (
        select o.id from fleet.tasks o
         where o.node_id = w.node_id and o.state in ('queued', 'leased')
           and (o.state = 'queued' or o.leased_until < clock_timestamp())
           and o.expires_at > clock_timestamp()
         order by o.seq limit w.count for update skip locked) t
), leased as (
    update fleet.tasks t
       set state = 'leased', attempts = attempts + 1, leased_by = picked.link_id,
           leased_until = clock_timestamp() + make_interval(secs => $4)
      from picked where t.id = picked.id
    returning t.id, t.seq, t.leased_by, t.body, t.key_id, t.signature,
              extract(epoch from clock_timestamp() - t.created_at)::float8 as waited_s
)
select leased.* from leased, (select set_config('synchronous_commit', 'off', true)) as unflushed order by seq
"""


async def lease(conn: Reader, wants: Sequence[Want], *, lease_s: float) -> dict[str, list[Leased]]:
    """The oldest waiting tasks of these nodes, by link; none for a link that another has superseded."""
    nodes, links, counts = zip(*((want.node_id, want.link_id, want.count) for want in wants), strict=True)
    leased: dict[str, list[Leased]] = {}
    for row in await conn.fetch(_LEASE, nodes, links, counts, lease_s):
        signed = SignedTask(body=row["body"], key_id=row["key_id"], signature=row["signature"])
        task = Leased(id=row["id"], signed=signed, waited_s=row["waited_s"])
        leased.setdefault(row["leased_by"], []).append(task)
    return leased


async def give_back(conn: Reader, link_ids: list[str], *, except_ids: list[str]) -> None:
    """These links do not know of any leased task but those excepted: the others are for anybody again."""
    await conn.execute(
        "update fleet.tasks set state = 'queued', leased_by = null, leased_until = null"
        " where leased_by = any($1) and state = 'leased' and not id = any($2)",
        link_ids,
        except_ids,
    )


async def free_leases(tx: Tx, node_id: str) -> None:
    """The node has a new link: what was sent over the old one may not have arrived. A task that somebody finishes at
    this moment is passed over."""
    await tx.execute(
        "update fleet.tasks set state = 'queued', leased_by = null, leased_until = null where id in"
        " (select id from fleet.tasks where node_id = $1 and state = 'leased' for update skip locked)",
        node_id,
    )


async def renew_leases(tx: Tx, link_ids: list[str], *, lease_s: float) -> dict[str, set[str]]:
    """Keep what living links work on; link → the tasks that it still owes."""
    await tx.execute(
        "update fleet.tasks set leased_until = clock_timestamp() + make_interval(secs => $2) where id in"
        " (select id from fleet.tasks where leased_by = any($1) and state = 'leased'"
        " and leased_until < clock_timestamp() + make_interval(secs => $2 / 2) for update skip locked)",
        link_ids,
        lease_s,
    )
    rows = await tx.fetch(
        "select leased_by, id from fleet.tasks where leased_by = any($1) and state = 'leased'", link_ids
    )
    owed: dict[str, set[str]] = {}
    for row in rows:
        owed.setdefault(row["leased_by"], set()).add(row["id"])
    return owed


async def nodes_with_work(conn: Reader, node_ids: list[str]) -> set[str]:
    """Those of the nodes that have something to lease."""
    rows = await conn.fetch(
        "select distinct node_id from fleet.tasks where node_id = any($1) and state in ('queued', 'leased')"
        " and (state = 'queued' or leased_until < clock_timestamp()) and expires_at > clock_timestamp()",
        node_ids,
    )
    return {row["node_id"] for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A task that was sent to its node, with the fence that its allocation has now."""

    type: str
    state: TaskState
    allocation_id: str | None
    fence: int
    fence_now: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A task of a node that can still be done, and the link that has it."""

    body: bytes
    leased_by: str | None


async def held(conn: Reader, task_id: str, node_id: str) -> Held | None:
    """The task, while it is open, in time and under its allocation's fence."""
    row = await conn.fetchrow(
        "select t.body, t.leased_by from fleet.tasks t left join fleet.fences f on f.allocation_id = t.allocation_id"
        " where t.id = $1 and t.node_id = $2 and t.state in ('queued', 'leased') and t.attempts > 0"
        " and t.expires_at > clock_timestamp() and coalesce(f.fence, t.fence) <= t.fence",
        task_id,
        node_id,
    )
    return Held(**row) if row else None


async def lock_sent(tx: Tx, task_id: str, node_id: str) -> Sent | None:
    """The task, if it ever went to this node; held until the transaction ends."""
    row = await tx.fetchrow(
        "select t.type, t.state, t.allocation_id, t.fence, coalesce(f.fence, t.fence) as fence_now"
        " from fleet.tasks t left join fleet.fences f on f.allocation_id = t.allocation_id"
        " where t.id = $1 and t.node_id = $2 and t.attempts > 0 for update of t",
        task_id,
        node_id,
    )
    return Sent(**_values(row)) if row else None


async def finish(tx: Tx, task_id: str, state: TaskState, *, answer: bytes, error_code: str, detail: str) -> None:
    """The task has its outcome."""
    await tx.execute(
        "update fleet.tasks set state = $2, answer = $3, error_code = $4, detail = $5,"
        " finished_at = clock_timestamp(), leased_by = null, leased_until = null where id = $1",
        task_id,
        state,
        answer,
        error_code,
        detail,
    )


async def outcome(conn: Reader, task_id: str) -> TaskOutcome | None:
    """How it ended, or none while it has not."""
    row = await conn.fetchrow(
        "select id as task_id, state, error_code, detail, answer from fleet.tasks"
        " where id = $1 and finished_at is not null",
        task_id,
    )
    return TaskOutcome(**_values(row)) if row else None


async def expire(tx: Tx, *, limit: int) -> list[str]:
    """End the open tasks whose time is over."""
    rows = await tx.fetch(
        "update fleet.tasks set state = 'expired', error_code = 'expired', detail = 'not done in time',"
        " finished_at = clock_timestamp()"
        " where id in (select id from fleet.tasks where state in ('queued', 'leased')"
        " and expires_at <= clock_timestamp() order by expires_at limit $1 for update skip locked) returning id",
        limit,
    )
    return [row["id"] for row in rows]


async def delete_old(tx: Tx, *, older_than_s: float, limit: int) -> None:
    """Forget what ended long ago."""
    await tx.execute(
        "delete from fleet.tasks where id in (select id from fleet.tasks"
        " where finished_at < clock_timestamp() - make_interval(secs => $1) limit $2)",
        older_than_s,
        limit,
    )
    await tx.execute(
        "delete from fleet.fences f where changed_at < clock_timestamp() - make_interval(secs => $1)"
        " and not exists (select 1 from fleet.tasks t where t.allocation_id = f.allocation_id"
        " and t.state in ('queued', 'leased'))",
        older_than_s,
    )


async def count_open(conn: Reader) -> dict[str, int]:
    """How many tasks wait, and how many are on nodes."""
    rows = await conn.fetch(
        "select state, count(*) as count from fleet.tasks where state in ('queued', 'leased') group by state"
    )
    return {row["state"]: row["count"] for row in rows}


async def page(conn: Reader, node_id: str, *, before: int, limit: int) -> list[Task]:
    """The node's tasks, the newest first."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from fleet.tasks where node_id = $1 and seq < $2 order by seq desc limit $3",  # noqa: S608
        node_id,
        before,
        limit,
    )
    return [Task(**_values(row)) for row in rows]


async def of_request(conn: Reader, correlation_id: str, *, limit: int) -> list[Task]:
    """Tasks of one request on all nodes, oldest first."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from fleet.tasks where correlation_id = $1 order by seq limit $2",  # noqa: S608
        correlation_id,
        limit,
    )
    return [Task(**_values(row)) for row in rows]
