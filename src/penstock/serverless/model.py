"""What functions, workers and invocations are, and how they may change. Pure.

`MOVES` is the life of an invocation: a pair that is absent is illegal, and no state is ever left backwards. Whether it
wants a worker is another question (`waiting`): an attempt that was lost is made again in the state that it had reached.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from penstock.wire.rest import FunctionPut
from penstock.wire.serverless import LOST, Mode, State

__all__ = ["Mode", "State"]


class Event(StrEnum):
    """What can happen to an invocation."""

    CLAIMED = "claimed"
    STARTED = "started"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    EXHAUSTED = "exhausted"


_OPEN: Final = (State.QUEUED, State.DISPATCHING, State.RUNNING)
#: The whole lifecycle. An end may come from any open state: results are not ordered after reports of a start.
MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.QUEUED, Event.CLAIMED): State.DISPATCHING,
    (State.DISPATCHING, Event.CLAIMED): State.DISPATCHING,
    (State.RUNNING, Event.CLAIMED): State.RUNNING,
    (State.DISPATCHING, Event.STARTED): State.RUNNING,
    **{(state, Event.SUCCEEDED): State.SUCCEEDED for state in _OPEN[1:]},
    **{(state, Event.FAILED): State.FAILED for state in _OPEN},
    **{(state, Event.EXPIRED): State.EXPIRED for state in _OPEN},
    **{(state, Event.CANCELLED): State.CANCELLED for state in _OPEN},
    **{(state, Event.EXHAUSTED): State.DEAD_LETTERED for state in _OPEN},
}
INITIAL: Final = State.QUEUED
OPEN: Final = frozenset(_OPEN)
FINAL: Final = frozenset(State) - OPEN


class WorkerState(StrEnum):
    """Where a worker is: `draining` takes nothing new, `gone` has given everything back."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    GONE = "gone"


#: An attempt may end with its worker so often before the invocation is given up.
LOST_MAX: Final = 5
#: Names that would be another project's in the default project's subjects.
FOREIGN: Final = re.compile(r"prj_[0-9a-z]{26}_.*")
NAME: Final = re.compile(r"[a-z0-9_-]{1,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an installation sets for functions."""

    lease_s: float = 15.0
    heartbeat_s: float = 3.0
    waiting_max_per_project: int = 200_000
    keep_results_s: float = 7 * 86_400
    keep_outputs_s: float = 3 * 86_400
    sync_wait_s: float = 30.0
    #: A worker that could not be made is tried again after this, doubled each time up to the last.
    create_again_s: float = 1.0
    create_again_max_s: float = 60.0

    def patience_s(self, timeout_s: float | None) -> float:
        """How long a caller waits for the end: a moment more than the work may take, to be told that it took longer."""
        return timeout_s + 1.0 if timeout_s else self.sync_wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function as hot paths see it."""

    id: str
    project_id: str
    organisation_id: str
    name: str
    current_version: int
    serving_version: int
    timeout_s: float
    webhook: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An invocation that is to be made."""

    project_id: str
    id: str
    function_id: str | None
    function_name: str
    mode: Mode
    content_type: str
    headers: Mapping[str, str]
    attributes: Mapping[str, str]
    payload: bytes | None
    payload_ref: Mapping[str, Any] | None
    payload_hash: bytes
    timeout_s: float | None
    delay_s: float
    ttl_s: float | None
    reply_to: str
    webhook: str | None
    parent_id: str | None
    key_id: str | None
    created_by: str
    correlation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """What the queue is told of an invocation that waits."""

    project_id: str
    id: str
    function_name: str
    mode: Mode
    content_type: str
    headers: Mapping[str, str]
    attributes: Mapping[str, str]
    payload: bytes | None
    payload_ref: Mapping[str, Any] | None
    timeout_s: float | None
    reply_to: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """An attempt that a worker was chosen for. `free` slots its function had for the round that gave it."""

    project_id: str
    id: str
    function_id: str
    function_name: str
    request: str
    worker_id: str
    mac_key: bytes
    attempt: int
    token: bytes
    mode: Mode
    state: State
    content_type: str
    headers: Mapping[str, str]
    attributes: Mapping[str, str]
    payload: bytes | None
    payload_ref: Mapping[str, Any] | None
    timeout_s: float
    correlation_id: str
    dispatched_at: datetime
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """An invocation as it stands. `progress` is JSON as its handler said it."""

    project_id: str
    id: str
    seq: int
    function_id: str | None
    function_name: str
    mode: Mode
    state: State
    waiting: bool
    due_at: datetime
    expires_at: datetime | None
    version: int | None
    attempt: int
    worker_id: str | None
    payload_hash: bytes
    timeout_s: float | None
    parent_id: str | None
    created_at: datetime
    dispatched_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None
    duration_ms: int
    status_code: int
    result_type: str
    result_headers: Mapping[str, str] | None
    result: bytes | None
    result_ref: Mapping[str, Any] | None
    encoding: str
    failure_class: str
    error: str
    error_type: str
    traceback: str
    progress: str | None

    @property
    def ended(self) -> bool:
        """Whether there is nothing more to come."""
        return self.state in FINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended, as its worker's sidecar says. `lost`: it says nothing about the work."""

    project_id: str
    id: str
    token: bytes
    worker_id: str
    state: State
    status_code: int
    content_type: str
    headers: Mapping[str, str]
    body: bytes | None
    body_ref: Mapping[str, Any] | None
    encoding: str
    failure_class: str
    error: str
    error_type: str
    traceback: str
    duration_ms: int

    @property
    def lost(self) -> bool:
        """Whether another attempt has to be made, whatever the function retries."""
        return self.failure_class in LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What an ending did. `waiting`: another attempt will be made. `state` is the invocation's after it. `more`: others
    of its function wait for the slot that became free."""

    project_id: str
    id: str
    function_id: str
    function_name: str
    mode: Mode
    state: State
    waiting: bool
    attempt: int
    worker_id: str
    failure_class: str
    status_code: int
    error: str
    error_type: str
    traceback: str
    reply_to: str
    parent_id: str | None
    started_at: datetime | None
    finished_at: datetime | None
    more: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker as it stands."""

    id: str
    function_id: str
    project_id: str
    request: str
    version: int
    allocation_id: str
    state: WorkerState
    reason: str
    slots: int
    inflight: int
    served: int
    created_at: datetime
    ready_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a new worker is to be, for whoever makes allocations. `request` is the function's name in subjects."""

    worker: str
    function_id: str
    function: str
    project_id: str
    organisation_id: str
    created_by: str
    created_kind: str
    key_id: str | None
    request: str
    definition: FunctionPut


def diagram_parts() -> tuple[str, Mapping[tuple[State, Event], State], State, Sequence[State]]:
    """For the generated diagram."""
    return "The life of an invocation", MOVES, INITIAL, sorted(FINAL)
