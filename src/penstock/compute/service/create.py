"""Create: validate, policy, quota, funds, place or wait, fact and audit, all in one transaction.

Locks are taken in the order account, quota, slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.compute.errors import OutOfCapacity, Policy, QuotaExceeded
from penstock.compute.model import Allocation, Draft, Limits, Purpose, Sku
from penstock.compute.ports import Funds, Secrets
from penstock.compute.service import validate
from penstock.compute.service.place import Placed, place
from penstock.compute.store import allocations, catalogue, sweeps
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Tx
from penstock.kit.errors import Denied, PenstockError
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id
from penstock.wire import subjects
from penstock.wire.rest import AllocationCreate
from penstock.wire.tasks import SecretRef


@dataclass(frozen=True, slots=True)
class Create:
    """The use case, with what it asks of others."""

    funds: Funds
    secrets: Secrets
    limits: Limits

    async def __call__(
        self, tx: Tx, caller: Caller, body: AllocationCreate, *, purpose: Purpose = Purpose.INTERACTIVE
    ) -> Allocation:
        """The new allocation, or the first reason to refuse it."""
        _allow(caller)
        validate.request(body)
        offer = validate.shape(await catalogue.sku(tx, body.sku), name=body.sku, gpus=body.gpus)
        secrets = await self.secrets.refer(tx, project_id=caller.project_id, uses=body.secrets) if body.secrets else []
        draft = _draft(caller, body, offer, purpose, secrets)
        await self.funds.check(
            tx,
            organisation_id=caller.organisation_id,
            price_microusd_per_hour=draft.price_microusd_per_hour,
        )
        await self._check_quota(tx, caller.project_id, body.gpus)
        made = await self._place_or_wait(tx, draft, offer)
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
        found = await _offer_slots(tx, draft, offer)
        if isinstance(found, Placed):
            return await self._placed(tx, draft, found)
        if draft.wait_s == 0:
            raise found
        return await allocations.insert(
            tx, draft, node_id=None, reason=f"waiting: {found.detail}", deadline_s=draft.wait_s
        )

    async def _placed(self, tx: Tx, draft: Draft, found: Placed) -> Allocation:
        made = await allocations.insert(
            tx, draft, node_id=found.node_id, reason="", deadline_s=self.limits.deadlines.requested_s
        )
        tx.hint(subjects.allocation(made.id))
        return made


async def _offer_slots(tx: Tx, draft: Draft, offer: Sku) -> Placed | PenstockError:
    """Slots, unless others of the same shape wait already: nobody overtakes them."""
    ahead = await sweeps.waiting_ahead(tx, sku=offer.name, gpus=draft.gpus)
    if ahead:
        return OutOfCapacity(f"out of capacity: {ahead} earlier requests of this shape are waiting")
    return await place(tx, draft.id, offer, draft.gpus)


def _allow(caller: Caller) -> None:
    try:
        caller.require("allocations.create")
    except Denied as error:
        raise Policy(f"policy: {error.detail}") from error


def _draft(caller: Caller, body: AllocationCreate, offer: Sku, purpose: Purpose, secrets: Sequence[SecretRef]) -> Draft:
    allocation_id = new_id("alc")
    return Draft(
        id=allocation_id,
        project_id=caller.project_id,
        organisation_id=caller.organisation_id,
        name=body.name,
        purpose=purpose,
        sku=offer.name,
        gpus=body.gpus,
        image=body.image,
        labels=body.labels,
        env=body.env,
        command=body.command,
        ports=body.ports,
        secrets=secrets,
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
