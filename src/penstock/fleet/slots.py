"""Slots that could not be proved clean are blocked, and come back by a later proof or when somebody has looked."""

from collections.abc import Sequence

from penstock.fleet.errors import AbsenceNotVerified, SlotHeld, SlotNotBlocked
from penstock.fleet.model import Slot, SlotHealth
from penstock.fleet.ports import Claims
from penstock.fleet.store import slots as slot_rows
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import missing
from penstock.wire import subjects


async def block(tx: Tx, slot_ids: Sequence[str], reason: str) -> None:
    """Take these out of the pool until `unblock` or `force_cleanup`; blocked ones stay as they are."""
    await slot_rows.block(tx, slot_ids, reason)


async def unblock(tx: Tx, slot_ids: Sequence[str]) -> None:
    """Give these back: a later cleanup proved them clean. Those that are not blocked stay as they are."""
    if await slot_rows.unblock(tx, slot_ids):
        tx.hint(subjects.CAPACITY)


async def unfit(tx: Tx, slot_ids: Sequence[str]) -> str:
    """Why work may not begin on these slots now; nothing when it may. It stays so until the transaction ends: a GPU
    that fails meanwhile is quarantined after it."""
    for health, detail in await slot_rows.hold_healths(tx, slot_ids):
        if health is not SlotHealth.HEALTHY:
            return f"a GPU is {health.replace('_', ' ')}" + (f": {detail}" if detail else "")
    return ""


async def of_nodes(conn: Reader, node_ids: Sequence[str]) -> list[Slot]:
    """All slots of these nodes."""
    return await slot_rows.of_nodes(conn, node_ids)


async def force_cleanup(
    tx: Tx,
    caller: Caller,
    claims: Claims,
    *,
    node_id: str,
    slot_id: str,
    runtime_verified_absent: bool,
    reason: str,
) -> Slot:
    """Give a blocked slot back on an operator's word that nothing of the last tenant runs there."""
    caller.require("nodes.write")
    slot = await slot_rows.lock(tx, slot_id)
    if slot is None or slot.node_id != node_id:
        raise missing("slot", f"{slot_id} on node {node_id}")
    if not runtime_verified_absent:
        raise AbsenceNotVerified(
            "runtime_verified_absent: must be true; look at the node first", field="runtime_verified_absent"
        )
    if slot.health is not SlotHealth.CLEANUP_BLOCKED:
        raise SlotNotBlocked(f"the slot is {slot.health}, not {SlotHealth.CLEANUP_BLOCKED}")
    if holder := (await claims.holders(tx, [node_id])).get(slot_id):
        raise SlotHeld(f"allocation {holder} still holds the slot; release it first")
    cleaned = await slot_rows.unblock(tx, [slot_id])
    detail = {"node_id": node_id, "gpu_uuid": slot.gpu_uuid, "blocked": slot.health_detail, "reason": reason}
    await audit.record(tx, caller.actor, "slots.force_cleanup", slot_id, detail=detail)
    tx.hint(subjects.CAPACITY)
    return cleaned[0]
