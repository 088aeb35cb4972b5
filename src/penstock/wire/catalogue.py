"""Every type of event and what its payload holds. `docs/api/asyncapi.json` is made from this table.

A payload may gain fields; it never loses one.
"""

from typing import Final

import msgspec


class OrganisationFact(msgspec.Struct, frozen=True, kw_only=True):
    """About an organisation."""

    organisation_id: str
    name: str


class UserFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a person."""

    user_id: str
    display_name: str


class ProjectFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a project."""

    project_id: str
    name: str


class MemberFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a principal's place in a project; no role means that it left."""

    project_id: str
    principal_id: str
    role: str | None


class KeyFact(msgspec.Struct, frozen=True, kw_only=True):
    """About an API key."""

    key_id: str
    name: str
    role: str
    principal_id: str


class NodeFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a node, after its move."""

    node_id: str
    name: str
    state: str
    reason: str


class NodeCapacityFact(msgspec.Struct, frozen=True, kw_only=True):
    """A node reports more GPUs than were approved."""

    node_id: str
    name: str
    reported: int
    approved: int


class SlotFact(msgspec.Struct, frozen=True, kw_only=True):
    """About a slot's health."""

    node_id: str
    gpu_uuid: str
    health: str
    health_detail: str


class GpuFact(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU was taken out of service, or was proved to work and is back. `cause`: failed, operator."""

    node_id: str
    gpu_uuid: str
    cause: str
    detail: str


class AllocationFact(msgspec.Struct, frozen=True, kw_only=True):
    """About an allocation, after its move."""

    allocation_id: str
    purpose: str
    sku: str
    gpus: int
    node_id: str | None
    price_microusd_per_hour: int
    state: str
    reason: str


CATALOGUE: Final[dict[str, type[msgspec.Struct]]] = {
    "identity.organisation_created": OrganisationFact,
    "identity.user_created": UserFact,
    "identity.project_created": ProjectFact,
    "identity.project_updated": ProjectFact,
    "identity.project_deleted": ProjectFact,
    "identity.member_changed": MemberFact,
    "identity.member_removed": MemberFact,
    "identity.service_account_created": MemberFact,
    "identity.service_account_deleted": MemberFact,
    "identity.key_created": KeyFact,
    "identity.key_revoked": KeyFact,
    "fleet.node_registered": NodeFact,
    "fleet.node_enrolled": NodeFact,
    "fleet.node_recovered": NodeFact,
    "fleet.node_ready": NodeFact,
    "fleet.node_cordoned": NodeFact,
    "fleet.node_uncordoned": NodeFact,
    "fleet.node_draining": NodeFact,
    "fleet.node_unreachable": NodeFact,
    "fleet.node_lost": NodeFact,
    "fleet.node_revoked": NodeFact,
    "fleet.node_retired": NodeFact,
    "fleet.node_capacity_exceeded": NodeCapacityFact,
    "fleet.gpu_quarantined": GpuFact,
    "fleet.gpu_returned": GpuFact,
    "fleet.slot_healthy": SlotFact,
    "fleet.slot_degraded": SlotFact,
    "fleet.slot_quarantined": SlotFact,
    "fleet.slot_cleanup_blocked": SlotFact,
    "fleet.slot_missing": SlotFact,
    "provisioning.requested": AllocationFact,
    "provisioning.started": AllocationFact,
    "provisioning.updated": AllocationFact,
    "provisioning.active": AllocationFact,
    "provisioning.failed": AllocationFact,
    "provisioning.releasing.requested": AllocationFact,
    "provisioning.releasing.completed": AllocationFact,
    "provisioning.release_failed": AllocationFact,
}
