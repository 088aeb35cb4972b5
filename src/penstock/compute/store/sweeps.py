"""What the loops of the worker look for: rows that nobody drives, that are overdue, or that wait for capacity.

Database time decides, and `for update skip locked` lets any number of workers share the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from penstock.compute.model import Allocation, State
from penstock.compute.store.allocations import of_row
from penstock.kit.db import Reader, Tx

_MOVING: Final = "state in ('provisioning', 'releasing') or state = 'requested' and node_id is not null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a saga checks while it waits."""

    state: State
    fence: int
    overdue: bool


async def touch(conn: Reader, allocation_id: str) -> Pulse | None:
    """Note that a saga is at work on it, and look whether it still should be."""
    row = await conn.fetchrow(
        "update compute.allocations set driven_at = clock_timestamp() where id = $1"
        " returning state, fence, coalesce(deadline_at < clock_timestamp(), false) as overdue",
        allocation_id,
    )
    return Pulse(state=State(row["state"]), fence=row["fence"], overdue=row["overdue"]) if row else None


async def take_up(tx: Tx, allocation_id: str) -> tuple[Allocation, bool] | None:
    """The same with the whole row, locked, and whether it is overdue."""
    row = await tx.fetchrow(
        "update compute.allocations set driven_at = clock_timestamp() where id = $1"
        " returning *, coalesce(deadline_at < clock_timestamp(), false) as overdue",
        allocation_id,
    )
    return (of_row(row), row["overdue"]) if row else None


@dataclass(frozen=True, slots=True)
class Undriven:
    """An allocation that no saga works on. `stuck` when being asked has not helped for long."""

    id: str
    stuck: bool


async def take_undriven(
    tx: Tx, *, fresh_s: float, handoff_s: float, idle_s: float, stuck_s: float, limit: int
) -> Sequence[Undriven]:
    """Rows not at rest that no saga touched lately; `fresh_s` is for those that none has touched at all, `handoff_s`
    for units of stock, which are handed over without one.

    `asked_at` keeps other workers from asking for the same row at once.
    """
    rows = await tx.fetch(
        f"""
        update compute.allocations set asked_at = clock_timestamp() where id in (
            select id from compute.allocations
            where deadline_at is not null and ({_MOVING})
                and (driven_at is null and changed_at < clock_timestamp() - make_interval(secs => $1)
                    or stock_id is not null and state = 'provisioning'
                        and driven_at < clock_timestamp() - make_interval(secs => $5)
                    or driven_at < clock_timestamp() - make_interval(secs => $2))
                and (asked_at is null or asked_at < clock_timestamp() - make_interval(secs => $2))
            order by changed_at limit $4 for update skip locked)
        returning id, greatest(driven_at, changed_at) < clock_timestamp() - make_interval(secs => $3) as stuck
        """,  # noqa: S608
        fresh_s,
        idle_s,
        stuck_s,
        limit,
        handoff_s,
    )
    return [Undriven(row["id"], row["stuck"]) for row in rows]


async def overdue_requests(tx: Tx, limit: int) -> Sequence[Allocation]:
    """Requests past their deadline, locked."""
    rows = await tx.fetch(
        "select * from compute.allocations where state = 'requested' and deadline_at < clock_timestamp()"
        " order by deadline_at limit $1 for update skip locked",
        limit,
    )
    return [of_row(row) for row in rows]


async def take_overdue(tx: Tx, *, pause_s: float, limit: int) -> Sequence[str]:
    """Allocations past their deadline that only their saga may end; the same one again after `pause_s`."""
    rows = await tx.fetch(
        """
        update compute.allocations set asked_at = clock_timestamp() where id in (
            select id from compute.allocations
            where state in ('provisioning', 'releasing') and deadline_at < clock_timestamp()
                and (asked_at is null or asked_at < clock_timestamp() - make_interval(secs => $1))
            order by deadline_at limit $2 for update skip locked)
        returning id
        """,
        pause_s,
        limit,
    )
    return [row["id"] for row in rows]


