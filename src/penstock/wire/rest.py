"""Bodies of the REST API, shared by the server's routes and the client. Times are UTC, money is in micro-dollars."""

from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")

Name = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-zA-Z0-9]([a-zA-Z0-9._ -]*[a-zA-Z0-9])?$")]
Slug = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^[a-zA-Z0-9._/:-]*$")]
Labels = Annotated[dict[Slug, LabelValue], Meta(max_length=32)]
PositiveCount = Annotated[int, Meta(ge=1, le=1_000_000)]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what clients send: unknown fields are refused, so that a typing error never passes silently."""


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """One page of a list. `next_cursor` is none on the last."""

    items: list[T]
    next_cursor: str | None = None


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What went wrong, where, and the id to quote."""

    code: str
    message: str
    correlation_id: str
    field: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The one error envelope."""

    error: ErrorDetail


class Whoami(msgspec.Struct, frozen=True, kw_only=True):
    """The caller as the server sees it."""

    principal_id: str
    principal_kind: str
    display_name: str
    organisation_id: str
    project_id: str
    role: str
    operator: bool
    key_id: str | None
    #: Where units' ports and commands are reached.
    gateway_url: str


class OrganisationCreate(Body, frozen=True):
    """A new organisation; operators only."""

    name: Name


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    """A customer: owns projects and pays for them."""

    id: str
    name: str
    created_at: datetime


class ProjectCreate(Body, frozen=True):
    """A new project in the caller's organisation; operators may name another."""

    name: Name
    organisation_id: str | None = None


class ProjectUpdate(Body, frozen=True):
    """Rename."""

    name: Name


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """The scope of everything that people create."""

    id: str
    organisation_id: str
    name: str
    created_at: datetime


class MemberPut(Body, frozen=True):
    """Give a principal a role in a project: owner, admin, developer, viewer, billing."""

    role: str


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A principal's role in a project."""

    principal_id: str
    principal_kind: str
    display_name: str
    role: str
    created_at: datetime


class UserCreate(Body, frozen=True):
    """A person known by an identity provider's issuer and subject."""

    issuer: Annotated[str, Meta(min_length=1, max_length=255)]
    subject: Annotated[str, Meta(min_length=1, max_length=255)]
    display_name: Name


class User(msgspec.Struct, frozen=True, kw_only=True):
    """A person."""

    id: str
    issuer: str
    subject: str
    display_name: str
    created_at: datetime


class ServiceAccountCreate(Body, frozen=True):
    """A principal for programs, with a role in the current project that is no higher than the caller's."""

    name: Name
    role: str


class ServiceAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A principal for programs."""

    id: str
    project_id: str
    name: str
    role: str
    created_at: datetime


class KeyCreate(Body, frozen=True):
    """A new API key in the current project. It belongs to the caller, or to a service account of the project, and
    its role is at most the caller's and its owner's."""

    name: Name
    role: str
    service_account_id: str | None = None
    expires_in_s: Annotated[int, Meta(ge=60, le=366 * 24 * 3600)] | None = None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret."""

    id: str
    name: str
    hint: str
    role: str
    principal_id: str
    project_id: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class KeyCreated(msgspec.Struct, frozen=True, kw_only=True):
    """The only answer that ever shows the secret."""

    key: Key
    secret: str


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
    gpus: list[NodeGpu] = []


class NodeStateChange(Body, frozen=True):
    """Why; shown on the node and in the audit log."""

    reason: Annotated[str, Meta(max_length=255)] = ""


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


class SkuPut(Body, frozen=True):
    """Define or change an offer; operators only. The price of running allocations does not change."""

    description: Annotated[str, Meta(max_length=255)]
    gpu_model: Annotated[str, Meta(max_length=127)]
    gpu_counts: Annotated[list[Annotated[int, Meta(ge=1, le=1024)]], Meta(min_length=1, max_length=32)]
    price_microusd_per_gpu_hour: Annotated[int, Meta(ge=0, le=10**12)]
    memory_bytes_per_gpu: Annotated[int, Meta(ge=64 << 20, le=1 << 44)]
    cpus_per_gpu: Annotated[float, Meta(gt=0, le=1024)]
    processes_max: Annotated[int, Meta(ge=16, le=1_000_000)] = 4096
    scratch_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 10 << 30
    enabled: bool = True


class Sku(msgspec.Struct, frozen=True, kw_only=True):
    """An offer. `gpu_model` is a model name or `*`."""

    name: str
    description: str
    gpu_model: str
    gpu_counts: list[int]
    price_microusd_per_gpu_hour: int
    memory_bytes_per_gpu: int
    cpus_per_gpu: float
    processes_max: int
    scratch_bytes: int
    enabled: bool
    gpus_free: int


class QuotaPut(Body, frozen=True):
    """How many GPUs a project may hold at once."""

    gpus_max: Annotated[int, Meta(ge=0, le=1_000_000)]


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """A project's limit and what it uses now."""

    project_id: str
    gpus_max: int
    gpus_used: int


class SecretUse(Body, frozen=True):
    """A secret of the project for a unit: the file /run/secrets/<name> and, if `env` is given, that variable."""

    name: Slug
    env: Annotated[str, Meta(max_length=128)] = ""


class AllocationCreate(Body, frozen=True):
    """Rent GPUs. `wait_s` > 0 waits that long for capacity instead of being refused at once. `runtime` names an
    environment of the project's, built from a lock file, in place of the image's own."""

    sku: Slug
    gpus: int = 1
    name: Name | None = None
    image: Annotated[str, Meta(max_length=255)] = "python:3"
    labels: Labels = {}
    env: Annotated[dict[str, str], Meta(max_length=64)] = {}
    command: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)] = []
    ports: Annotated[list[Annotated[int, Meta(ge=1, le=65535)]], Meta(max_length=32)] = []
    secrets: Annotated[list[SecretUse], Meta(max_length=32)] = []
    runtime: Slug | None = None
    wait_s: Annotated[int, Meta(ge=0, le=7 * 24 * 3600)] = 0


class AllocationUpdate(Body, frozen=True):
    """Change the name or the labels."""

    name: Name | None = None
    labels: Labels | None = None


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One move of the state machine."""

    state: str
    at: datetime
    reason: str


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A claim of a project on a slice of a node. `reason` says why it waits, failed or is being released."""

    id: str
    project_id: str
    name: str | None
    purpose: str
    sku: str
    gpus: int
    image: str
    state: str
    reason: str
    labels: dict[str, str]
    ports: list[int]
    node_id: str | None
    gpu_uuids: list[str]
    simulated: bool
    price_microusd_per_hour: int
    created_at: datetime
    active_at: datetime | None
    ended_at: datetime | None
    deadline_at: datetime | None
    version: int
    access_urls: dict[str, str]
    timeline: list[TimelineEntry] = []


class ReleaseRequest(Body, frozen=True):
    """Why; shown on the allocation."""

    reason: Annotated[str, Meta(max_length=255)] = ""


class EventOut(msgspec.Struct, frozen=True, kw_only=True):
    """A fact, as in the stream. `cursor` resumes after it."""

    cursor: str
    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    project_id: str | None
    correlation_id: str
    occurred_at: datetime
    payload: dict[str, Any]


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who did what."""

    id: str
    at: datetime
    actor_id: str
    actor_kind: str
    action: str
    target_id: str
    project_id: str | None
    correlation_id: str
    detail: dict[str, Any]


class DeadLetterOut(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the broker refused for good."""

    event_id: str
    event_type: str
    aggregate_id: str
    version: int
    occurred_at: datetime
    attempts: int
    last_error: str
