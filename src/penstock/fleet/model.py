"""Nodes, slots and tasks as values, and the whole lifecycle of a node. Pure.

A node's own facts (does it answer?) and an operator's wish (`desired`) are kept apart, so that a node that vanishes and
comes back is cordoned or draining again when it was before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

from penstock.wire.tasks import GpuKind

Answer = TypeVar("Answer", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The fleet's times and bounds. All of them are counted by the database's clock."""

    heartbeat_s: float = 5.0
    #: So many intervals without a heartbeat make a node unreachable.
    heartbeats_missed_max: int = 3
    lost_after_s: float = 600.0
    token_s: float = 600.0
    certificate_s: float = 24 * 3600.0
    task_lease_s: float = 30.0
    #: A GPU that failed is probed when its node has reported it healthy for so long.
    gpu_settle_s: float = 600.0
    #: How many connections of nodes a gateway lets in a second.
    accepts_per_s: float = 200.0
    #: How long finished tasks and revoked or expired certificates are kept.
    history_s: float = 7 * 24 * 3600.0

    @property
    def unreachable_after_s(self) -> float:
        """Silence that makes a node unreachable."""
        return self.heartbeat_s * self.heartbeats_missed_max


class NodeState(StrEnum):
    """Where a node is in its life."""

    PENDING = "pending"
    ENROLLED = "enrolled"
    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    LOST = "lost"
    RETIRED = "retired"


class NodeEvent(StrEnum):
    """What can happen to a node."""

    ENROL = "enrol"
    RECOVER = "recover"
    RETURN_READY = "return_ready"
    RETURN_CORDONED = "return_cordoned"
    RETURN_DRAINING = "return_draining"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    FALL_SILENT = "fall_silent"
    GIVE_UP = "give_up"
    REVOKE = "revoke"
    RETIRE = "retire"


def _lifecycle() -> dict[tuple[NodeState, NodeEvent], NodeState]:
    state, event = NodeState, NodeEvent
    moves = {
        (state.PENDING, event.ENROL): state.ENROLLED,
        (state.ENROLLED, event.RETURN_READY): state.READY,
        (state.ENROLLED, event.RECOVER): state.ENROLLED,
        (state.READY, event.CORDON): state.CORDONED,
        (state.READY, event.DRAIN): state.DRAINING,
        (state.CORDONED, event.UNCORDON): state.READY,
        (state.CORDONED, event.DRAIN): state.DRAINING,
        (state.DRAINING, event.UNCORDON): state.READY,
        (state.DRAINING, event.CORDON): state.CORDONED,
        (state.UNREACHABLE, event.GIVE_UP): state.LOST,
        (state.PENDING, event.RETIRE): state.RETIRED,
        (state.ENROLLED, event.RETIRE): state.RETIRED,
        (state.ENROLLED, event.REVOKE): state.LOST,
    }
    for answering in (state.READY, state.CORDONED, state.DRAINING):
        moves[answering, event.FALL_SILENT] = state.UNREACHABLE
        moves[answering, event.RECOVER] = answering
        moves[answering, event.REVOKE] = state.LOST
        moves[answering, event.RETIRE] = state.RETIRED
    for silent in (state.UNREACHABLE, state.LOST):
        moves[silent, event.RETURN_READY] = state.READY
        moves[silent, event.RETURN_CORDONED] = state.CORDONED
        moves[silent, event.RETURN_DRAINING] = state.DRAINING
        # An operator's wish is kept for the day the node answers again.
        moves[silent, event.CORDON] = moves[silent, event.UNCORDON] = moves[silent, event.DRAIN] = silent
        moves[silent, event.RECOVER] = silent
        moves[silent, event.REVOKE] = state.LOST
        moves[silent, event.RETIRE] = state.RETIRED
    return moves


#: The whole lifecycle; a pair that is absent is illegal.
MOVES: Final[Mapping[tuple[NodeState, NodeEvent], NodeState]] = _lifecycle()
FINAL: Final = frozenset(NodeState) - {source for source, _ in MOVES}

#: The fact that each event leaves in the outbox.
FACTS: Final[Mapping[NodeEvent, str]] = {
    NodeEvent.ENROL: "fleet.node_enrolled",
    NodeEvent.RECOVER: "fleet.node_recovered",
    NodeEvent.RETURN_READY: "fleet.node_ready",
    NodeEvent.RETURN_CORDONED: "fleet.node_cordoned",
    NodeEvent.RETURN_DRAINING: "fleet.node_draining",
    NodeEvent.CORDON: "fleet.node_cordoned",
    NodeEvent.UNCORDON: "fleet.node_uncordoned",
    NodeEvent.DRAIN: "fleet.node_draining",
    NodeEvent.FALL_SILENT: "fleet.node_unreachable",
    NodeEvent.GIVE_UP: "fleet.node_lost",
    NodeEvent.REVOKE: "fleet.node_revoked",
    NodeEvent.RETIRE: "fleet.node_retired",
}

