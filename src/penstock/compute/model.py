"""What an allocation is and how it may change.

`MOVES` is the whole lifecycle: a pair that is absent is illegal. Only `store.allocations.move` writes the state. Every
state that is not at rest has a deadline, so nothing can stay on its way for ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from penstock.wire.tasks import GpuKind, SecretRef, Serving

ANY_MODEL: Final = "*"


class State(StrEnum):
    """Where an allocation is."""

    REQUESTED = "requested"
    PROVISIONING = "provisioning"
    ACTIVE = "active"
    RELEASING = "releasing"
    RELEASED = "released"
    FAILED = "failed"
    RELEASE_FAILED = "release_failed"


class Event(StrEnum):
    """What can happen to it."""

    PLACED = "placed"
    READY = "ready"
    STEP_FAILED = "step_failed"
    DEADLINE = "deadline"
    RELEASE = "release"
    HANDED_OVER = "handed_over"
    PROVED = "proved"
    EXHAUSTED = "exhausted"
    RETRY = "retry"


class Purpose(StrEnum):
    """What the slice is used for."""

    INTERACTIVE = "interactive"
    FUNCTION_WORKER = "function_worker"
    ACTOR_RUNNER = "actor_runner"
    ENGINE = "engine"
    CLUSTER_MEMBER = "cluster_member"
    STOCK = "stock"


#: The whole lifecycle.
MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.REQUESTED, Event.PLACED): State.PROVISIONING,
    (State.REQUESTED, Event.DEADLINE): State.FAILED,
    (State.REQUESTED, Event.RELEASE): State.RELEASING,
    (State.PROVISIONING, Event.READY): State.ACTIVE,
    (State.PROVISIONING, Event.STEP_FAILED): State.FAILED,
    (State.PROVISIONING, Event.DEADLINE): State.FAILED,
    (State.PROVISIONING, Event.RELEASE): State.RELEASING,
    (State.ACTIVE, Event.RELEASE): State.RELEASING,
    (State.ACTIVE, Event.HANDED_OVER): State.RELEASED,
    (State.RELEASING, Event.PROVED): State.RELEASED,
    (State.RELEASING, Event.EXHAUSTED): State.RELEASE_FAILED,
    (State.RELEASING, Event.DEADLINE): State.RELEASE_FAILED,
    (State.RELEASE_FAILED, Event.RETRY): State.RELEASING,
}
INITIAL: Final = State.REQUESTED
FINAL: Final = frozenset(State) - {source for source, _ in MOVES}
#: States that wait for nobody; all others have a deadline.
AT_REST: Final = FINAL | {State.ACTIVE, State.RELEASE_FAILED}
#: States that count against the project's quota.
COUNTED: Final = frozenset({State.REQUESTED, State.PROVISIONING, State.ACTIVE, State.RELEASING})
#: Moves that end the agents' right to start anything: they raise the fence.
FENCING: Final = frozenset({Event.RELEASE, Event.RETRY})

#: The fact that each move writes to the outbox.
FACTS: Final[Mapping[Event, str]] = {
    Event.PLACED: "provisioning.started",
    Event.READY: "provisioning.active",
    Event.STEP_FAILED: "provisioning.failed",
    Event.DEADLINE: "provisioning.failed",
    Event.RELEASE: "provisioning.releasing.requested",
    Event.HANDED_OVER: "provisioning.releasing.completed",
    Event.PROVED: "provisioning.releasing.completed",
    Event.EXHAUSTED: "provisioning.release_failed",
    Event.RETRY: "provisioning.releasing.requested",
}
REQUESTED_FACT: Final = "provisioning.requested"
UPDATED_FACT: Final = "provisioning.updated"


def after(state: State, event: Event) -> State | None:
    """Where `event` leads from `state`; none when the pair is illegal."""
    return MOVES.get((state, event))


def fact(state: State, event: Event) -> str:
    """The type of the fact that this move writes."""
    if MOVES[state, event] is State.RELEASE_FAILED:
        return FACTS[Event.EXHAUSTED]
    return FACTS[event]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long an allocation may stay in each state that is not at rest."""

    requested_s: float = 120
    provisioning_s: float = 120
    releasing_s: float = 900
    #: On top of provisioning, for a node that has to build the environment first.
    runtime_s: float = 600

    def of(self, state: State) -> float | None:
        """Seconds for `state`; none for states at rest."""
        if state in AT_REST:
            return None
        return {
            State.REQUESTED: self.requested_s,
            State.PROVISIONING: self.provisioning_s,
            State.RELEASING: self.releasing_s,
        }[state]

    def provisioning(self, runtime: str) -> float:
        """Seconds for provisioning, with an environment or without."""
        return self.provisioning_s + (self.runtime_s if runtime else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an installation sets for compute."""

    deadlines: Deadlines = field(default_factory=Deadlines)
    gpus_max_default: int = 64
    #: So often a unit that its node never took is placed on another.
    relocations_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sku:
    """An offer. `gpu_model` is a model's name or `*`.

    `share` says how much of a GPU one of its places is: all of it, the MIG instance `mig_profile`, or an MPS share with
    at least `share_memory_bytes_min`.
    """

    name: str
    description: str
    gpu_model: str
    gpu_counts: tuple[int, ...]
    price_microusd_per_gpu_hour: int
    memory_bytes_per_gpu: int
    cpus_per_gpu: float
    processes_max: int
    scratch_bytes: int
    enabled: bool
    share: GpuKind = GpuKind.WHOLE
    mig_profile: str = ""
    share_memory_bytes_min: int = 0

    @property
    def thing(self) -> str:
        """What is counted: GPUs, or shares of one kind."""
        return {
            GpuKind.WHOLE: "GPU",
            GpuKind.MIG: f"MIG share {self.mig_profile}",
            GpuKind.MPS: "MPS share",
        }[self.share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose an allocation is."""

    project_id: str
    organisation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What units of stock are kept apart by."""

    sku: str
    gpus: int
    image: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """How many units of a shape are to be ready, and why fewer are."""

    shape: Shape
    floor: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One slot held, or once held, by an allocation. `whole_uuid` is the GPU itself, which a share is part of."""

    slot_id: str
    node_id: str
    gpu_uuid: str
    gpu_index: int
    simulated: bool
    kind: str
    whole_uuid: str
    rack_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A project's environment: a base image with the packages of a lock. `lock` is empty where it is not asked for."""

    project_id: str
    name: str
    digest: str
    base: str
    packages: int
    lock: str
    version: int
    created_at: datetime
    updated_at: datetime


class ResolutionState(StrEnum):
    """How far requirements are on their way to a lock."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Requirements by name, and the lock that a node made of them for the Python of the base."""

    id: str
    project_id: str
    base: str
    requirements: str
    state: ResolutionState
    lock: str
    python: str
    error_code: str
    error: str
    task_id: str | None
    nodes_tried: list[str]
    correlation_id: str
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a request asks for, with price and limits as they are when it is made.

    `key_id` is the API key that it was made with, if any. `runtime` is the digest of a built environment, empty for the
    image's own. `stock_id` is the stock allocation whose unit was handed over to this one, if any. `serving` makes the
    unit a function's worker.
    """

    id: str
    project_id: str
    organisation_id: str
    name: str | None
    purpose: Purpose
    key_id: str | None
    sku: str
    gpus: int
    image: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    command: Sequence[str]
    ports: Sequence[int]
    secrets: Sequence[SecretRef]
    egress: Sequence[str]
    runtime: str
    unit_id: str
    stock_id: str | None
    price_microusd_per_hour: int
    memory_bytes: int
    cpus: float
    processes_max: int
    scratch_bytes: int
    wait_s: int
    correlation_id: str
    serving: Serving | None = None

    @property
    def serves(self) -> bool:
        """Whether only a node that serves functions will do."""
        return self.purpose is Purpose.FUNCTION_WORKER

    def payload(self, *, state: State, reason: str, node_id: str | None) -> dict[str, Any]:
        """What facts about it carry."""
        return {
            "allocation_id": self.id,
            "purpose": self.purpose,
            "sku": self.sku,
            "gpus": self.gpus,
            "node_id": node_id,
            "price_microusd_per_hour": self.price_microusd_per_hour,
            "state": state,
            "reason": reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One line of an allocation's timeline."""

    state: State
    reason: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation(Draft):
    """A claim of a project on a slice of a node.

    `failing` is why a provisioning that has not reached its end is being undone; empty otherwise. `fence` rises when
    nothing may be started any more. `relocations` counts the nodes that did not take it. `billing_ended_at` is when the
    tenant stopped paying. The GPUs are those that it holds or, once ended, held. Stock that is released for the sake of
    a waiting request `yields_to` it.
    """

    state: State
    reason: str
    failing: str
    version: int
    fence: int
    relocations: int
    node_id: str | None
    created_at: datetime
    changed_at: datetime
    deadline_at: datetime | None
    active_at: datetime | None
    billing_ended_at: datetime | None
    ended_at: datetime | None
    gpu_uuids: Sequence[str]
    simulated: bool
    yields_to: str | None
    timeline: Sequence[Move]

    @property
    def driven(self) -> bool:
        """Whether a saga has something to do for it."""
        return self.state not in AT_REST and (self.state is not State.REQUESTED or self.node_id is not None)


def diagram() -> str:
    """The state machine as a Mermaid diagram, generated from `MOVES`."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL}: create"]
    lines += [f"    {source} --> {target}: {event}" for (source, event), target in MOVES.items()]
    lines += [f"    {state} --> [*]" for state in State if state in FINAL]
    return "\n".join(lines) + "\n"
