"""Claims on slots, and the choice of slots. A partial unique index lets only one claim per slot be held.

Placement reads `fleet.placeable_slots`, the view that the fleet publishes, and never locks the fleet's rows: heartbeats
write them all the time. The index decides who gets a slot; the loser looks again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.model import ANY_MODEL, Claim
from penstock.kit.db import Reader, Row, Tx

_COLUMNS: Final = "slot_id, node_id, gpu_uuid, gpu_index, simulated"
_FREE: Final = f"""
    select p.* from fleet.placeable_slots p
    where ($1 = '{ANY_MODEL}' or p.gpu_model = $1)
        and not exists (select 1 from compute.claims c where c.slot_id = p.slot_id and c.released_at is null)
"""  # noqa: S608


def _of_row(row: Row) -> Claim:
    return Claim(
        slot_id=row["slot_id"],
        node_id=row["node_id"],
        gpu_uuid=row["gpu_uuid"],
        gpu_index=row["gpu_index"],
        simulated=row["simulated"],
    )


async def best_fit(conn: Reader, *, gpu_model: str, gpus: int) -> Sequence[Claim]:
    """Free slots of the node with the fewest free that still fit, near one another; none when no node fits.

    Equal slots come in random order, so that racers seldom choose the same.
    """
    rows = await conn.fetch(
        f"""
        with free as materialized ({_FREE}),
        node as (
            select node_id from free group by node_id having count(*) >= $2 order by count(*), node_id limit 1
        ),
        near as (
            select f.*, count(*) over (partition by f.numa_node) as beside
            from free f join node using (node_id)
        )
        select {_COLUMNS} from near
        order by beside < $2, case when beside >= $2 then beside else -beside end, numa_node, random() limit $2
        """,  # noqa: S608
        gpu_model,
        gpus,
    )
    return [_of_row(row) for row in rows]


async def take(tx: Tx, allocation_id: str, slots: Sequence[Claim]) -> bool:
    """Claim all of these slots, or none of them when another was first. Waits for a racer that has not committed.

    Always in the order of the slots' ids, so that two racers cannot wait for one another.
    """
    savepoint = tx.conn.transaction()
    await savepoint.start()
    taken = await _insert(tx, allocation_id, slots)
    if taken == len(slots):
        await savepoint.commit()
        return True
    await savepoint.rollback()
    return False


async def _insert(tx: Tx, allocation_id: str, slots: Sequence[Claim]) -> int:
    rows = await tx.fetch(
        f"""
        insert into compute.claims (allocation_id, {_COLUMNS})
        select $1, * from unnest($2::text[], $3::text[], $4::text[], $5::int[], $6::bool[]) as s({_COLUMNS})
        order by slot_id
        on conflict (slot_id) where released_at is null do nothing returning slot_id
        """,  # noqa: S608
        allocation_id,
        [slot.slot_id for slot in slots],
        [slot.node_id for slot in slots],
        [slot.gpu_uuid for slot in slots],
        [slot.gpu_index for slot in slots],
        [slot.simulated for slot in slots],
    )
    return len(rows)


async def take_back(tx: Tx, allocation_id: str) -> None:
    """Claim again what this allocation once held, as far as nobody else holds it."""
    await _insert(tx, allocation_id, await ever(tx, allocation_id))


async def free(tx: Tx, allocation_id: str) -> Sequence[str]:
    """Give up what the allocation holds; the slots' ids."""
    rows = await tx.fetch(
        "update compute.claims set released_at = clock_timestamp()"
        " where allocation_id = $1 and released_at is null returning slot_id",
        allocation_id,
    )
    return [row["slot_id"] for row in rows]


async def held(conn: Reader, allocation_id: str) -> Sequence[Claim]:
    """What the allocation holds now."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from compute.claims where allocation_id = $1 and released_at is null"  # noqa: S608
        " order by gpu_index",
        allocation_id,
    )
    return [_of_row(row) for row in rows]


async def ever(conn: Reader, allocation_id: str) -> Sequence[Claim]:
    """What it holds or once held."""
    rows = await conn.fetch(
        f"select distinct on (gpu_index) {_COLUMNS} from compute.claims where allocation_id = $1"  # noqa: S608
        " order by gpu_index",
        allocation_id,
    )
    return [_of_row(row) for row in rows]


async def holders(conn: Reader, node_ids: Sequence[str]) -> dict[str, str]:
    """Slot → allocation for the slots of these nodes that are held."""
    rows = await conn.fetch(
        "select slot_id, allocation_id from compute.claims where node_id = any($1) and released_at is null",
        list(node_ids),
    )
    return {row["slot_id"]: row["allocation_id"] for row in rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Why a shape does or does not fit. `blocked` slots are unclaimed and out of service for now."""

    free: int
    free_on_one_node: int
    blocked_on_one_node: int


async def capacity(conn: Reader, gpu_model: str) -> Capacity:
    """Free slots for this model, in total and on the best node, and what the best node would have if all were well."""
    row = await conn.fetchrow(
        f"""
        with free as (select node_id, count(*) as n from ({_FREE}) as f group by node_id),
        blocked as (
            select node_id, count(*) as n from fleet.unplaceable_slots u
            where ($1 = '{ANY_MODEL}' or u.gpu_model = $1)
                and not exists (select 1 from compute.claims c where c.slot_id = u.slot_id and c.released_at is null)
            group by node_id
        )
        select coalesce(sum(free.n), 0)::int as free, coalesce(max(free.n), 0)::int as one,
            coalesce(max(coalesce(free.n, 0) + blocked.n), 0)::int as well
        from free full join blocked using (node_id)
        """,  # noqa: S608
        gpu_model,
    )
    assert row is not None
    return Capacity(free=row["free"], free_on_one_node=row["one"], blocked_on_one_node=row["well"])


async def free_by_model(conn: Reader) -> dict[str, int]:
    """How many slots of each GPU model are free now."""
    rows = await conn.fetch(
        f"select gpu_model, count(*) as n from ({_FREE}) as f group by gpu_model",  # noqa: S608
        ANY_MODEL,
    )
    return {row["gpu_model"]: row["n"] for row in rows}
