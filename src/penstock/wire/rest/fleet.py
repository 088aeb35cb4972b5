"""Nodes, their GPUs and tasks."""

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body, Slug


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
    expires_at: datetime
    command: str


class EnrolRequest(Body, frozen=True):
    """What an agent sends to become a node."""

    token: Annotated[str, Meta(min_length=1, max_length=255)]
    node_name: Slug
    csr_pem: Annotated[str, Meta(max_length=8192)]


class Enrolled(msgspec.Struct, frozen=True, kw_only=True):
    """The node's identity. `task_keys` maps key id → base64 of the raw Ed25519 public key."""

    node_id: str
    certificate_pem: str
    ca_pem: str
    task_keys: dict[str, str]
    link_url: str


class RenewRequest(Body, frozen=True):
    """A new certificate for the same node, asked for over its current one."""

    csr_pem: Annotated[str, Meta(max_length=8192)]


class NodeGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node and its slot."""

    slot_id: str
    uuid: str
    index: int
    model: str
    memory_bytes: int
    simulated: bool
    health: str
    health_detail: str
    allocation_id: str | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU host."""

    id: str
    name: str
    state: str
    state_reason: str
    simulated: bool
    agent_version: str
    gpus_total: int
    gpus_free: int
    labels: dict[str, str]
    last_heartbeat_at: datetime | None
    certificate_expires_at: datetime | None
    created_at: datetime
    release_at: datetime | None = None
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
    state: str
    fence: int
    attempts: int
    error_code: str
    detail: str
    created_at: datetime
    finished_at: datetime | None
