"""Allocations and their timelines. `move` writes the state column, and besides it only `handoffs.hand_over`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import msgspec

from penstock.compute.model import (
    FENCING,
    FINAL,
    INITIAL,
    MOVES,
    REQUESTED_FACT,
    UPDATED_FACT,
    Allocation,
    Draft,
    Event,
    State,
    fact,
)
from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.errors import Conflict, StaleRow
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id

PRIMARY_KEY: Final = "allocations_pkey"
_FIELDS: Final = tuple(Allocation.__dataclass_fields__)
_COLUMNS: Final = ", ".join(_FIELDS)
_DRAFTED: Final = tuple(Draft.__dataclass_fields__)
_LINE: Final = "jsonb_build_object('state', {state}::text, 'reason', {reason}::text, 'at', clock_timestamp())"
_GPUS: Final = (
    "array(select gpu_uuid from compute.claims where allocation_id = $1 and released_at is null order by gpu_index)"
)
_SIMULATED: Final = (
    "exists (select 1 from compute.claims where allocation_id = $1 and released_at is null and simulated)"
)


def of_row(row: Row) -> Allocation:
    """The value that a row of compute.allocations holds."""
    return msgspec.convert(dict(row), Allocation)


async def insert(tx: Tx, draft: Draft, *, node_id: str | None, reason: str, deadline_s: float) -> Allocation:
    """Add an allocation in its first state, with its timeline and its fact."""
    values = [getattr(draft, name) for name in _DRAFTED]
    row = await tx.fetchrow(
        _INSERT,
        *values,
        INITIAL,
        reason,
        node_id,
        deadline_s,
        new_id("evt"),
        REQUESTED_FACT,
        draft.payload(state=INITIAL, reason=reason, node_id=node_id),
    )
    outbox.wake(tx)
    assert row is not None
    return of_row(row)


_N: Final = len(_DRAFTED)
_INSERT: Final = f"""
    with added as (
        insert into compute.allocations ({", ".join(_DRAFTED)}, state, reason, node_id, deadline_at, placed_at,
            gpu_uuids, simulated, timeline)
        values ({", ".join(f"${n}" for n in range(1, _N + 4))},
            clock_timestamp() + make_interval(secs => ${_N + 4}),
            case when ${_N + 3}::text is not null then clock_timestamp() end,
            {_GPUS}, {_SIMULATED}, jsonb_build_array({_LINE.format(state=f"${_N + 1}", reason=f"${_N + 2}")}))
        returning {_COLUMNS}
    ), fact as (
        insert into kit.outbox ({outbox.COLUMNS})
        select ${_N + 5}, ${_N + 6}, id, version, organisation_id, project_id, correlation_id, ${_N + 7} from added
    )
    select * from added
"""  # noqa: S608


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a move sets beside the state. `billing_ended_at` only ever moves the end of billing to an earlier time.
    `correlation_id` belongs to who asked for the move; by default to who asked for the one before."""

    reason: str
    deadline_s: float | None
    billing_ended_at: datetime | None = None
    correlation_id: str | None = None


async def move(tx: Tx, current: Allocation, event: Event, change: Change) -> Allocation:
    """Apply `event`, write timeline and fact in the same statement; StaleRow when another writer was first."""
    target = MOVES.get((current.state, event))
    if target is None:
        raise Conflict(f"an allocation that is {current.state} cannot take {event}", allocation_id=current.id)
    row = await tx.fetchrow(
        _MOVE,
        current.id,
        current.version,
        current.state,
        target,
        change.reason,
        change.deadline_s,
        1 if event in FENCING else 0,
        target is State.ACTIVE,
        target in FINAL,
        change.billing_ended_at,
        target is not State.ACTIVE and target is not State.PROVISIONING,
        change.correlation_id or current.correlation_id,
        new_id("evt"),
        fact(current.state, event),
        current.payload(state=target, reason=change.reason, node_id=current.node_id),
    )
    if row is None:
        raise StaleRow(f"allocation {current.id} was changed meanwhile", allocation_id=current.id)
    outbox.wake(tx)
    return of_row(row)


#: A row that never was active has nothing to bill, so the end of billing stays unset for it.
_MOVE: Final = f"""
    with moved as (
        update compute.allocations set
            state = $4, reason = $5, version = version + 1, fence = fence + $7, failing = '',
            deadline_at = clock_timestamp() + make_interval(secs => $6::float8),
            active_at = case when $8 then clock_timestamp() else active_at end,
            ended_at = case when $9 then clock_timestamp() else ended_at end,
            billing_ended_at = case when $11 and active_at is not null
                then least(billing_ended_at, greatest(active_at, coalesce($10, clock_timestamp()))) end,
            changed_at = clock_timestamp(), asked_at = null, correlation_id = $12,
            driven_at = case when $4 = 'provisioning' then clock_timestamp() end,
            timeline = timeline || {_LINE.format(state="$4", reason="$5")}
        where id = $1 and version = $2 and state = $3
        returning {_COLUMNS}
    ), fact as (
        insert into kit.outbox ({outbox.COLUMNS})
        select $13, $14, id, version, organisation_id, project_id, $12, $15 from moved
    )
    select * from moved
"""  # noqa: S608


