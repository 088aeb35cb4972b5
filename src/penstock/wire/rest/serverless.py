# ruff: noqa: N815 - the source's contract is in camel case
"""Functions and invocations.

`GpuUnit…` and `Invocation{Request,Ack,Outcome}` are the source's contract, word for word, inside `{"data": …}`;
everything else is ours.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body, Labels, Slug
from penstock.wire.rest.compute import SecretUse
from penstock.wire.rest.states import InvocationMode, InvocationState, WorkerState
from penstock.wire.serverless import TIMEOUT_S_MAX, Mode
from penstock.wire.times import Time

T = TypeVar("T")

#: What the source calls a request id; it is lower-cased before it is looked at.
FunctionName = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9_-]+$(?!\n)")]
InvocationId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$(?!\n)")]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]


class Data(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """The source's envelope."""

    data: T


class CodeUse(Body, frozen=True):
    """A tar.gz archive among the project's objects."""

    object: Annotated[str, Meta(min_length=1, max_length=1024)]
    sha256: Sha256
    bytes: Annotated[int, Meta(ge=1, le=64 << 20)]


class ScheduleUse(Body, frozen=True):
    """When a function runs by itself: five fields of cron, in a time zone."""

    cron: Annotated[str, Meta(min_length=9, max_length=255)]
    timezone: Annotated[str, Meta(max_length=63)] = "UTC"
    payload: Any = None


class FrameworkUse(Body, frozen=True):
    """Where the unit's framework listens, and for what."""

    socketPath: Annotated[str, Meta(max_length=4096)] = "/tmp/serverless-framework/framework.sock"  # noqa: S108
    invokePath: Annotated[str, Meta(max_length=255, pattern=r"^/[!-~]*$(?!\n)")] = "/invoke"
    healthPath: Annotated[str, Meta(max_length=255, pattern=r"^/[!-~]*$(?!\n)")] = "/healthz"


class FunctionPut(Body, frozen=True):
    """Deploy a function: a new version, unless this is what the current one is.

    It is `code` with a `handler` (`module:name`), run by the platform's framework; or a `command` that serves the
    framework's socket itself; or neither, and it answers with what it was given.
    """

    sku: Slug
    gpus: Annotated[int, Meta(ge=1, le=1024)] = 1
    image: Annotated[str, Meta(max_length=255)] = "python:3"
    runtime: Slug | None = None
    code: CodeUse | None = None
    handler: Annotated[str, Meta(max_length=255, pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_][\w.]*)?$(?!\n)")] = ""
    command: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)] = []
    env: Annotated[dict[str, str], Meta(max_length=64)] = {}
    secrets: Annotated[list[SecretUse], Meta(max_length=32)] = []
    labels: Labels = {}
    framework: FrameworkUse = FrameworkUse()
    #: How many invocations a worker runs at once, and how many are planned for it when workers are counted.
    concurrency: Annotated[int, Meta(ge=1, le=1000)] = 1
    tasks_per_worker: Annotated[int, Meta(ge=0, le=100_000)] = 0
    workers_min: Annotated[int, Meta(ge=0, le=1000)] = 0
    workers_max: Annotated[int, Meta(ge=1, le=1000)] = 8
    idle_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    requests_min: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    start_timeout_s: Annotated[float, Meta(ge=1, le=3600)] = 120.0
    timeout_s: Annotated[float, Meta(gt=0, le=TIMEOUT_S_MAX)] = 300.0
    retries: Annotated[int, Meta(ge=0, le=10)] = 0
    #: Names of exceptions; none means all.
    retry_for: Annotated[list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(max_length=32)] = []
    retry_delay_s: Annotated[float, Meta(ge=0, le=3600)] = 1.0
    schedule: ScheduleUse | None = None
    webhook: Annotated[str, Meta(max_length=2048)] | None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function. `serving_version` gets the calls; it becomes `current_version` when that has a worker. `waiting_for`
    says why workers are missing."""

    id: str
    project_id: str
    name: str
    current_version: int
    serving_version: int
    definition: FunctionPut
    workers_ready: int
    workers_starting: int
    queued: int
    running: int
    waiting_for: str
    url: str
    created_at: Time
    updated_at: Time


class FunctionVersion(msgspec.Struct, frozen=True, kw_only=True):
    """What a function was, or is."""

    number: int
    definition: FunctionPut
    created_at: Time
    created_by: str
    current: bool
    serving: bool


class FunctionWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker. Its allocation is charged by the second."""

    name: str
    version: int
    allocation_id: str
    state: WorkerState
    reason: str
    slots: int
    inflight: int
    served: int
    created_at: Time
    ready_at: Time | None


