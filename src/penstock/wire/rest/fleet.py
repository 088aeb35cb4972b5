"""Nodes, their GPUs and tasks."""

from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body, Slug
from penstock.wire.rest.states import NodeState, SlotHealth, TaskState
from penstock.wire.times import Time


class EnrolmentTokenCreate(Body, frozen=True):
    """A single-use token that lets a host become the node of this name, for 600 s."""

    node_name: Slug
    gpus_approved: Annotated[int, Meta(ge=0, le=1024)] = 1024


class EnrolmentToken(msgspec.Struct, frozen=True, kw_only=True):
    """Shown once. `command` is what to run on the host."""

    token: str
    node_id: str
    node_name: str
    kind: str
    expires_at: Time
    command: str


class EnrolRequest(Body, frozen=True):
    """What an agent sends to become a node."""

    token: Annotated[str, Meta(min_length=1, max_length=255)]
    node_name: Slug
    csr_pem: Annotated[str, Meta(max_length=8192)]


class Enrolled(msgspec.Struct, frozen=True, kw_only=True):
    """The node's identity. `task_keys` maps key id → base64 of the raw Ed25519 public key. `gateway_url` and `nats_url`
    are for the node's sidecar; without the latter it needs an address of its own."""

    node_id: str
    certificate_pem: str
    ca_pem: str
    task_keys: dict[str, str]
    link_url: str
    gateway_url: str = ""
    nats_url: str = ""


class RenewRequest(Body, frozen=True):
    """A new certificate for the same node, asked for over its current one."""

    csr_pem: Annotated[str, Meta(max_length=8192)]


class GpuReadings(msgspec.Struct, frozen=True, kw_only=True):
    """What a GPU's sensors last showed; none where it has no such sensor. Memory errors are counted since its driver
    was loaded, faults since its agent started."""

    at: Time
    temperature_c: int | None
    power_w: float | None
    utilization_percent: int | None
    memory_used_bytes: int | None
    ecc_corrected: int | None
    ecc_uncorrected: int | None
    faults: int


class GpuQuarantine(msgspec.Struct, frozen=True, kw_only=True):
    """Out of service until a probe passes. `cause`: failed or operator. `well_since`: since when its node reports it
    healthy. `probe_detail`: why the last probe did not pass."""

    cause: str
    detail: str
    since: Time
    well_since: Time | None
    probing: bool
    probe_detail: str


class GpuQuarantineOrder(Body, frozen=True):
    """Why; and whether what runs on the GPU has to leave."""

    reason: Annotated[str, Meta(max_length=255)] = ""
    drain: bool = False


class NodeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node, or a share of one, and its slot.

    `kind` is gpu, mig or mps. A share is part of the GPU `gpu_uuid`, and has a MIG `profile` or a part of the threads.
    """

    slot_id: str
    uuid: str
    index: int
    model: str
    memory_bytes: int
    simulated: bool
    health: SlotHealth
    health_detail: str
    allocation_id: str | None = None
    kind: str = "gpu"
    gpu_uuid: str = ""
    profile: str = ""
    threads_percent: int = 100
    numa_node: int = -1
    nvlink_domain: str = ""
    quarantine: GpuQuarantine | None = None
    readings: GpuReadings | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU host. A slot is a GPU, or a share of one by MIG or MPS; a GPU is free while none of its slots is held."""

    id: str
    name: str
    state: NodeState
    state_reason: str
    simulated: bool
    agent_version: str
    gpus_total: int
    gpus_free: int
    slots_total: int
    slots_free: int
    labels: dict[str, str]
    last_heartbeat_at: Time | None
    certificate_expires_at: Time | None
    created_at: Time
    #: Whether functions' workers may run there: its sidecar is up and reaches NATS.
    serves_functions: bool
    release_at: Time | None = None
    gpus: list[NodeGpu] = []


class NodeStateChange(Body, frozen=True):
    """Why; shown on the node and in the audit log."""

    reason: Annotated[str, Meta(max_length=255)] = ""


class NodeDrain(NodeStateChange, frozen=True):
    """Why, and how long what runs there may go on before it is released."""

    grace_s: Annotated[int, Meta(ge=0, le=30 * 24 * 3600)] = 0


class SlotCleanup(Body, frozen=True):
    """An operator's word that nothing of the last tenant is left on a slot whose cleanup could not be proved."""

    runtime_verified_absent: bool
    reason: Annotated[str, Meta(max_length=255)] = ""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A node task, for operators."""

    id: str
    node_id: str
    type: str
    allocation_id: str | None
    state: TaskState
    fence: int
    attempts: int
    error_code: str
    detail: str
    created_at: Time
    finished_at: Time | None
