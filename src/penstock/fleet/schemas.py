"""Nodes, slots and tasks as the API shows them."""

from collections.abc import Mapping, Sequence

import msgspec

from penstock.fleet.gpus import Conditions
from penstock.fleet.model import Node, NodeState, Quarantine, Slot, SlotHealth, Task
from penstock.wire import rest


def node(
    value: Node, slots: Sequence[Slot], holders: Mapping[str, str], conditions: Conditions | None = None
) -> rest.Node:
    """A node with its own slots; `holders` maps slot → allocation. The GPUs are shown if their conditions are given."""
    ready = value.state is NodeState.READY
    held = {slot.whole_uuid for slot in slots if slot.id in holders}
    free = [slot for slot in slots if ready and slot.health is SlotHealth.HEALTHY and slot.id not in holders]
    return rest.Node(
        id=value.id,
        name=value.name,
        state=value.state.value,
        state_reason=value.state_reason,
        simulated=value.simulated,
        serves_functions=value.serves_functions,
        agent_version=value.agent_version,
        gpus_total=len({slot.whole_uuid for slot in slots}),
        gpus_free=len({slot.whole_uuid for slot in free} - held),
        slots_total=len(slots),
        slots_free=len(free),
        labels=dict(value.labels),
        last_heartbeat_at=value.last_heartbeat_at,
        certificate_expires_at=value.certificate_expires_at,
        created_at=value.created_at,
        release_at=value.release_at,
        gpus=[gpu(slot, holders, conditions) for slot in slots] if conditions else [],
    )


def gpu(slot: Slot, holders: Mapping[str, str], conditions: Conditions) -> rest.NodeGpu:
    """One GPU, how it is, and who holds it."""
    whole = (slot.node_id, slot.whole_uuid)
    quarantine, reading = conditions.quarantines.get(whole), conditions.readings.get(whole)
    return rest.NodeGpu(
        slot_id=slot.id,
        uuid=slot.gpu_uuid,
        index=slot.gpu_index,
        model=slot.gpu_model,
        memory_bytes=slot.memory_bytes,
        kind=slot.kind.value,
        gpu_uuid=slot.whole_uuid,
        profile=slot.profile,
        threads_percent=slot.threads_percent,
        numa_node=slot.numa_node,
        nvlink_domain=slot.nvlink_domain,
        simulated=slot.simulated,
        health=slot.health.value,
        health_detail=slot.health_detail,
        allocation_id=holders.get(slot.id),
        quarantine=_quarantine(quarantine) if quarantine else None,
        readings=msgspec.convert(reading, rest.GpuReadings, from_attributes=True) if reading else None,
    )


def _quarantine(value: Quarantine) -> rest.GpuQuarantine:
    return rest.GpuQuarantine(
        cause=value.cause.value,
        detail=value.detail,
        since=value.since,
        well_since=value.well_since,
        probing=value.probe_task_id is not None or value.return_asked_at is not None,
        probe_detail=value.probe_detail,
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