class Rollback(Body, frozen=True):
    """Make an earlier version the current one; without a number, the one before."""

    version: Annotated[int, Meta(ge=1)] | None = None


class ObjectUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that are kept apart: `GET url` gives them."""

    bytes: int
    sha256: str
    url: str


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """An invocation. `waiting_for` says why it does not run yet. `body` is what the handler answered, `result` where to
    get that when it is large; both are left out of lists. `encoding` base64 where the body is not JSON."""

    id: str
    project_id: str
    function: str
    mode: InvocationMode
    state: InvocationState
    attempts: int
    version: int | None
    worker: str | None
    waiting_for: str
    status_code: int
    failure_class: str
    error: str
    error_type: str
    traceback: str
    progress: Any
    parent_id: str | None
    timeout_s: float | None
    duration_ms: int
    created_at: Time
    due_at: Time
    expires_at: Time | None
    dispatched_at: Time | None
    started_at: Time | None
    finished_at: Time | None
    content_type: str = ""
    encoding: str = ""
    body: Any = None
    result: ObjectUse | None = None


class MapCreate(Body, frozen=True):
    """Invoke a function once for each payload, asynchronously. `id` names the batch: its invocations are
    `<id>-<index>`, so that the same batch again changes nothing."""

    payloads: Annotated[list[Any], Meta(min_length=1, max_length=10_000)]
    id: Annotated[str, Meta(min_length=1, max_length=52, pattern=r"^[A-Za-z0-9_-]+$(?!\n)")] | None = None
    content_type: Annotated[str, Meta(max_length=255)] = "application/json"
    timeout_s: Annotated[float, Meta(gt=0, le=TIMEOUT_S_MAX)] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=7 * 86_400)] | None = None


class MapCreated(msgspec.Struct, frozen=True, kw_only=True):
    """The invocations, in the order of their payloads."""

    id: str
    invocations: list[str]


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a handler said. `place` orders the lines of a function; `text` of progress and chunks is JSON."""

    place: int
    invocation: str
    attempt: int
    seq: int
    kind: str
    text: str
    at: Time


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """What could not be done. `replayed_as` is the invocation that was made of it."""

    id: str
    function: str
    source: str
    invocation_id: str | None
    failure_class: str
    error: str
    created_at: Time
    replayed_as: str | None
    replayed_at: Time | None


class InvocationRequest(Body, frozen=True):
    """`POST /api/v1/serverless/invocations`. The last three are ours: a delay, a time to live while it waits, and who
    is told."""

    serverlessRequestID: Annotated[str, Meta(min_length=1, max_length=63)]
    invocationID: InvocationId | None = None
    mode: Mode = Mode.ASYNC
    contentType: Annotated[str, Meta(min_length=1, max_length=255)] = "application/json"
    headers: Annotated[dict[str, str], Meta(max_length=64)] = {}
    attributes: Annotated[dict[str, str], Meta(max_length=64)] = {}
    payload: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    timeoutSeconds: Annotated[int, Meta(ge=0, le=TIMEOUT_S_MAX)] = 0
    delaySeconds: Annotated[float, Meta(ge=0, le=7 * 86_400)] = 0
    ttlSeconds: Annotated[float, Meta(ge=0, le=7 * 86_400)] = 0
    webhook: Annotated[str, Meta(max_length=2048)] | None = None