async def condemn(tx: Tx, current: Allocation, why: str) -> None:
    """Note that a provisioning is being undone and raise its fence, so that a late start cannot follow the stop."""
    await tx.execute(
        "update compute.allocations set failing = $3, fence = fence + 1, driven_at = clock_timestamp()"
        " where id = $1 and version = $2 and state = 'provisioning' and failing = ''",
        current.id,
        current.version,
        why,
    )


async def rename(tx: Tx, current: Allocation, *, name: str | None, labels: dict[str, str] | None) -> Allocation:
    """Set name and labels where given, and say so."""
    row = await tx.fetchrow(
        f"""
        with changed as (
            update compute.allocations set name = coalesce($3, name), labels = coalesce($4, labels),
                version = version + 1 where id = $1 and version = $2 returning {_COLUMNS}
        ), fact as (
            insert into kit.outbox ({outbox.COLUMNS})
            select $5, $6, id, version, organisation_id, project_id, $7, $8 from changed
        )
        select * from changed
        """,  # noqa: S608
        current.id,
        current.version,
        name,
        labels,
        new_id("evt"),
        UPDATED_FACT,
        correlation_id(),
        current.payload(state=current.state, reason=current.reason, node_id=current.node_id),
    )
    if row is None:
        raise StaleRow(f"allocation {current.id} was changed meanwhile", allocation_id=current.id)
    outbox.wake(tx)
    return of_row(row)


async def announced(tx: Tx, announcement: str, *, except_on: Sequence[str]) -> list[Allocation]:
    """Active allocations whose reason begins so, on other nodes than these, locked."""
    rows = await tx.fetch(
        f"select {_COLUMNS} from compute.allocations where ended_at is null and state = 'active'"  # noqa: S608
        " and starts_with(reason, $1) and node_id <> all($2) order by id for update",
        announcement,
        list(except_on),
    )
    return [of_row(row) for row in rows]


async def remark(tx: Tx, current: Allocation, reason: str) -> None:
    """Say something about an allocation that stays as it is."""
    await tx.execute(
        f"""
        with changed as (
            update compute.allocations set reason = $3, version = version + 1
             where id = $1 and version = $2 returning *
        )
        insert into kit.outbox ({outbox.COLUMNS})
        select $4, $5, id, version, organisation_id, project_id, $6, $7 from changed
        """,  # noqa: S608
        current.id,
        current.version,
        reason,
        new_id("evt"),
        UPDATED_FACT,
        correlation_id(),
        current.payload(state=current.state, reason=reason, node_id=current.node_id),
    )
    outbox.wake(tx)


async def place(tx: Tx, allocation_id: str, *, node_id: str, deadline_s: float) -> None:
    """Note the node that a waiting request got; the caller holds the row's lock and its claims."""
    await tx.execute(
        "update compute.allocations set node_id = $2, reason = '', placed_at = clock_timestamp(),"  # noqa: S608
        f" gpu_uuids = {_GPUS}, simulated = {_SIMULATED}, changed_at = clock_timestamp(), asked_at = null,"
        " deadline_at = clock_timestamp() + make_interval(secs => $3)"
        " where id = $1",
        allocation_id,
        node_id,
        deadline_s,
    )


async def relocate(tx: Tx, current: Allocation, *, node_id: str, reason: str) -> Allocation:
    """Note the node that a provisioning got in place of one that did not take it, with timeline and fact. The fence
    rises: whatever was meant for the first node is void. The caller holds the row's lock and its claims."""
    row = await tx.fetchrow(
        f"""
        with moved as (
            update compute.allocations set node_id = $3, gpu_uuids = {_GPUS}, simulated = {_SIMULATED},
                unit_id = id, stock_id = null, fence = fence + 1, relocations = relocations + 1, version = version + 1,
                placed_at = clock_timestamp(), driven_at = clock_timestamp(),
                timeline = timeline || {_LINE.format(state="state", reason="$4")}
            where id = $1 and version = $2 and state = 'provisioning' returning {_COLUMNS}
        ), fact as (
            insert into kit.outbox ({outbox.COLUMNS})
            select $5, $6, id, version, organisation_id, project_id, correlation_id, $7 from moved
        )
        select * from moved
        """,  # noqa: S608
        current.id,
        current.version,
        node_id,
        reason,
        new_id("evt"),
        UPDATED_FACT,
        current.payload(state=current.state, reason=reason, node_id=node_id),
    )
    if row is None:
        raise StaleRow(f"allocation {current.id} was changed meanwhile", allocation_id=current.id)
    outbox.wake(tx)
    return of_row(row)


