"""Create: validate, policy, quota, funds, place or wait, fact and audit, all in one transaction.

Slots come from warm stock that fits, else from those that are free, else from stock that does not fit and makes room.
Locks are taken in the order account, quota, slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import asyncpg

from penstock.compute.errors import IdTaken, OutOfCapacity, Policy, QuotaExceeded
from penstock.compute.model import Allocation, Draft, Limits, Purpose, Sku
from penstock.compute.ports import Funds, Handoffs, Secrets
from penstock.compute.service import runtimes, validate
from penstock.compute.service.catalogue import opened
from penstock.compute.service.place import Placed, place
from penstock.compute.service.reclaim import WAITS, Reclaim
from penstock.compute.service.release import Release
from penstock.compute.service.stock import HandOver
from penstock.compute.store import allocations, catalogue, stock, sweeps
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Tx
from penstock.kit.errors import PenstockError
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id
from penstock.wire import subjects
from penstock.wire.rest import AllocationCreate
from penstock.wire.tasks import Serving


@dataclass(frozen=True, slots=True)
class Create:
    """The use case, with what it asks of others."""

    funds: Funds
    secrets: Secrets
    handoffs: Handoffs
    limits: Limits

    async def __call__(
        self,
        tx: Tx,
        caller: Caller,
        body: AllocationCreate,
        *,
        purpose: Purpose = Purpose.INTERACTIVE,
        serving: Serving | None = None,
    ) -> Allocation:
        """The new allocation, or the first reason to refuse it. A worker of a function is told what it serves."""
        caller.require("allocations.create", denial=Policy)
        validate.request(body)
        found, rules = await catalogue.offered(tx, body.sku, caller.project_id)
        offer = await opened(tx, found, name=body.sku, gpus=body.gpus)
        secrets = await self.secrets.refer(tx, project_id=caller.project_id, uses=body.secrets) if body.secrets else []
        chosen = await runtimes.choose(tx, caller, body)
        draft = _draft(caller, body, offer, purpose)
        draft = replace(draft, image=chosen.image, runtime=chosen.runtime, secrets=secrets, egress=rules)
        draft = replace(draft, serving=serving)
        await self.funds.check(
            tx,
            organisation_id=caller.organisation_id,
            project_id=caller.project_id,
            key_id=caller.key_id,
            price_microusd_per_hour=draft.price_microusd_per_hour,
        )
        await self._check_quota(tx, caller.project_id, body.gpus)
        try:
            made = await self._place_or_wait(tx, draft, offer)
        except asyncpg.UniqueViolationError as error:
            if error.constraint_name != allocations.PRIMARY_KEY:
                raise
            raise IdTaken(f"the id {draft.id} was used before", field="id") from error
        await audit.record(tx, caller.actor, "allocations.create", made.id, detail={"sku": made.sku, "gpus": made.gpus})
        return made

    async def _check_quota(self, tx: Tx, project_id: str, gpus: int) -> None:
        limit, used = await catalogue.lock_quota(tx, project_id, gpus_max_default=self.limits.gpus_max_default)
        if used + gpus > limit:
            raise QuotaExceeded(
                f"quota exceeded: the project holds {used} of at most {limit} GPUs and asked for {gpus}",
                field="gpus",
            )

    async def _place_or_wait(self, tx: Tx, draft: Draft, offer: Sku) -> Allocation:
        hand_over = HandOver(self.handoffs, self.limits)
        if made := await hand_over(tx, draft, offer):
            return made
        if ahead := await sweeps.waiting_ahead(tx, sku=offer.name, gpus=draft.gpus):
            # Nobody overtakes them.
            return await _wait(
                tx, draft, OutOfCapacity(f"out of capacity: {ahead} earlier requests of this shape are waiting")
            )
        found = await place(tx, draft, offer)
        if isinstance(found, Placed):
            return await self._placed(tx, draft, found)
        if held := await stock.lock_all(tx):
            # Some may have been in other hands for a moment.
            return await hand_over(tx, draft, offer) or await self._make_room(tx, draft, offer, held, found)
        return await _wait(tx, draft, found)

    async def _make_room(
        self, tx: Tx, draft: Draft, offer: Sku, held: Sequence[str], refusal: PenstockError
    ) -> Allocation:
        """Stock gives way. The request waits for that, also if it would not wait for anything else."""
        room = await Reclaim(Release(self.limits))(tx, draft, offer, held)
        if room is None:
            return await _wait(tx, draft, refusal)
        if isinstance(room, Placed):
            return await self._placed(tx, draft, room)
        deadline_s = max(draft.wait_s, self.limits.deadlines.requested_s)
        return await allocations.insert(tx, draft, node_id=None, reason=WAITS, deadline_s=deadline_s)

    async def _placed(self, tx: Tx, draft: Draft, found: Placed) -> Allocation:
        made = await allocations.insert(
            tx, draft, node_id=found.node_id, reason="", deadline_s=self.limits.deadlines.requested_s
        )
        tx.hint(subjects.allocation(made.id))
        return made


async def _wait(tx: Tx, draft: Draft, refusal: PenstockError) -> Allocation:
    """For as long as the request allows; by default not at all."""
    if draft.wait_s == 0:
        raise refusal
    return await allocations.insert(
        tx, draft, node_id=None, reason=f"waiting: {refusal.detail}", deadline_s=draft.wait_s
    )


def _draft(caller: Caller, body: AllocationCreate, offer: Sku, purpose: Purpose) -> Draft:
    allocation_id = body.id or new_id("alc")
    return Draft(
        id=allocation_id,
        project_id=caller.project_id,
        organisation_id=caller.organisation_id,
        name=body.name,
        purpose=purpose,
        key_id=caller.key_id,
        sku=offer.name,
        gpus=body.gpus,
        image=body.image,
        labels=body.labels,
        env=body.env,
        command=body.command,
        ports=body.ports,
        secrets=[],
        egress=[],
        runtime="",
        unit_id=allocation_id,
        stock_id=None,
        price_microusd_per_hour=offer.price_microusd_per_gpu_hour * body.gpus,
        memory_bytes=offer.memory_bytes_per_gpu * body.gpus,
        cpus=offer.cpus_per_gpu * body.gpus,
        processes_max=offer.processes_max,
        scratch_bytes=offer.scratch_bytes,
        wait_s=body.wait_s,
        correlation_id=correlation_id(),
    )
