"""Messages of functions: what travels between ingress, activator, sidecar and framework.

Names and fields are those of the source's contract; what we add has a comment. A dispatch carries a MAC under the
worker's own key (`MAC_HEADER`), a result the token of its attempt. No message to a node names a caller's inbox.
"""
# ruff: noqa: N815 - the contract is in camel case

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.times import Time
from penstock.wire.unitobjects import ObjectAsk

VERSION: Final = "v1"
#: Larger payloads and bodies travel and are kept by reference.
INLINE_BYTES_MAX: Final = 1 << 20
#: A dispatch stays in its stream, which all tenants share, until the attempt ended: a payload above this is fetched.
DISPATCH_BYTES_MAX: Final = 128 << 10
PAYLOAD_BYTES_MAX: Final = 20 << 20
RESULT_BYTES_MAX: Final = 1 << 30
HEADERS_MAX: Final = 64
HEADER_BYTES_MAX: Final = 8 << 10
ERROR_BYTES_MAX: Final = 64 << 10
#: A message of a worker: a body in line with its headers and errors, or a chunk of output with every character escaped.
WORKER_MESSAGE_BYTES_MAX: Final = 2 * INLINE_BYTES_MAX + (128 << 10)
#: A dead letter. Its payload, error and names are cut, so that with every character escaped they have half of that.
DEAD_LETTER_BYTES_MAX: Final = 64 << 10
DEAD_LETTER_PAYLOAD_BYTES_MAX: Final = 4 << 10
DEAD_LETTER_ERROR_CHARS_MAX: Final = 500
DEAD_LETTER_NAME_CHARS_MAX: Final = 256
TIMEOUT_S_MAX: Final = 24 * 3600
#: Of one worker at a time: more than it has slots, as those that end are still counted.
ATTEMPTS_MAX: Final = 2000
#: `sha256=` and the hexadecimal HMAC-SHA256 of subject, a zero byte and the body, under the worker's key.
MAC_HEADER: Final = "Penstock-Mac"
#: Headers of an answer that the platform decides itself.
STRIPPED_HEADERS: Final = frozenset(
    {"set-cookie", "transfer-encoding", "connection", "keep-alive", "upgrade", "trailer"}
)


class Mode(StrEnum):
    """How the caller wants the answer."""

    ASYNC = "async"
    SYNC = "sync"
    STREAM = "stream"


class State(StrEnum):
    """Where an invocation is; never backwards."""

    QUEUED = "queued"
    DISPATCHING = "dispatching"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DEAD_LETTERED = "dead_lettered"


class FailureClass(StrEnum):
    """Why an invocation or a message failed. The first nine are the source's."""

    MALFORMED_MESSAGE = "malformed_message"
    NO_WORKER_TEMPLATE = "no_worker_template"
    ACTIVATION_TIMEOUT = "activation_timeout"
    BACKPRESSURE = "backpressure"
    DISPATCH_ERROR = "dispatch_error"
    FRAMEWORK_ERROR = "framework_error"
    FRAMEWORK_TIMEOUT = "framework_timeout"
    RESULT_STORE_ERROR = "result_store_error"
    RETRY_EXHAUSTED = "retry_exhausted"
    #: The handler itself failed: an exception, or a status of 400 and more.
    HANDLER_ERROR = "handler_error"
    #: The attempt's worker is gone; the attempt is made again.
    WORKER_LOST = "worker_lost"
    OOM = "oom"
    RESULT_TOO_LARGE = "result_too_large"
    INTEGRITY = "integrity"
    FRAMEWORK_UNHEALTHY = "framework_unhealthy"
    UNSUPPORTED_VERSION = "unsupported_version"
    ORPHAN_RESULT = "orphan_result"
    INVALID_METRIC = "invalid_metric"
    CANCELLED = "cancelled"
    #: The message speaks for another function, worker or tenant than its sender.
    FOREIGN_MESSAGE = "foreign_message"


#: Ends of an attempt that say nothing about the work itself: another attempt is made, whatever the function retries.
LOST: Final = frozenset({FailureClass.WORKER_LOST, FailureClass.DISPATCH_ERROR, FailureClass.BACKPRESSURE})