class InvocationAck(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted: it will have exactly one end. `sequence` 0: the queue is away, the sweeper publishes it later."""

    invocationID: str
    serverlessRequestID: str
    mode: InvocationMode
    subject: str
    resultSubject: str
    metricsSubject: str
    stream: str
    sequence: int
    duplicate: bool
    acceptedAt: Time
    #: Ours.
    state: InvocationState = "queued"


class InvocationOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a sync invocation ended."""

    invocationID: str
    serverlessRequestID: str
    mode: InvocationMode
    state: InvocationState
    failureClass: str
    workerName: str
    workerNamespace: str
    statusCode: int
    contentType: str
    headers: dict[str, str]
    body: Any
    error: str
    startedAt: Time | None
    completedAt: Time | None
    #: Ours.
    encoding: str = ""
    result: ObjectUse | None = None
    attempts: int = 0
    errorType: str = ""
    traceback: str = ""


class UnitPort(Body, frozen=True):
    """A port that the unit serves."""

    name: Slug
    port: Annotated[int, Meta(ge=1, le=65535)]


class UnitTemplate(Body, frozen=True):
    """What the unit runs."""

    command: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)] = []
    args: Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=256)] = []
    envs: Annotated[dict[str, str], Meta(max_length=64)] = {}
    ports: Annotated[list[UnitPort], Meta(max_length=32)] = []


class UnitAccess(Body, frozen=True):
    """Which port is the main one."""

    primaryPort: Annotated[str, Meta(max_length=63)] = ""
    scheme: Literal["http", "https"] = "http"


class UnitServerless(Body, frozen=True):
    """Makes the unit a function's definition."""

    enabled: bool = False
    requestID: Annotated[str, Meta(max_length=63)] = ""
    minAvailableCount: Annotated[int, Meta(ge=0, le=1000)] = 0
    idleTimeoutSeconds: Annotated[int, Meta(ge=0, le=86_400)] = 300
    minRequestCount: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    framework: FrameworkUse = FrameworkUse()


class GpuUnitCreate(Body, frozen=True):
    """For `POST /api/v1/gpu-units` and `PUT …/{name}`. `specName` is a SKU; `packageID` is another word for it."""

    operationID: Annotated[str, Meta(min_length=1, max_length=255, pattern=r"^[!-~]+$(?!\n)")]
    name: Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$(?!\n)")]
    specName: Annotated[str, Meta(max_length=63)] = ""
    packageID: Annotated[str, Meta(max_length=63)] = ""
    image: Annotated[str, Meta(max_length=255)] = "python:3"
    template: UnitTemplate = msgspec.field(default_factory=UnitTemplate)
    access: UnitAccess = UnitAccess()
    serverless: UnitServerless = UnitServerless()


class UnitServerlessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Phase: Disabled, Pending, Ready or Failed."""

    phase: str
    dispatchSubject: str
    socketPath: str
    invokePath: str
    healthPath: str


class GpuUnitStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Phase: Ready, Progressing, Failed or Empty."""

    phase: str
    readyReplicas: int
    serviceName: str
    accessURL: str
    serverless: UnitServerlessStatus


class GpuUnit(msgspec.Struct, frozen=True, kw_only=True):
    """A unit of the source: here a function's definition, with no worker but those that are asked for."""

    operationID: str
    name: str
    specName: str
    image: str
    template: UnitTemplate
    access: UnitAccess
    serverless: UnitServerless
    status: GpuUnitStatus
    createdAt: Time


class SigningKey(msgspec.Struct, frozen=True, kw_only=True):
    """What the project's callbacks are signed with (`Penstock-Signature`, as on webhooks)."""

    secret: str
    created_at: Time
