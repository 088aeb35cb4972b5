"""Which slots a request gets, and why it gets none. Best fit, healthy slots only, never across nodes."""

from dataclasses import dataclass
from typing import Final

from penstock.compute.errors import NoSingleNode, OutOfCapacity, Unhealthy
from penstock.compute.model import Sku
from penstock.compute.store import claims
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import PenstockError

#: Each lost race means that another request got slots, so this many losses in a row mean a crowd, not a gap.
ATTEMPTS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Placed:
    """The node that was found."""

    node_id: str


async def place(tx: Tx, allocation_id: str, offer: Sku, gpus: int) -> Placed | PenstockError:
    """Claim slots on one node, or say why not. The allocation's row must be there or follow in the transaction."""
    for _ in range(ATTEMPTS_MAX):
        slots = await claims.best_fit(tx, gpu_model=offer.gpu_model, gpus=gpus)
        if not slots:
            return await explain(tx, offer, gpus)
        if await claims.take(tx, allocation_id, slots):
            return Placed(slots[0].node_id)
    return OutOfCapacity("too many requests compete for the last GPUs; try again", retry_after_s=1)


async def explain(conn: Reader, offer: Sku, gpus: int) -> PenstockError:
    """Why no node fits: scattered, out of service, or simply not there."""
    now = await claims.capacity(conn, offer.gpu_model)
    wanted = f"{gpus} {'GPU' if gpus == 1 else 'GPUs'} of SKU {offer.name}"
    if now.free >= gpus:
        return NoSingleNode(
            f"no single node fits {wanted}: {now.free} are free in all, at most {now.free_on_one_node} on one node"
        )
    if now.blocked_on_one_node >= gpus:
        return Unhealthy(
            f"{wanted} would fit, but nodes or GPUs are out of service (cordoned, unreachable, quarantined or not"
            f" proved clean); {now.free} {'is' if now.free == 1 else 'are'} free"
        )
    return OutOfCapacity(f"out of capacity: {wanted} asked for, {now.free} free")
