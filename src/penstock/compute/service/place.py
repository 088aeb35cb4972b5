"""Which slots a request gets, and why it gets none. Best fit, healthy slots only, never across nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.errors import NoSingleNode, OutOfCapacity, Unhealthy
from penstock.compute.model import Draft, Sku
from penstock.compute.store import claims, room
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import PenstockError
from penstock.wire.tasks import GpuKind

#: Each lost race means that another request got slots, so this many losses in a row mean a crowd, not a gap.
ATTEMPTS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Placed:
    """The node that was found."""

    node_id: str


async def place(tx: Tx, draft: Draft, offer: Sku, *, not_on: Sequence[str] = ()) -> Placed | PenstockError:
    """Claim slots on one node, or say why not. The allocation's row must be there or follow in the transaction."""
    for _ in range(ATTEMPTS_MAX):
        slots = await room.best_fit(
            tx, offer, draft.gpus, project_id=draft.project_id, serves=draft.serves, not_on=not_on
        )
        if not slots:
            return await explain(tx, draft, offer)
        if await claims.take(tx, draft.id, slots, project_id=draft.project_id):
            return Placed(slots[0].node_id)
    return OutOfCapacity("too many requests compete for the last GPUs; try again", retry_after_s=1)


async def explain(conn: Reader, draft: Draft, offer: Sku) -> PenstockError:
    """Why no node fits: scattered, out of service, not serving functions, or simply not there."""
    now = await room.capacity(conn, offer, project_id=draft.project_id, serves=draft.serves)
    gpus = draft.gpus
    wanted = f"{gpus} {offer.thing}{'' if gpus == 1 else 's'} of SKU {offer.name}"
    # The shares of a GPU by MPS are one project's at a time, so what is free for one is not for another.
    where, whose = ("GPU", " for this project") if offer.share is GpuKind.MPS else ("node", "")
    if now.free >= gpus:
        return NoSingleNode(
            f"no single {where} fits {wanted}: {now.free} are free in all{whose},"
            f" at most {now.free_in_one_place} on one {where}"
        )
    if now.with_blocked >= gpus:
        return Unhealthy(
            f"{wanted} would fit, but nodes or GPUs are out of service (cordoned, unreachable, quarantined or not"
            f" proved clean); {now.free} {'is' if now.free == 1 else 'are'} free{whose}"
        )
    if draft.serves and (anywhere := await room.capacity(conn, offer, project_id=draft.project_id)).free > now.free:
        return OutOfCapacity(
            f"out of capacity: {wanted} asked for, {now.free} free{whose} on nodes that serve functions;"
            f" {anywhere.free - now.free} more are on nodes that serve no functions now"
        )
    return OutOfCapacity(f"out of capacity: {wanted} asked for, {now.free} free{whose}")
