"""Values of the model as bodies of the REST API."""

from penstock.compute.model import FINAL, Allocation, Move, Resolution, Runtime
from penstock.compute.service.catalogue import Offer, Quota
from penstock.compute.service.stock import Standing
from penstock.wire import rest


def allocation(it: Allocation, gateway_url: str, *, timeline: bool = True) -> rest.Allocation:
    """An allocation as its owner sees it."""
    return rest.Allocation(
        id=it.id,
        project_id=it.project_id,
        name=it.name,
        purpose=it.purpose,
        sku=it.sku,
        gpus=it.gpus,
        image=it.image,
        state=it.state,
        reason=it.failing or it.reason,
        labels=dict(it.labels),
        ports=list(it.ports),
        node_id=it.node_id,
        gpu_uuids=list(it.gpu_uuids),
        simulated=it.simulated,
        price_microusd_per_hour=it.price_microusd_per_hour,
        created_at=it.created_at,
        active_at=it.active_at,
        ended_at=it.ended_at,
        deadline_at=it.deadline_at,
        version=it.version,
        access_urls=_access_urls(it, gateway_url),
        runtime=it.runtime,
        timeline=[_line(move) for move in it.timeline] if timeline else [],
    )


def _line(move: Move) -> rest.TimelineEntry:
    return rest.TimelineEntry(state=move.state, at=move.at, reason=move.reason)


def _access_urls(it: Allocation, gateway_url: str) -> dict[str, str]:
    if it.state in FINAL:
        return {}
    return {str(port): f"{gateway_url.rstrip('/')}/u/{it.id}/{port}/" for port in it.ports}


def sku(offer: Offer) -> rest.Sku:
    """An offer."""
    it = offer.sku
    return rest.Sku(
        name=it.name,
        description=it.description,
        gpu_model=it.gpu_model,
        gpu_counts=list(it.gpu_counts),
        price_microusd_per_gpu_hour=it.price_microusd_per_gpu_hour,
        memory_bytes_per_gpu=it.memory_bytes_per_gpu,
        cpus_per_gpu=it.cpus_per_gpu,
        processes_max=it.processes_max,
        scratch_bytes=it.scratch_bytes,
        enabled=it.enabled,
        gpus_free=offer.gpus_free,
        share=it.share.value,
        mig_profile=it.mig_profile,
        share_memory_bytes_min=it.share_memory_bytes_min,
    )


def stock_floor(it: Standing) -> rest.StockFloor:
    """A floor beside its stock."""
    return rest.StockFloor(
        sku=it.floor.shape.sku,
        gpus=it.floor.shape.gpus,
        image=it.floor.shape.image,
        floor=it.floor.floor,
        ready=it.ready,
        starting=it.starting,
        handed_over=it.handed_over,
        reason=it.floor.reason,
    )


def quota(it: Quota) -> rest.Quota:
    """A project's limit and use."""
    return rest.Quota(project_id=it.project_id, gpus_max=it.gpus_max, gpus_used=it.gpus_used)


def runtime(it: Runtime) -> rest.Runtime:
    """An environment."""
    return rest.Runtime(
        name=it.name,
        digest=it.digest,
        base=it.base,
        packages=it.packages,
        version=it.version,
        created_at=it.created_at,
        updated_at=it.updated_at,
        lock=it.lock,
    )


def resolution(it: Resolution) -> rest.Resolution:
    """Requirements and what became of them."""
    return rest.Resolution(
        id=it.id,
        state=it.state.value,
        base=it.base,
        requirements=it.requirements,
        python=it.python,
        lock=it.lock,
        error_code=it.error_code,
        error=it.error,
        created_at=it.created_at,
        finished_at=it.finished_at,
    )
