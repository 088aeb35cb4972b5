"""Nodes, slots and tasks as the API shows them."""

from collections.abc import Mapping, Sequence

from penstock.fleet.model import Node, NodeState, Slot, SlotHealth, Task
from penstock.wire import rest


def node(value: Node, slots: Sequence[Slot], holders: Mapping[str, str], *, with_gpus: bool) -> rest.Node:
    """A node with its own slots; `holders` maps slot → allocation."""
    free = [slot for slot in slots if slot.health is SlotHealth.HEALTHY and slot.id not in holders]
    return rest.Node(
        id=value.id,
        name=value.name,
        state=value.state.value,
        state_reason=value.state_reason,
        simulated=value.simulated,
        agent_version=value.agent_version,
        gpus_total=len(slots),
        gpus_free=len(free) if value.state is NodeState.READY else 0,
        labels=dict(value.labels),
        last_heartbeat_at=value.last_heartbeat_at,
        certificate_expires_at=value.certificate_expires_at,
        created_at=value.created_at,
        release_at=value.release_at,
        gpus=[gpu(slot, holders) for slot in slots] if with_gpus else [],
    )


def gpu(slot: Slot, holders: Mapping[str, str]) -> rest.NodeGpu:
    """One GPU and who holds it."""
    return rest.NodeGpu(
        slot_id=slot.id,
        uuid=slot.gpu_uuid,
        index=slot.gpu_index,
        model=slot.gpu_model,
        memory_bytes=slot.memory_bytes,
        simulated=slot.simulated,
        health=slot.health.value,
        health_detail=slot.health_detail,
        allocation_id=holders.get(slot.id),
    )


def task(value: Task) -> rest.Task:
    """A task without its parameters, which may hold a tenant's environment."""
    return rest.Task(
        id=value.id,
        node_id=value.node_id,
        type=value.type,
        allocation_id=value.allocation_id,
        state=value.state.value,
        fence=value.fence,
        attempts=value.attempts,
        error_code=value.error_code,
        detail=value.detail,
        created_at=value.created_at,
        finished_at=value.finished_at,
    )
