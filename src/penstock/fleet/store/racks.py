"""The rows of racks: the equal slots of a node, counted together for placement.

A rack is all whole GPUs of a model on a node, or the shares of one size of one GPU. Its count changes only here, with
an inventory; what is unhealthy is taken off by whoever reads it.
"""

from collections.abc import Sequence

from penstock.kit.db import Tx
from penstock.wire.tasks import Gpu, GpuKind

Key = tuple[str, str, str, str]

_ENSURE = """
insert into fleet.racks (node_id, kind, gpu_model, profile, parent_uuid, memory_bytes)
select $1, i.kind, i.model, i.profile, i.parent, i.memory_bytes
  from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[])
       i(kind, model, profile, parent, memory_bytes)
on conflict (node_id, kind, gpu_model, profile, parent_uuid) do update set memory_bytes = excluded.memory_bytes
returning id, kind, gpu_model, profile, parent_uuid
"""
_COUNT = """
update fleet.racks r set slots = c.n
  from (select r.id, count(s.id)::int as n from fleet.racks r left join fleet.slots s on s.rack_id = r.id and s.present
         where r.node_id = $1 group by r.id) c
 where r.id = c.id and r.slots <> c.n
"""


def key(gpu: Gpu) -> Key:
    """What the slots of a rack have in common."""
    return gpu.kind.value, gpu.model, gpu.profile, "" if gpu.kind is GpuKind.WHOLE else gpu.parent_uuid


async def ensure(tx: Tx, node_id: str, gpus: Sequence[Gpu]) -> dict[Key, int]:
    """The racks of these GPUs, made where they are new."""
    memory: dict[Key, int] = {}
    for gpu in gpus:
        memory[key(gpu)] = min(gpu.memory_bytes, memory.get(key(gpu), gpu.memory_bytes))
    columns = [[each[place] for each in memory] for place in range(4)]
    rows = await tx.fetch(_ENSURE, node_id, *columns, list(memory.values()))
    return {(row["kind"], row["gpu_model"], row["profile"], row["parent_uuid"]): row["id"] for row in rows}


async def count(tx: Tx, node_id: str) -> None:
    """Bring the counts of the node's racks to the slots that are there."""
    await tx.execute(_COUNT, node_id)
