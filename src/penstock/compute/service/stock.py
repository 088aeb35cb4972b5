"""Warm stock: floors, set by operators, and the keeper that holds the stock to them.

A unit of stock is an allocation of the platform's own, made and ended by the same placement and saga as any other, at
no price and under no quota. It only ever takes slots that nobody waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.compute.model import Allocation, Draft, Limits, Owner, Purpose, Shape, Sku
from penstock.compute.ports import Handoffs
from penstock.compute.service import validate
from penstock.compute.service.catalogue import opened
from penstock.compute.service.place import Placed, place
from penstock.compute.service.release import Release
from penstock.compute.store import allocations, catalogue, handoffs, stock
from penstock.compute.store.stock import Census, Standing
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlated, correlation_id
from penstock.wire import subjects
from penstock.wire.rest import StockFloorPut
from penstock.wire.tasks import GpuKind

__all__ = ["HandOver", "Standing", "StockKeeper", "page", "put", "remove"]

#: So many units of one shape start at once: a refill must not crowd out the tenants' own starts.
STARTING_MAX: Final = 4
PAUSE_MAX_S: Final = 300.0
BATCH: Final = 200
_ACTOR: Final = audit.system("stock")


async def page(conn: Reader, caller: Caller, *, after: Shape | None, limit: int) -> Sequence[Standing]:
    """The floors and what there is."""
    caller.require("stock.read")
    _operators_only(caller)
    return await stock.standings(conn, after=after, limit=limit)


async def put(tx: Tx, caller: Caller, sku: str, body: StockFloorPut) -> Standing:
    """Set a floor; the keeper does the rest."""
    caller.require("stock.write")
    _operators_only(caller)
    validate.image(body.image)
    offer = await opened(tx, await catalogue.sku(tx, sku), name=sku, gpus=body.gpus)
    if offer.share is GpuKind.MPS:
        # The platform would hold the GPU, and could not give away one share of it without the others.
        raise Invalid("stock cannot be kept of MPS shares: those of one GPU belong to one project", field="sku")
    shape = Shape(sku=sku, gpus=body.gpus, image=body.image)
    await stock.put_floor(tx, shape, body.floor)
    detail = {"gpus": shape.gpus, "image": shape.image, "floor": body.floor}
    await audit.record(tx, caller.actor, "stock.write", sku, detail=detail)
    tx.hint(subjects.STOCK)
    return (await stock.standings(tx, only=shape))[0]


async def remove(tx: Tx, caller: Caller, shape: Shape) -> None:
    """Keep no stock of this shape any more; what there is goes."""
    caller.require("stock.write")
    _operators_only(caller)
    if not await stock.remove_floor(tx, shape):
        raise NotFound("no floor for this SKU, number of GPUs and image")
    detail = {"gpus": shape.gpus, "image": shape.image, "floor": None}
    await audit.record(tx, caller.actor, "stock.write", shape.sku, detail=detail)
    tx.hint(subjects.STOCK)


def _operators_only(caller: Caller) -> None:
    if not caller.operator:
        raise Denied("only operators may do this")


@dataclass(frozen=True, slots=True)
class HandOver:
    """Gives a ready unit to a tenant within the tenant's own transaction. No saga is on the way: the gateway makes the
    allocation active with the node's answer, and the reconciler starts a saga only if none comes."""

    handoffs: Handoffs
    limits: Limits

    async def __call__(self, tx: Tx, draft: Draft, offer: Sku) -> Allocation | None:
        """The allocation, already provisioning; none when no unit fits, as for environments of the tenant's own."""
        if draft.runtime:
            return None
        made = await handoffs.hand_over(tx, draft, offer, deadline_s=self.limits.deadlines.provisioning_s)
        if made is not None:
            await self.handoffs.dispatch(tx, made)
            tx.hint(subjects.STOCK)
        return made


@dataclass(frozen=True, slots=True)
class StockKeeper:
    """Brings the stock of every shape to its floor. Any number of workers may run it: a floor is one keeper's at a
    time."""

    db: Database
    owner: Owner
    release: Release
    limits: Limits

    async def keep(self) -> None:
        """Look at every floor once."""
        async with self.db.read() as conn:
            shapes = await stock.shapes(conn)
        for shape in shapes:
            with correlated(new_id("cor")):
                async with self.db.transaction() as tx:
                    await self._keep(tx, shape)
        async with self.db.transaction() as tx:
            await self._dismiss(tx, await stock.strays(tx, BATCH), "no stock of this kind is kept any more")

    async def _keep(self, tx: Tx, shape: Shape) -> None:
        floor = await stock.take_floor(tx, shape)
        if floor is None:
            return
        offer = await catalogue.sku(tx, shape.sku)
        assert offer is not None
        await self._dismiss(tx, await stock.unfit(tx, shape, offer), "nobody could get it as it was")
        now = await stock.census(tx, shape, pause_max_s=PAUSE_MAX_S)
        missing = floor.floor - now.ready - now.starting
        if missing < 0:
            await self._dismiss(tx, await stock.surplus(tx, shape, -missing), "the floor was lowered")
        await stock.explain(tx, shape, await self._fill(tx, shape, offer, now, missing) if missing > 0 else "")

    async def _fill(self, tx: Tx, shape: Shape, offer: Sku, now: Census, missing: int) -> str:
        """Start what is missing, a few at once; why it could not be done, if so."""
        if not offer.enabled or shape.gpus not in offer.gpu_counts or offer.share is GpuKind.MPS:
            return f"SKU {shape.sku} is not offered like this any more"
        if now.pause_s > 0:
            return f"{now.failures} starts failed in a row, the next waits a while: {now.failure}"
        if await stock.tenants_wait(tx, offer):
            return "tenants wait for these GPUs"
        for _ in range(min(missing, STARTING_MAX - now.starting)):
            draft = self._draft(shape, offer)
            found = await place(tx, draft, offer)
            if not isinstance(found, Placed):
                return found.detail
            await self._start(tx, draft, found.node_id)
        return ""

    async def _start(self, tx: Tx, draft: Draft, node_id: str) -> None:
        made = await allocations.insert(
            tx, draft, node_id=node_id, reason="", deadline_s=self.limits.deadlines.requested_s
        )
        await audit.record(
            tx,
            _ACTOR,
            "stock.start",
            made.id,
            organisation_id=made.organisation_id,
            project_id=made.project_id,
            detail={"sku": made.sku, "gpus": made.gpus, "image": made.image},
        )
        tx.hint(subjects.allocation(made.id))

    async def _dismiss(self, tx: Tx, stock_ids: Sequence[str], reason: str) -> None:
        for stock_id in stock_ids:
            await self.release.by_system(tx, _ACTOR, stock_id, reason)

    def _draft(self, shape: Shape, offer: Sku) -> Draft:
        stock_id = new_id("alc")
        return Draft(
            id=stock_id,
            project_id=self.owner.project_id,
            organisation_id=self.owner.organisation_id,
            name=None,
            purpose=Purpose.STOCK,
            key_id=None,
            sku=shape.sku,
            gpus=shape.gpus,
            image=shape.image,
            labels={},
            env={},
            command=[],
            ports=[],
            secrets=[],
            egress=[],
            runtime="",
            unit_id=stock_id,
            stock_id=None,
            price_microusd_per_hour=0,
            memory_bytes=offer.memory_bytes_per_gpu * shape.gpus,
            cpus=offer.cpus_per_gpu * shape.gpus,
            processes_max=offer.processes_max,
            scratch_bytes=offer.scratch_bytes,
            wait_s=0,
            correlation_id=correlation_id(),
        )
