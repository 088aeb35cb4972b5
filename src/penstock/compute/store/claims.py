"""Claims on slots. A partial unique index lets only one claim per slot be held, and an exclusion constraint only one
project at a time on a GPU that is shared by MPS. They decide who gets a slot; the loser looks again.
"""

from collections.abc import Sequence
from typing import Final

from penstock.compute.model import Claim
from penstock.kit.db import Reader, Row, Tx

_FIELDS: Final = tuple(Claim.__dataclass_fields__)
_COLUMNS: Final = ", ".join(_FIELDS)


def _of_row(row: Row) -> Claim:
    return Claim(**{name: row[name] for name in _FIELDS})


async def take(tx: Tx, allocation_id: str, slots: Sequence[Claim], *, project_id: str) -> bool:
    """Claim all of these slots, or none of them when another was first. Waits for a racer that has not committed.

    Always in the order of the GPUs and then of the slots' ids, so that two racers cannot wait for one another.
    """
    if len(slots) == 1:
        # There is nothing to undo.
        return await _insert(tx, allocation_id, project_id, slots) == 1
    savepoint = tx.conn.transaction()
    await savepoint.start()
    taken = await _insert(tx, allocation_id, project_id, slots)
    if taken == len(slots):
        await savepoint.commit()
        return True
    await savepoint.rollback()
    return False


async def _insert(tx: Tx, allocation_id: str, project_id: str, slots: Sequence[Claim]) -> int:
    rows = await tx.fetch(
        f"""
        insert into compute.claims (allocation_id, project_id, {_COLUMNS})
        select $1, $2, * from unnest($3::text[], $4::text[], $5::text[], $6::int[], $7::bool[], $8::text[],
            $9::text[], $10::int[]) as s({_COLUMNS})
        order by node_id, whole_uuid, slot_id
        on conflict do nothing returning slot_id
        """,  # noqa: S608
        allocation_id,
        project_id,
        *([getattr(slot, name) for slot in slots] for name in _FIELDS),
    )
    return len(rows)


async def take_back(tx: Tx, allocation_id: str, *, project_id: str) -> None:
    """Claim again what this allocation last held, as far as nobody else holds it."""
    await _insert(tx, allocation_id, project_id, await ever(tx, allocation_id))


async def free(tx: Tx, allocation_id: str) -> Sequence[str]:
    """Give up what the allocation holds; the slots' ids."""
    rows = await tx.fetch(
        "update compute.claims set released_at = clock_timestamp()"
        " where allocation_id = $1 and released_at is null returning slot_id",
        allocation_id,
    )
    return [row["slot_id"] for row in rows]


async def free_slots(tx: Tx, allocation_id: str, slot_ids: Sequence[str]) -> None:
    """Give up these of them."""
    await tx.execute(
        "update compute.claims set released_at = clock_timestamp()"
        " where allocation_id = $1 and released_at is null and slot_id = any($2)",
        allocation_id,
        list(slot_ids),
    )


async def held(conn: Reader, allocation_id: str) -> Sequence[Claim]:
    """What the allocation holds now."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from compute.claims where allocation_id = $1 and released_at is null"  # noqa: S608
        " order by gpu_index, gpu_uuid",
        allocation_id,
    )
    return [_of_row(row) for row in rows]


async def ever(conn: Reader, allocation_id: str) -> Sequence[Claim]:
    """What it holds or last held, on the node that it is on."""
    rows = await conn.fetch(
        f"select distinct on (gpu_index, slot_id) {_COLUMNS} from compute.claims c where allocation_id = $1"  # noqa: S608
        " and node_id = (select a.node_id from compute.allocations a where a.id = $1) order by gpu_index, slot_id",
        allocation_id,
    )
    return [_of_row(row) for row in rows]


async def tried(conn: Reader, allocation_id: str) -> Sequence[str]:
    """The nodes that it holds or once held slots on."""
    rows = await conn.fetch("select distinct node_id from compute.claims where allocation_id = $1", allocation_id)
    return [row["node_id"] for row in rows]


async def return_to(tx: Tx, stock_id: str, slot_ids: Sequence[str]) -> None:
    """Slots with a stock unit that was never handed over are again what the ended stock held last: whoever asks for
    the proof that they are clean asks for its unit."""
    await tx.execute(
        f"insert into compute.claims (allocation_id, project_id, {_COLUMNS}, released_at)"  # noqa: S608
        f" select distinct on (slot_id) allocation_id, project_id, {_COLUMNS}, clock_timestamp()"
        " from compute.claims where allocation_id = $1 and slot_id = any($2) order by slot_id, id desc",
        stock_id,
        list(slot_ids),
    )


async def holders(conn: Reader, node_ids: Sequence[str]) -> dict[str, str]:
    """Slot → allocation for the slots of these nodes that are held."""
    rows = await conn.fetch(
        "select slot_id, allocation_id from compute.claims where node_id = any($1) and released_at is null",
        list(node_ids),
    )
    return {row["slot_id"]: row["allocation_id"] for row in rows}