class MetricType(StrEnum):
    """What a worker's sidecar reports."""

    REGISTERED = "registered"
    HEARTBEAT = "heartbeat"
    INVOCATION_STARTED = "invocation_started"
    INVOCATION_FINISHED = "invocation_finished"
    INVOCATION_FAILED = "invocation_failed"
    #: Ours: the framework never became healthy; `error` says why. The worker is of no use.
    UNHEALTHY = "unhealthy"


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in object storage, of the invocation's project."""

    key: str
    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class InvocationMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ingress: something is queued. A hint, the row is the truth."""

    version: str
    invocationID: str
    serverlessRequestID: str
    mode: Mode
    state: State
    contentType: str
    resultSubject: str
    metricsSubject: str
    enqueuedAt: Time
    timeoutSeconds: int
    headers: dict[str, str] = {}
    attributes: dict[str, str] = {}
    payload: msgspec.Raw = msgspec.Raw(b"null")
    payloadRef: Reference | None = None
    #: Only between ingress and activator; nodes never see it.
    replySubject: str = ""
    #: Ours: whose it is. Subjects say it too, but only this is used.
    projectID: str = ""


class WorkerDispatchMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt for one worker. `token` is secret between activator and sidecar: whoever has it may answer."""

    version: str
    invocationID: str
    serverlessRequestID: str
    mode: Mode
    state: State
    contentType: str
    resultSubject: str
    metricsSubject: str
    workerName: str
    workerNamespace: str
    dispatchedAt: Time
    #: How long the handler may take. It counts from when the handler is called.
    timeoutSeconds: float
    projectID: str
    attempt: int
    token: str
    headers: dict[str, str] = {}
    attributes: dict[str, str] = {}
    payload: msgspec.Raw = msgspec.Raw(b"null")
    #: Too large for a message: fetched from the gateway with the attempt's token (`ATTEMPTS_PATH`). Without a key it is
    #: kept with the invocation.
    payloadRef: Reference | None = None


class InvocationResultMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an attempt ended. Committed only if the token is that of the current attempt."""

    version: str
    invocationID: str
    serverlessRequestID: str
    mode: Mode
    state: State
    workerName: str
    workerNamespace: str
    statusCode: Annotated[int, Meta(ge=100, le=599)]
    startedAt: Time
    completedAt: Time
    projectID: str
    attempt: int
    token: str
    contentType: str = "application/json"
    headers: Annotated[dict[str, str], Meta(max_length=HEADERS_MAX)] = {}
    #: JSON as it is; other content types as a JSON string, in base64 where `encoding` says so.
    body: msgspec.Raw = msgspec.Raw(b"null")
    bodyRef: Reference | None = None
    #: Of the body's bytes as they stand in this message.
    bodySHA256: str = ""
    encoding: str = ""
    failureClass: FailureClass | None = None
    error: str = ""
    #: The exception's name, for `retry_for`; and the tenant's own traceback, shown to the tenant only.
    errorType: str = ""
    traceback: str = ""
    #: What the handler took, measured by the sidecar.
    durationMs: Annotated[int, Meta(ge=0, le=10**10)] = 0


class WorkerMetricMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sidecar's report about one worker."""

    version: str
    serverlessRequestID: str
    workerName: str
    workerNamespace: str
    eventType: MetricType
    reportedAt: Time
    inflight: Annotated[int, Meta(ge=0, le=100_000)] = 0
    invocationID: str = ""
    statusCode: int = 0
    error: str = ""
    #: Ours: proves the worker (its MAC key, `metric_proof`), and which attempts it has, for comparison with the rows.
    proof: str = ""
    projectID: str = ""
    attempts: Annotated[list[tuple[str, int]], Meta(max_length=ATTEMPTS_MAX)] = []


class OutputKind(StrEnum):
    """What a handler says before it ends."""

    STDOUT = "stdout"
    STDERR = "stderr"
    PROGRESS = "progress"
    CHUNK = "chunk"


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One piece. `text` is a line, a progress report or a chunk (both in JSON); `seq` counts within the attempt."""

    seq: Annotated[int, Meta(ge=0, le=10**9)]
    kind: OutputKind
    text: Annotated[str, Meta(max_length=INLINE_BYTES_MAX)]
    at: Time


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Ours: what handlers said, in order, for the one who follows."""

    version: str
    projectID: str
    invocationID: str
    workerName: str
    attempt: int
    token: str
    items: Annotated[list[Output], Meta(max_length=1000)]


CallId: TypeAlias = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
CallType: TypeAlias = Annotated[str, Meta(pattern="^[ -~]{1,255}$")]
CallTimeout: TypeAlias = Annotated[float, Meta(ge=0, le=TIMEOUT_S_MAX)]


class CallMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ours: a handler calls another function of its project. Sent again until it is answered; the answer is
    `CallAnswer`, at once for `async`, when the call ended for `sync` (published to the worker's own answers subject,
    never to a reply field)."""

    version: str
    projectID: str
    invocationID: str
    workerName: str
    token: str
    call: CallId
    function: str
    mode: Mode
    contentType: CallType = "application/json"
    payload: msgspec.Raw = msgspec.Raw(b"null")
    timeoutSeconds: CallTimeout = 0


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a call. With a MAC under the worker's key, like a dispatch."""

    call: str
    invocationID: str
    state: State
    statusCode: int = 0
    contentType: str = "application/json"
    body: msgspec.Raw = msgspec.Raw(b"null")
    encoding: str = ""
    bodyRef: Reference | None = None
    failureClass: str = ""
    error: str = ""
    errorType: str = ""
    traceback: str = ""


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Ours: the attempt is not wanted any more; with a MAC like a dispatch. `drain`: take nothing new."""

    version: str
    workerName: str
    cancel: list[tuple[str, int]] = []
    drain: bool = False


class DeadLetterMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What could not be done, with what it was."""

    version: str
    source: str
    state: State
    failureClass: FailureClass
    originalSubject: str
    stream: str
    failedAt: Time
    invocationID: str = ""
    serverlessRequestID: str = ""
    projectID: str = ""
    workerName: str = ""
    consumer: str = ""
    streamSequence: int = 0
    consumerSequence: int = 0
    deliveryCount: int = 0
    error: str = ""
    payload: str = ""


class FrameworkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /invoke` on the framework's socket."""

    version: str
    invocationID: str
    serverlessRequestID: str
    workerName: str
    workerNamespace: str
    mode: Mode
    state: State
    contentType: str
    headers: dict[str, str]
    attributes: dict[str, str]
    payload: msgspec.Raw
    timeoutSeconds: float
    dispatchedAt: Time
    #: Ours.
    attempt: int


class FrameworkReply(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer, with status 2xx. `statusCode` 0 means 200. `encoding` base64 where the body is not JSON or text."""

    statusCode: int = 0
    contentType: str = "application/json"
    headers: dict[str, str] = {}
    body: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    encoding: str = ""
    errorType: str = ""
    traceback: str = ""


class Frame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of an answer of type `FRAMES`: a framework that has something to say before the end sends these, each
    with one field set, the last with `reply`. `POST ANSWER_PATH` brings a `CallAnswer` or an `ObjectAnswer`."""

    stdout: str | None = None
    stderr: str | None = None
    #: Empty when absent: `Raw | None` would take null alone.
    progress: msgspec.Raw = msgspec.Raw()
    chunk: msgspec.Raw = msgspec.Raw()
    call: "FrameCall | None" = None
    object: ObjectAsk | None = None
    reply: FrameworkReply | None = None


class FrameCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A handler's call of another function."""

    call: CallId
    function: str
    mode: Mode = Mode.SYNC
    contentType: CallType = "application/json"
    payload: msgspec.Raw = msgspec.Raw(b"null")
    timeoutSeconds: CallTimeout = 0


FRAMES: Final = "application/x-ndjson"
#: On the framework's socket; ours. Frameworks of other makes need neither: 404 is fine.
ANSWER_PATH: Final = "/answer"
CANCEL_PATH: Final = "/cancel"
#: On the gateway, with the attempt's token as a bearer: `payload`, `result`, `current`, `objects`.
ATTEMPTS_PATH: Final = "/attempts/{project}/{invocation}/"
CALLED_PATH: Final = "calls/{invocation}"

#: Inside a unit.
SOCKET_FOLDER: Final = "/tmp/serverless-framework"  # noqa: S108 (the unit's own, by contract)
SOCKET_NAME: Final = "framework.sock"
INVOKE_PATH: Final = "/invoke"
HEALTH_PATH: Final = "/healthz"


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a caller who waits is told: the activator publishes it to the caller's inbox after the commit."""

    invocationID: str
    serverlessRequestID: str
    mode: Mode
    state: State
    statusCode: int
    contentType: str = "application/json"
    headers: dict[str, str] = {}
    body: msgspec.Raw = msgspec.Raw(b"null")
    encoding: str = ""
    bodyRef: Reference | None = None
    failureClass: str = ""
    workerName: str = ""
    workerNamespace: str = ""
    error: str = ""
    errorType: str = ""
    traceback: str = ""
    startedAt: Time | None = None
    completedAt: Time | None = None
    attempt: int = 0
