"""SKUs and quotas: read by everyone, written by operators."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.compute.errors import SkuInUse
from penstock.compute.model import Limits, Sku
from penstock.compute.ports import Projects, Users
from penstock.compute.service import validate
from penstock.compute.store import allocations, catalogue, room
from penstock.compute.store.room import Free
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Denied, Invalid, NotFound, brief, missing
from penstock.wire.rest import QuotaPut, SkuPut, SkuUpdate
from penstock.wire.tasks import GpuKind

_USERS_NAMED_MAX: Final = 10
_PROFILE: Final = re.compile(r"([0-9]{1,2}c\.)?[0-9]{1,2}g\.[0-9]{1,4}gb([+-][a-z0-9.+-]{1,15})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A SKU and how many GPUs of it are free."""

    sku: Sku
    gpus_free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A project's limit and what it uses."""

    project_id: str
    gpus_max: int
    gpus_used: int


async def offers(conn: Reader, caller: Caller, *, after: str, limit: int) -> Sequence[Offer]:
    """The SKUs, by name."""
    caller.require("skus.read")
    free = await room.by_sort(conn, project_id=caller.project_id)
    return [_offer(sku, free) for sku in await catalogue.skus(conn, after=after, limit=limit)]


async def offer(conn: Reader, caller: Caller, name: str) -> Offer:
    """One SKU."""
    caller.require("skus.read")
    found = await catalogue.sku(conn, name)
    if found is None:
        raise await _no_sku(conn, name)
    return _offer(found, await room.by_sort(conn, project_id=caller.project_id))


async def update_offer(tx: Tx, caller: Caller, name: str, body: SkuUpdate) -> Offer:
    """Change what is given of a SKU. Running allocations keep the price they were made with."""
    caller.require("skus.write")
    _operators_only(caller)
    current = await catalogue.lock_sku(tx, name)
    if current is None:
        raise await _no_sku(tx, name)
    values = {field: getattr(current, field) for field in SkuPut.__struct_fields__}
    values |= {"gpu_counts": [*current.gpu_counts], "share": current.share.value}
    values |= {field: value for field, value in msgspec.structs.asdict(body).items() if value is not None}
    return await put_offer(tx, caller, name, SkuPut(**values))


async def delete_offer(tx: Tx, caller: Caller, name: str, users: Users) -> None:
    """Remove a SKU that nothing needs."""
    caller.require("skus.write")
    _operators_only(caller)
    if await catalogue.lock_sku(tx, name) is None:
        raise await _no_sku(tx, name)
    found = [f"allocation {each}" for each in await allocations.unended_of_sku(tx, name, limit=_USERS_NAMED_MAX + 1)]
    found += await users.of_sku(tx, name, limit=_USERS_NAMED_MAX + 1)
    found += ["warm stock"] if await catalogue.floors_of(tx, name) else []
    if found:
        more = " and more" if len(found) > _USERS_NAMED_MAX else ""
        raise SkuInUse(f"SKU {name} is in use by {', '.join(found[:_USERS_NAMED_MAX])}{more}")
    await catalogue.delete_sku(tx, name)
    await audit.record(tx, caller.actor, "skus.write", name, detail={"deleted": True})


async def opened(conn: Reader, found: Sku | None, *, name: str, gpus: int) -> Sku:
    """The offer, when it can be rented in this size; a refusal names those that can."""
    if found is None or not found.enabled:
        raise validate.unknown_sku(name, await catalogue.open_names(conn, limit=validate.SKUS_NAMED_MAX + 1))
    return validate.shape(found, name=name, gpus=gpus)


async def _no_sku(conn: Reader, name: str) -> NotFound:
    known = await catalogue.open_names(conn, limit=validate.SKUS_NAMED_MAX + 1)
    return NotFound(validate.unknown_sku(brief(name), known).detail)


async def put_offer(tx: Tx, caller: Caller, name: str, body: SkuPut) -> Offer:
    """Define or replace a SKU. Running allocations keep the price they were made with."""
    caller.require("skus.write")
    _operators_only(caller)
    if len(set(body.gpu_counts)) != len(body.gpu_counts):
        raise Invalid("gpu_counts must not repeat", field="gpu_counts")
    _check_share(body)
    sku = Sku(
        name=name,
        description=body.description,
        gpu_model=body.gpu_model,
        gpu_counts=tuple(sorted(body.gpu_counts)),
        price_microusd_per_gpu_hour=body.price_microusd_per_gpu_hour,
        memory_bytes_per_gpu=body.memory_bytes_per_gpu,
        cpus_per_gpu=body.cpus_per_gpu,
        processes_max=body.processes_max,
        scratch_bytes=body.scratch_bytes,
        enabled=body.enabled,
        share=GpuKind(body.share),
        mig_profile=body.mig_profile,
        share_memory_bytes_min=body.share_memory_bytes_min,
    )
    await catalogue.put_sku(tx, sku)
    await audit.record(
        tx,
        caller.actor,
        "skus.write",
        name,
        detail={"price": sku.price_microusd_per_gpu_hour, "share": sku.share, "enabled": sku.enabled},
    )
    return _offer(sku, await room.by_sort(tx, project_id=caller.project_id))


def _check_share(body: SkuPut) -> None:
    """Only a MIG share has a profile, and only an MPS share a size of its own."""
    if (body.share == GpuKind.MIG) != bool(body.mig_profile):
        raise Invalid("mig_profile must be given for a mig share, and for no other", field="mig_profile")
    if body.mig_profile and not _PROFILE.fullmatch(body.mig_profile):
        raise Invalid("mig_profile must look like 1g.10gb", field="mig_profile")
    if body.share_memory_bytes_min and body.share != GpuKind.MPS:
        raise Invalid("share_memory_bytes_min is for mps shares only", field="share_memory_bytes_min")


def _offer(sku: Sku, free: Sequence[Free]) -> Offer:
    return Offer(sku=sku, gpus_free=sum(sort.free for sort in free if sort.serves(sku)))


@dataclass(frozen=True, slots=True)
class Quotas:
    """The limits of projects. `projects` tells which there are."""

    projects: Projects
    limits: Limits

    async def read(self, conn: Reader, caller: Caller, project_id: str) -> Quota:
        """The limit of the caller's own project; of any, for operators."""
        caller.require("quotas.read")
        if project_id != caller.project_id:
            if not caller.operator:
                raise missing("project", project_id)
            await self._require(conn, project_id)
        return await self._of(conn, project_id)

    async def put(self, tx: Tx, caller: Caller, project_id: str, body: QuotaPut) -> Quota:
        """Set a project's limit. What it holds already stays, even above the limit."""
        caller.require("quotas.write")
        _operators_only(caller)
        await self._require(tx, project_id)
        await catalogue.put_quota(tx, project_id, body.gpus_max)
        await audit.record(
            tx, caller.actor, "quotas.write", project_id, project_id=project_id, detail={"gpus_max": body.gpus_max}
        )
        return await self._of(tx, project_id)

    async def _require(self, conn: Reader, project_id: str) -> None:
        if not await self.projects.exists(conn, project_id):
            raise missing("project", project_id)

    async def _of(self, conn: Reader, project_id: str) -> Quota:
        default = self.limits.gpus_max_default
        gpus_max, used = await catalogue.quota(conn, project_id, gpus_max_default=default)
        return Quota(project_id=project_id, gpus_max=gpus_max, gpus_used=used)


def _operators_only(caller: Caller) -> None:
    if not caller.operator:
        raise Denied("only operators may do this")
