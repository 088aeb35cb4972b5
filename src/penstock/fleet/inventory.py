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
from penstock.wire.tasks import Gpu, GpuKind, Inventory

GPUS_MAX: Final = 1024
_TEXT_MAX: Final = 255
_MEMORY_BYTES_MAX: Final = 1 << 50
_PERCENT_MAX: Final = 100
_PROFILE: Final = re.compile(r"([0-9]{1,2}c\.)?[0-9]{1,2}g\.[0-9]{1,4}gb([+-][a-z0-9.+-]{1,15})?")
_LINK: Final = re.compile(r"[A-Za-z0-9._:/-]{0,127}")
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
    wrong = next((text for text in map(_gpu_problem, inventory.gpus) if text), None)
    return wrong or _mixed(inventory.gpus)


def _gpu_problem(gpu: Gpu) -> str | None:
    if not _UUID.fullmatch(gpu.uuid):
        return "gpu.uuid: 1 to 127 letters, digits and ._:/-"
    if not (_TEXT.fullmatch(gpu.model) and _TEXT.fullmatch(gpu.pci_address)):
        return f"gpu.model and gpu.pci_address: max {_TEXT_MAX} printable characters"
    if not (0 <= gpu.index < 1 << 16 and -1 <= gpu.numa_node < 1 << 16):
        return "gpu.index and gpu.numa_node: max 65535"
    if not 0 <= gpu.memory_bytes <= _MEMORY_BYTES_MAX:
        return f"gpu.memory_bytes: max {_MEMORY_BYTES_MAX}"
    if not _LINK.fullmatch(gpu.nvlink_domain):
        return "gpu.nvlink_domain: max 127 letters, digits and ._:/-"
    return _share_problem(gpu)


def _share_problem(gpu: Gpu) -> str | None:
    """A share names its GPU and its size; a whole GPU has neither."""
    if gpu.kind is GpuKind.WHOLE:
        return None if gpu.parent_uuid in ("", gpu.uuid) and not gpu.profile else "gpu: a whole GPU is part of no other"
    if not _UUID.fullmatch(gpu.parent_uuid) or gpu.parent_uuid == gpu.uuid:
        return "gpu.parent_uuid: a share names the GPU that it is part of"
    if (gpu.kind is GpuKind.MIG) != bool(_PROFILE.fullmatch(gpu.profile)) or (gpu.kind is GpuKind.MPS and gpu.profile):
        return "gpu.profile: a MIG share has one, such as 1g.10gb; an MPS share has none"
    if not 1 <= gpu.threads_percent <= _PERCENT_MAX:
        return f"gpu.threads_percent: 1 to {_PERCENT_MAX}"
    return None


def _mixed(gpus: Sequence[Gpu]) -> str | None:
    """A GPU is whole, or split in one way: never two at once."""
    kinds: dict[str, GpuKind] = {}
    for gpu in gpus:
        if kinds.setdefault(whole(gpu), gpu.kind) is not gpu.kind:
            return "inventory.gpus: a GPU is listed in two ways"
    return None


def whole(gpu: Gpu) -> str:
    """The GPU that this is, or is part of."""
    return gpu.parent_uuid or gpu.uuid


def physical(inventory: Inventory) -> int:
    """How many GPUs there are, however they are split."""
    return len({whole(gpu) for gpu in inventory.gpus})


def approved(inventory: Inventory, known: Sequence[Slot], limit: int) -> list[Gpu]:
    """What is on at most `limit` GPUs: those that have a slot already come first, then by index."""
    with_slot = {slot.whole_uuid or slot.gpu_uuid for slot in known}
    ranked = sorted(inventory.gpus, key=lambda gpu: (whole(gpu) not in with_slot, gpu.index, gpu.uuid))
    taken = set(list(dict.fromkeys(map(whole, ranked)))[:limit])
    return [gpu for gpu in ranked if whole(gpu) in taken]


async def apply(tx: Tx, node: Node, inventory: Inventory) -> None:
    """Bring the node's slots to what it reports, and sound the alarm when that is more than was approved."""
    known = await slot_rows.of_nodes(tx, [node.id])
    await slot_rows.replace(tx, node.id, approved(inventory, known, node.gpus_approved), simulated=inventory.simulated)
    await slot_rows.follow_quarantines(tx, [node.id])
    reported = physical(inventory)
    if reported > node.gpus_approved:
        metrics.OVER_CAPACITY.inc()
        _log.warning("capacity_above_approved", node_id=node.id, reported=reported, approved=node.gpus_approved)
        if reported != node.gpus_reported:
            await node_rows.capacity_exceeded(tx, node, reported=reported)
    tx.hint(subjects.CAPACITY)