async def explain(tx: Tx, allocation_id: str, reason: str) -> None:
    """Say why a request still waits."""
    await tx.execute("update compute.allocations set reason = $2 where id = $1 and reason <> $2", allocation_id, reason)


async def find(conn: Reader, allocation_id: str) -> Allocation | None:
    """One allocation, whoever owns it."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from compute.allocations where id = $1",  # noqa: S608
        allocation_id,
    )
    return of_row(row) if row else None


async def lock(tx: Tx, allocation_id: str, *, project_id: str | None = None) -> Allocation | None:
    """The same, locked until the end of the transaction; of this project only, when one is given."""
    row = await tx.fetchrow(
        f"select {_COLUMNS} from compute.allocations where id = $1 and ($2::text is null or project_id = $2)"  # noqa: S608
        " for update",
        allocation_id,
        project_id,
    )
    return of_row(row) if row else None


async def in_project(conn: Reader, project_id: str, allocation_id: str) -> Allocation | None:
    """One allocation of this project."""
    row = await conn.fetchrow(
        f"select {_COLUMNS} from compute.allocations where id = $1 and project_id = $2",  # noqa: S608
        allocation_id,
        project_id,
    )
    return of_row(row) if row else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which allocations a list shows; none means any."""

    state: str | None = None
    sku: str | None = None
    name: str | None = None
    labels: dict[str, str] | None = None
    ended: bool | None = None


async def page(conn: Reader, project_id: str, only: Filter, *, before: str | None, limit: int) -> Sequence[Allocation]:
    """The newest first; `before` is the last id of the page before."""
    rows = await conn.fetch(
        f"""
        select {_COLUMNS} from compute.allocations
        where project_id = $1 and ($2::text is null or id < $2) and ($3::text is null or state = $3)
            and ($4::text is null or sku = $4) and ($5::text is null or name = $5)
            and ($6::jsonb is null or labels @> $6) and ($7::boolean is null or (ended_at is not null) = $7)
        order by id desc limit $8
        """,  # noqa: S608
        project_id,
        before,
        only.state,
        only.sku,
        only.name,
        only.labels,
        only.ended,
        limit,
    )
    return [of_row(row) for row in rows]


async def on_node(tx: Tx, node_id: str) -> list[Allocation]:
    """What has not ended on a node and is not on its way out, locked."""
    rows = await tx.fetch(
        f"select {_COLUMNS} from compute.allocations where node_id = $1 and ended_at is null"  # noqa: S608
        " and state in ('requested', 'provisioning', 'active') order by id for update",
        node_id,
    )
    return [of_row(row) for row in rows]


async def of_payer(
    tx: Tx, organisation_id: str, *, project_id: str | None, key_id: str | None, created_until: datetime, limit: int
) -> list[Allocation]:
    """What an organisation, one of its projects or one of their keys pays for or waits for, locked."""
    rows = await tx.fetch(
        f"""
        select {_COLUMNS} from compute.allocations
        where organisation_id = $1 and not settled and purpose <> 'stock' and ended_at is null
            and state in ('requested', 'provisioning', 'active')
            and ($2::text is null or project_id = $2) and ($3::text is null or key_id = $3) and created_at <= $4
        order by id limit $5 for update
        """,  # noqa: S608
        organisation_id,
        project_id,
        key_id,
        created_until,
        limit,
    )
    return [of_row(row) for row in rows]


async def any_unended(conn: Reader, project_id: str) -> bool:
    """Whether the project has an allocation that has not ended."""
    return await conn.fetchval(
        "select exists (select 1 from compute.allocations where project_id = $1 and ended_at is null)", project_id
    )


async def unended_of_sku(conn: Reader, sku: str, *, limit: int) -> list[str]:
    """Allocations that were made with this offer and have not ended; stock is not counted."""
    rows = await conn.fetch(
        "select id from compute.allocations where sku = $1 and ended_at is null and purpose <> 'stock'"
        " order by id limit $2",
        sku,
        limit,
    )
    return [row["id"] for row in rows]


async def secrets_referred(conn: Reader, project_ids: Sequence[str]) -> set[tuple[str, str, int]]:
    """(project, name, version) of every secret that an allocation which has not ended was made with."""
    rows = await conn.fetch(
        "select distinct a.project_id, s ->> 'name' as name, (s ->> 'version')::bigint as version"
        " from compute.allocations a cross join jsonb_array_elements(a.secrets) s"
        " where a.project_id = any($1) and a.ended_at is null",
        project_ids,
    )
    return {(row["project_id"], row["name"], row["version"]) for row in rows}


async def over(conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
    """Those that neither run nor will run, with their reasons."""
    rows = await conn.fetch(
        "select id, reason from compute.allocations where id = any($1::text[])"
        " and state not in ('requested', 'provisioning', 'active')",
        allocation_ids,
    )
    return {row["id"]: row["reason"] for row in rows}
