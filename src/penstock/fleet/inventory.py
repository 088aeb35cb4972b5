"""What a node says it has, taken over as far as it was approved."""

import re
from collections.abc import Sequence
from typing import Final

from penstock.fleet import metrics
from penstock.fleet.model import Node, Slot
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.store import slots as slot_rows
from penstock.kit.db import Tx
from penstock.kit.telemetry import logger
from penstock.wire import subjects
from penstock.wire.tasks import Gpu, Inventory

GPUS_MAX: Final = 1024
_TEXT_MAX: Final = 255
_MEMORY_BYTES_MAX: Final = 1 << 50
_UUID: Final = re.compile(r"[A-Za-z0-9._:/-]{1,127}")
_TEXT: Final = re.compile(r"[^\x00-\x1f\x7f]{0,255}")

_log = logger(__name__)


def problem(inventory: Inventory) -> str | None:
    """What is wrong with it, if anything."""
    if len(inventory.gpus) > GPUS_MAX:
        return f"inventory.gpus: max {GPUS_MAX} entries"
    if len({gpu.uuid for gpu in inventory.gpus}) != len(inventory.gpus):
        return "inventory.gpus: a uuid comes twice"
    if not _TEXT.fullmatch(inventory.driver_version):
        return f"inventory.driver_version: max {_TEXT_MAX} printable characters"
    return next((text for text in map(_gpu_problem, inventory.gpus) if text), None)


def _gpu_problem(gpu: Gpu) -> str | None:
    if not _UUID.fullmatch(gpu.uuid):
        return "gpu.uuid: 1 to 127 letters, digits and ._:/-"
    if not (_TEXT.fullmatch(gpu.model) and _TEXT.fullmatch(gpu.pci_address)):
        return f"gpu.model and gpu.pci_address: max {_TEXT_MAX} printable characters"
    if not (0 <= gpu.index < 1 << 16 and -1 <= gpu.numa_node < 1 << 16):
        return "gpu.index and gpu.numa_node: max 65535"
    if not 0 <= gpu.memory_bytes <= _MEMORY_BYTES_MAX:
        return f"gpu.memory_bytes: max {_MEMORY_BYTES_MAX}"
    return None


def approved(inventory: Inventory, known: Sequence[Slot], limit: int) -> list[Gpu]:
    """At most `limit` GPUs: those that have a slot already come first, then by index."""
    with_slot = {slot.gpu_uuid for slot in known}
    ranked = sorted(inventory.gpus, key=lambda gpu: (gpu.uuid not in with_slot, gpu.index, gpu.uuid))
    return ranked[:limit]


async def apply(tx: Tx, node: Node, inventory: Inventory) -> None:
    """Bring the node's slots to what it reports, and sound the alarm when that is more than was approved."""
    known = await slot_rows.of_nodes(tx, [node.id])
    await slot_rows.replace(tx, node.id, approved(inventory, known, node.gpus_approved), simulated=inventory.simulated)
    reported = len(inventory.gpus)
    if reported > node.gpus_approved:
        metrics.OVER_CAPACITY.inc()
        _log.warning("capacity_above_approved", node_id=node.id, reported=reported, approved=node.gpus_approved)
        if reported != node.gpus_reported:
            await node_rows.capacity_exceeded(tx, node, reported=reported)
    tx.hint(subjects.CAPACITY)
