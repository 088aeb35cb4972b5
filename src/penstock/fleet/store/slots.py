"""The rows of slots. Health is computed by the database from what is written here."""

from collections.abc import Sequence
from typing import Any

from penstock.fleet.model import Slot, SlotHealth
from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.ids import new_id
from penstock.wire.tasks import Gpu

_COLUMNS = (
    "id, node_id, gpu_uuid, gpu_index, gpu_model, memory_bytes, simulated, health,"
    " case when blocked then blocked_reason else gpu_detail end as health_detail"
)


def _slot(row: Row) -> Slot:
    values: dict[str, Any] = dict(row)
    values["health"] = SlotHealth(row["health"])
    values.pop("version", None)
    return Slot(**values)


async def of_nodes(conn: Reader, node_ids: Sequence[str]) -> list[Slot]:
    """All slots of these nodes, in the order of their GPUs."""
    rows = await conn.fetch(
        f"select {_COLUMNS} from fleet.slots where node_id = any($1) order by node_id, gpu_index, id",  # noqa: S608
        list(node_ids),
    )
    return [_slot(row) for row in rows]


async def lock(tx: Tx, slot_id: str) -> Slot | None:
    """One slot, held until the transaction ends."""
    row = await tx.fetchrow(f"select {_COLUMNS} from fleet.slots where id = $1 for update", slot_id)  # noqa: S608
    return _slot(row) if row else None


_UPSERT = """
insert into fleet.slots (id, node_id, gpu_uuid, gpu_index, gpu_model, memory_bytes, pci_address, numa_node, simulated)
select i.id, $1, i.uuid, i.gpu_index, i.model, i.memory_bytes, i.pci_address, i.numa_node, $2
  from unnest($3::text[], $4::text[], $5::int[], $6::text[], $7::bigint[], $8::text[], $9::int[])
       i(id, uuid, gpu_index, model, memory_bytes, pci_address, numa_node)
on conflict (node_id, gpu_uuid) do update
   set gpu_index = excluded.gpu_index, gpu_model = excluded.gpu_model, memory_bytes = excluded.memory_bytes,
       pci_address = excluded.pci_address, numa_node = excluded.numa_node, simulated = excluded.simulated
"""
_PRESENT = f"""
update fleet.slots set present = gpu_uuid = any($2), version = version + 1
 where node_id = $1 and present <> (gpu_uuid = any($2))
returning {_COLUMNS}, version
"""  # noqa: S608


async def replace(tx: Tx, node_id: str, gpus: Sequence[Gpu], *, simulated: bool) -> None:
    """These GPUs are there; any other of the node is missing."""
    await tx.execute(
        _UPSERT,
        node_id,
        simulated,
        [new_id("slt") for _ in gpus],
        [gpu.uuid for gpu in gpus],
        [gpu.index for gpu in gpus],
        [gpu.model for gpu in gpus],
        [gpu.memory_bytes for gpu in gpus],
        [gpu.pci_address for gpu in gpus],
        [gpu.numa_node for gpu in gpus],
    )
    await _tell(tx, await tx.fetch(_PRESENT, node_id, [gpu.uuid for gpu in gpus]))


_HEALTH = f"""
update fleet.slots set gpu_healthy = r.healthy, gpu_detail = r.detail, version = version + 1
  from unnest($1::text[], $2::text[], $3::boolean[], $4::text[]) r(reporter, uuid, healthy, detail)
 where node_id = r.reporter and gpu_uuid = r.uuid and (gpu_healthy, gpu_detail) is distinct from (r.healthy, r.detail)
returning {_COLUMNS}, version
"""  # noqa: S608


async def report_health(tx: Tx, reports: Sequence[tuple[str, str, bool, str]]) -> int:
    """(node, GPU, healthy, detail) of many nodes at once; how many slots changed."""
    columns: list[list[object]] = [[report[place] for report in reports] for place in range(4)]
    rows = await tx.fetch(_HEALTH, *columns)
    await _tell(tx, rows)
    return len(rows)


_BLOCK = f"""
update fleet.slots set blocked = true, blocked_reason = $2, version = version + 1
 where id = any($1) and not blocked
returning {_COLUMNS}, version
"""  # noqa: S608
_UNBLOCK = f"""
update fleet.slots set blocked = false, blocked_reason = '', version = version + 1
 where id = any($1) and blocked
returning {_COLUMNS}, version
"""  # noqa: S608


async def block(tx: Tx, slot_ids: Sequence[str], reason: str) -> None:
    """Nobody gets these slots until they are unblocked."""
    await _tell(tx, await tx.fetch(_BLOCK, list(slot_ids), reason))


async def unblock(tx: Tx, slot_ids: Sequence[str]) -> list[Slot]:
    """The slots are what their GPUs are; those that were blocked are returned."""
    rows = await tx.fetch(_UNBLOCK, list(slot_ids))
    await _tell(tx, rows)
    return [_slot(row) for row in rows]


async def _tell(tx: Tx, rows: Sequence[Row]) -> None:
    """One fact per slot that changed."""
    if rows:
        await outbox.append(
            tx,
            *(
                outbox.Event(
                    type=f"fleet.slot_{row['health']}",
                    aggregate_id=row["id"],
                    version=row["version"],
                    organisation_id=None,
                    project_id=None,
                    payload={name: row[name] for name in ("node_id", "gpu_uuid", "health", "health_detail")},
                )
                for row in rows
            ),
        )