#: What an operator's order leaves as the wish.
WISHES: Final[Mapping[NodeEvent, NodeState]] = {
    NodeEvent.CORDON: NodeState.CORDONED,
    NodeEvent.UNCORDON: NodeState.READY,
    NodeEvent.DRAIN: NodeState.DRAINING,
}

#: How a node returns, by the wish that was kept for it.
RETURNS: Final[Mapping[NodeState, NodeEvent]] = {
    NodeState.READY: NodeEvent.RETURN_READY,
    NodeState.CORDONED: NodeEvent.RETURN_CORDONED,
    NodeState.DRAINING: NodeEvent.RETURN_DRAINING,
}

#: States in which the node is expected to send heartbeats.
ANSWERING: Final = frozenset({NodeState.READY, NodeState.CORDONED, NodeState.DRAINING})


class SlotHealth(StrEnum):
    """Whether a slot may be used. The database computes it from four facts: blocked, present, quarantined, GPU healthy.

    A degraded one returns by itself when its GPU is well again, a quarantined one only after proof.
    """

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    QUARANTINED = "quarantined"
    CLEANUP_BLOCKED = "cleanup_blocked"
    MISSING = "missing"


class TaskState(StrEnum):
    """A node task. `refused`: certainly without effect. `expired`: nobody waits any more, its effect is unknown."""

    QUEUED = "queued"
    LEASED = "leased"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"
    EXPIRED = "expired"


OPEN_TASKS: Final = frozenset({TaskState.QUEUED, TaskState.LEASED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A GPU host."""

    id: str
    name: str
    state: NodeState
    state_reason: str
    desired: NodeState
    version: int
    gpus_approved: int
    gpus_reported: int
    simulated: bool
    production: bool
    serves_functions: bool
    agent_version: str
    labels: Mapping[str, str]
    created_at: datetime
    release_at: datetime | None = None
    last_heartbeat_at: datetime | None = None
    certificate_expires_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A GPU of a node or a share of one, as a place for one unit. `whole_uuid` is the GPU itself."""

    id: str
    node_id: str
    gpu_uuid: str
    gpu_index: int
    gpu_model: str
    memory_bytes: int
    simulated: bool
    health: SlotHealth
    health_detail: str
    whole_uuid: str = ""
    numa_node: int = -1
    kind: GpuKind = GpuKind.WHOLE
    profile: str = ""
    threads_percent: int = 100
    nvlink_domain: str = ""


class Cause(StrEnum):
    """Why a GPU is in quarantine. One that failed is probed by itself; an operator's waits for the operator."""

    FAILED = "failed"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """A whole GPU that gets no work until a probe has proved that it works. `probe_detail` is why the last one did
    not pass."""

    id: str
    node_id: str
    gpu_uuid: str
    cause: Cause
    detail: str
    release_reason: str
    version: int
    since: datetime
    well_since: datetime | None
    return_asked_at: datetime | None
    probe_task_id: str | None
    probe_detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a whole GPU's sensors last showed, by the database's clock."""

    at: datetime
    temperature_c: int | None
    power_w: float | None
    utilization_percent: int | None
    memory_used_bytes: int | None
    ecc_corrected: int | None
    ecc_uncorrected: int | None
    faults: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A node task, without its signed bytes."""

    id: str
    node_id: str
    type: str
    allocation_id: str | None
    state: TaskState
    fence: int
    attempts: int
    error_code: str
    detail: str
    created_at: datetime
    finished_at: datetime | None
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """How a task ended. `answer` is msgpack of the type's answer when it succeeded."""

    task_id: str
    state: TaskState
    error_code: str
    detail: str
    answer: bytes = field(repr=False)

    @property
    def succeeded(self) -> bool:
        """Whether the node did what it was asked."""
        return self.state is TaskState.SUCCEEDED

    def decode(self, answer: type[Answer]) -> Answer:
        """The typed answer; it was checked against the catalogue when it was committed."""
        return msgspec.msgpack.decode(self.answer, type=answer)


def fact_payload(node_id: str, name: str, state: NodeState, reason: str) -> dict[str, Any]:
    """What every fact about a node carries."""
    return {"node_id": node_id, "name": name, "state": state.value, "reason": reason}
