"""The rows of slots. Health is computed by the database from what is written here."""

from collections.abc import Sequence
from typing import Any

from penstock.fleet.model import Slot, SlotHealth
from penstock.fleet.store import racks
from penstock.kit import outbox
from penstock.kit.db import Reader, Row, Tx
from penstock.kit.ids import new_id
from penstock.wire.tasks import Gpu, GpuKind

_COLUMNS = (
    "id, node_id, gpu_uuid, whole_uuid, gpu_index, gpu_model, memory_bytes, numa_node, simulated, kind, profile,"
    " threads_percent, nvlink_domain, health,"
    " case when blocked then blocked_reason when quarantined then quarantine_detail else gpu_detail end"
    " as health_detail"
)


def _slot(row: Row) -> Slot:
    values: dict[str, Any] = dict(row)
    values["health"] = SlotHealth(row["health"])
    values["kind"] = GpuKind(row["kind"])
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
insert into fleet.slots (id, node_id, gpu_uuid, gpu_index, gpu_model, memory_bytes, pci_address, numa_node, simulated,
                         kind, parent_uuid, profile, threads_percent, nvlink_domain, rack_id)
select i.id, $1, i.uuid, i.gpu_index, i.model, i.memory_bytes, i.pci_address, i.numa_node, $2,
       i.kind, i.parent_uuid, i.profile, i.threads_percent, i.nvlink_domain, i.rack_id
  from unnest($3::text[], $4::text[], $5::int[], $6::text[], $7::bigint[], $8::text[], $9::int[], $10::text[],
              $11::text[], $12::text[], $13::int[], $14::text[], $15::int[])
       i(id, uuid, gpu_index, model, memory_bytes, pci_address, numa_node, kind, parent_uuid, profile,
         threads_percent, nvlink_domain, rack_id)
on conflict (node_id, gpu_uuid) do update
   set gpu_index = excluded.gpu_index, gpu_model = excluded.gpu_model, memory_bytes = excluded.memory_bytes,
       pci_address = excluded.pci_address, numa_node = excluded.numa_node, simulated = excluded.simulated,
       kind = excluded.kind, parent_uuid = excluded.parent_uuid, profile = excluded.profile,
       threads_percent = excluded.threads_percent, nvlink_domain = excluded.nvlink_domain, rack_id = excluded.rack_id
"""
#: A GPU that was split anew has no more of its old places; one that is gone is missing. Proofs that are owed stay owed.
_FORGET = """
delete from fleet.slots where node_id = $1 and not blocked and gpu_uuid <> all($2) and whole_uuid = any($3)
"""
_PRESENT = f"""
update fleet.slots set present = gpu_uuid = any($2), version = version + 1
 where node_id = $1 and present <> (gpu_uuid = any($2))
returning {_COLUMNS}, version
"""  # noqa: S608


async def replace(tx: Tx, node_id: str, gpus: Sequence[Gpu], *, simulated: bool) -> None:
    """These GPUs and shares are there; any other GPU of the node is missing."""
    found = await racks.ensure(tx, node_id, gpus)
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
        [gpu.kind.value for gpu in gpus],
        [gpu.parent_uuid for gpu in gpus],
        [gpu.profile for gpu in gpus],
        [gpu.threads_percent for gpu in gpus],
        [gpu.nvlink_domain for gpu in gpus],
        [found[racks.key(gpu)] for gpu in gpus],
    )
    uuids = [gpu.uuid for gpu in gpus]
    await tx.execute(_FORGET, node_id, uuids, [gpu.parent_uuid or gpu.uuid for gpu in gpus])
    await _tell(tx, await tx.fetch(_PRESENT, node_id, uuids))
    await racks.count(tx, node_id)


#: Locked in the order of their ids, as dispatches lock them.
_HEALTH = f"""
with reported as (
    select s.id as slot_id, r.healthy, r.detail
      from unnest($1::text[], $2::text[], $3::boolean[], $4::text[]) r(reporter, uuid, healthy, detail)
      join fleet.slots s on s.node_id = r.reporter and s.gpu_uuid = r.uuid
     where (s.gpu_healthy, s.gpu_detail) is distinct from (r.healthy, r.detail)
     order by s.id for update of s
)
update fleet.slots set gpu_healthy = r.healthy, gpu_detail = r.detail, version = version + 1
  from reported r where id = r.slot_id
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


_LOCK_GPUS = """
select s.id from fleet.slots s
  join unnest($1::text[], $2::text[]) g(node_id, gpu_uuid) on s.node_id = g.node_id and s.whole_uuid = g.gpu_uuid
 order by s.id for update of s
"""
#: What is in quarantine follows from the open rows; new shares of a GPU that is in it are in it, too.
_QUARANTINE = f"""
update fleet.slots set quarantined = w.is_open, quarantine_detail = w.detail, version = version + 1
  from (select s.id as slot_id, q.id is not null as is_open, coalesce(q.detail, '') as detail
          from fleet.slots s left join fleet.gpu_quarantines q
            on q.node_id = s.node_id and q.gpu_uuid = s.whole_uuid and q.returned_at is null
         where s.node_id = any($1)) w
 where id = w.slot_id and (quarantined, quarantine_detail) is distinct from (w.is_open, w.detail)
returning {_COLUMNS}, version
"""  # noqa: S608


async def lock_gpus(tx: Tx, gpus: Sequence[tuple[str, str]]) -> None:
    """Hold all slots of these GPUs (node, whole GPU) until the transaction ends: nothing is started on them."""
    await tx.fetch(_LOCK_GPUS, [node_id for node_id, _ in gpus], [uuid for _, uuid in gpus])


async def follow_quarantines(tx: Tx, node_ids: Sequence[str]) -> int:
    """Bring the slots of these nodes to what their GPUs' quarantines say; how many changed."""
    rows = await tx.fetch(_QUARANTINE, list(node_ids))
    await _tell(tx, rows)
    return len(rows)


async def hold_healths(tx: Tx, slot_ids: Sequence[str]) -> list[tuple[SlotHealth, str]]:
    """(health, detail) of these slots; who wants to change one waits for this transaction."""
    rows = await tx.fetch(
        f"select {_COLUMNS} from fleet.slots where id = any($1) order by id for share",  # noqa: S608
        list(slot_ids),
    )
    return [(SlotHealth(row["health"]), row["health_detail"]) for row in rows]


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