async def waiting(conn: Reader, limit: int) -> Sequence[str]:
    """Waiting requests in the order in which capacity is offered: one per project and round, the project that was
    served longest ago first; within a project the oldest first. Those that stock is being stopped for have theirs."""
    rows = await conn.fetch(
        """
        with queue as (
            select id, project_id, created_at,
                row_number() over (partition by project_id order by created_at, id) as round
            from compute.waiting where not reserved
        )
        select q.id from queue q
        left join lateral (
            select placed_at from compute.allocations a
            where a.project_id = q.project_id and placed_at is not null order by placed_at desc limit 1
        ) served on true
        order by q.round, served.placed_at nulls first, q.created_at, q.id limit $1
        """,
        limit,
    )
    return [row["id"] for row in rows]


async def take_waiting(tx: Tx, allocation_id: str) -> Allocation | None:
    """A request that still waits, locked; none when it does not, or another worker has it."""
    row = await tx.fetchrow(
        "select * from compute.allocations where id = $1 and state = 'requested' and node_id is null"
        " and deadline_at >= clock_timestamp() for update skip locked",
        allocation_id,
    )
    return of_row(row) if row else None


async def waiting_ahead(conn: Reader, *, sku: str, gpus: int) -> int:
    """How many requests of this shape wait already, and have nothing in sight."""
    return await conn.fetchval(
        "select count(*) from compute.waiting where sku = $1 and gpus = $2 and not reserved",
        sku,
        gpus,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """An active allocation whose unit has ended by itself."""

    id: str
    exit_code: int | None
    exit_class: str
    ran_until: datetime | None


async def exited(conn: Reader, limit: int) -> Sequence[Exited]:
    """Active allocations whose node reports that their unit has exited."""
    rows = await conn.fetch(
        "select a.id, u.exit_code, u.exit_class, e.ran_until from compute.allocations a"
        " join fleet.units u on u.unit_id = a.unit_id and u.node_id = a.node_id"
        " left join fleet.unit_ends e on e.unit_id = a.unit_id and e.node_id = a.node_id"
        " where a.state = 'active' and u.state = 'exited' order by a.id limit $1",
        limit,
    )
    return [Exited(**dict(row)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreported:
    """An active allocation whose unit is on no list of its node, and until when it was known to run."""

    id: str
    ran_until: datetime


async def unreported(conn: Reader, *, after_s: float, limit: int) -> Sequence[Unreported]:
    """Active allocations that are not on the list of a node that has had `after_s` to put them there. One statement:
    a node that was away gives its list and its sign of life together, and they are seen together or not at all."""
    rows = await conn.fetch(
        """
        select a.id, coalesce(e.ran_until, a.active_at) as ran_until
        from compute.allocations a
        join fleet.reporting_nodes n on n.node_id = a.node_id
        left join fleet.unit_ends e on e.unit_id = a.unit_id and e.node_id = a.node_id
        where a.state = 'active' and n.reported_at > a.active_at + make_interval(secs => $1)
            and not exists (select 1 from fleet.units u where u.unit_id = a.unit_id and u.node_id = a.node_id)
        order by a.active_at limit $2
        """,
        after_s,
        limit,
    )
    return [Unreported(**dict(row)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A unit that no living allocation owns on that node. `minute` is the database's: one order to stop for each."""

    unit_id: str
    node_id: str
    allocation_id: str | None
    fence: int
    minute: int


async def orphans(conn: Reader, *, grace_s: float, limit: int) -> Sequence[Orphan]:
    """Units reported well after their allocation ended, or that never had one here. A unit that was handed over has
    had two: the later one counts."""
    rows = await conn.fetch(
        """
        select u.unit_id, u.node_id, a.id as allocation_id, coalesce(a.fence, 0) as fence,
            floor(extract(epoch from clock_timestamp()) / 60)::bigint as minute
        from fleet.units u
        left join lateral (
            select id, fence, node_id, ended_at from compute.allocations
            where unit_id = u.unit_id order by ended_at desc nulls first, id desc limit 1
        ) a on true
        where u.since < clock_timestamp() - make_interval(secs => $1)
            and (a.id is null or a.node_id is distinct from u.node_id
                or a.ended_at < u.reported_at - make_interval(secs => $1))
        order by u.unit_id limit $2
        """,
        grace_s,
        limit,
    )
    return [Orphan(**dict(row)) for row in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproved:
    """A unit that is over, and the slots of it that are blocked because nobody proved them clean."""

    unit_id: str
    node_id: str
    allocation_id: str
    fence: int
    minute: int
    slot_ids: Sequence[str]
    gpu_uuids: Sequence[str]


async def unproved(conn: Reader, limit: int) -> Sequence[Unproved]:
    """Blocked slots whose node answers again, by the ended allocation that held them last."""
    rows = await conn.fetch(
        """
        select a.unit_id, a.node_id, a.id as allocation_id, a.fence,
            floor(extract(epoch from clock_timestamp()) / 60)::bigint as minute,
            array_agg(u.slot_id) as slot_ids, array_agg(last.gpu_uuid) as gpu_uuids
        from fleet.unplaceable_slots u
        cross join lateral (
            select c.allocation_id, c.gpu_uuid, c.released_at from compute.claims c
            where c.slot_id = u.slot_id order by c.id desc limit 1
        ) last
        join compute.allocations a on a.id = last.allocation_id
        where u.health = 'cleanup_blocked' and u.node_state in ('ready', 'cordoned', 'draining')
            and last.released_at is not null and a.state in ('failed', 'released')
        group by a.id order by a.id limit $1
        """,
        limit,
    )
    return [Unproved(**dict(row)) for row in rows]


async def occupied(conn: Reader, node_ids: Sequence[str]) -> Sequence[str]:
    """Those of the nodes with allocations that have not ended."""
    rows = await conn.fetch(
        "select distinct node_id from compute.allocations where node_id = any($1) and ended_at is null"
        " order by node_id",
        node_ids,
    )
    return [row["node_id"] for row in rows]


async def holding(conn: Reader, slot_ids: Sequence[str]) -> dict[str, str]:
    """Allocation → the first of these slots that it holds, of those that are not on their way out."""
    rows = await conn.fetch(
        "select c.allocation_id, min(c.slot_id) as slot_id from compute.claims c"
        " join compute.allocations a on a.id = c.allocation_id"
        " where c.slot_id = any($1) and c.released_at is null"
        " and a.state in ('requested', 'provisioning', 'active') group by c.allocation_id order by 1",
        slot_ids,
    )
    return {row["allocation_id"]: row["slot_id"] for row in rows}


async def unreleased(
    conn: Reader, node_ids: Sequence[str], *, retry_s: float, retries_max: int, limit: int
) -> Sequence[str]:
    """Failed releases on these nodes whose next try is due, the longest ago first. Each try doubles the pause."""
    rows = await conn.fetch(
        """
        select a.id from compute.allocations a
        cross join lateral (
            select count(*)::int - 1 as tries from jsonb_array_elements(a.timeline) as line
            where line ->> 'state' = 'release_failed'
        ) failed
        where a.state = 'release_failed' and a.node_id = any($1) and failed.tries < $3
            and a.changed_at <= clock_timestamp() - make_interval(secs => $2::float8 * 2 ^ least(failed.tries, $3))
        order by a.changed_at limit $4
        """,
        node_ids,
        retry_s,
        retries_max,
        limit,
    )
    return [row["id"] for row in rows]


async def failed_releases(conn: Reader, node_ids: Sequence[str], limit: int) -> Sequence[str]:
    """All failed releases on these nodes, due or not."""
    rows = await conn.fetch(
        "select id from compute.allocations where state = 'release_failed' and node_id = any($1)"
        " order by changed_at limit $2",
        node_ids,
        limit,
    )
    return [row["id"] for row in rows]


async def counts(conn: Reader) -> dict[str, int]:
    """How many allocations are in each state."""
    rows = await conn.fetch("select state, count(*) as n from compute.allocations group by state")
    return {row["state"]: row["n"] for row in rows}
