"""The node link: msgpack frames on a WebSocket that the agent opens over mTLS (`GET /link`).

    gateway: Challenge          agent: Hello (echoes the nonce)
    gateway: Welcome            agent: Ask, Heartbeat, TaskResult, LogLines …
    gateway: Tasks, HeartbeatAck, ResultAck, Refused …

The agent asks for tasks; the gateway answers when there are some, never more than were asked for.
"""

from datetime import datetime
from enum import IntEnum, StrEnum
from typing import Final, TypeAlias

import msgspec

from penstock.wire.tasks import Gpu, Inventory, Outcome, SignedTask

PROTOCOL_VERSIONS: Final = (1,)
#: Larger frames close the socket with 1009.
FRAME_BYTES_MAX: Final = 4 << 20
LOG_LINE_BYTES_MAX: Final = 64 << 10


class Close(IntEnum):
    """Close codes of the link and the tunnel."""

    MALFORMED = 4400
    UNAUTHENTICATED = 4401
    IDENTITY_MISMATCH = 4403
    SUPERSEDED = 4409
    UNSUPPORTED_VERSION = 4426
    RESTARTING = 1012
    BUSY = 1013
    TOO_BIG = 1009


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag="challenge.v1"):
    """First frame: the agent must echo the nonce in its hello."""

    nonce: str
    protocol_versions: tuple[int, ...] = PROTOCOL_VERSIONS


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello.v1"):
    """Who connects and what it has. `boot_id` changes with each boot of the host. `serves_functions`: units may be
    functions' workers there."""

    protocol_version: int
    node_id: str
    nonce: str
    agent_version: str
    boot_id: str
    inventory: Inventory
    production: bool
    serves_functions: bool = False


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome.v1"):
    """The link stands. The agent counts its deadlines from `server_time`, never from its own wall clock. Should all
    links of this gateway break at once, they come back over `spread_s`."""

    gateway_id: str
    server_time: datetime
    heartbeat_s: float
    slots_approved: int
    spread_s: float = 0.0


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask.v1"):
    """Ready for this many tasks in all that are not yet answered."""

    count: int


class Tasks(msgspec.Struct, frozen=True, kw_only=True, tag="tasks.v1"):
    """Tasks for this node."""

    tasks: list[SignedTask]


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, tag="result.v1"):
    """How a task ended; sent again until acknowledged. `error_code` as in `refused`: bad_signature, expired,
    wrong_node, unknown_type, stale_fence, malformed, reserved_env; or the failure's class."""

    task_id: str
    fence: int
    outcome: Outcome
    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    error_code: str = ""
    detail: str = ""


class ResultVerdict(StrEnum):
    """What became of a result."""

    APPLIED = "applied"
    DUPLICATE = "duplicate"
    STALE_GENERATION = "stale_generation"
    UNKNOWN_TASK = "unknown_task"


class ResultAck(msgspec.Struct, frozen=True, kw_only=True, tag="result_ack.v1"):
    """The gateway has committed (or refused) the result; the agent forgets it."""

    task_id: str
    verdict: ResultVerdict


class UnitState(StrEnum):
    """A unit as the agent sees it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    EXITED = "exited"


class UnitReport(msgspec.Struct, frozen=True, kw_only=True):
    """One unit on the node. `exit_class` when exited: exited, killed, oom."""

    unit_id: str
    state: UnitState
    exit_code: int | None = None
    exit_class: str = ""


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's health. `failed`: a fault of its own, after which it needs proof that it works; otherwise one that is
    not healthy only gets no new work until it is."""

    uuid: str
    healthy: bool
    detail: str = ""
    failed: bool = False


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """What the sensors of a whole GPU showed. None where it has no such sensor. Memory errors are counted since the
    driver was loaded, faults (XIDs of the hardware) since the agent started."""

    uuid: str
    temperature_c: int | None = None
    power_w: float | None = None
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    faults: int = 0


TROUBLE_CHARS_MAX: Final = 300


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat.v1"):
    """Sent every `heartbeat_s`. The complete list of units and GPUs; the readings change with each, the rest seldom.
    `serves_functions` as in the hello. `trouble` says why the node begins nothing new, such as a full disk."""

    sent_at: datetime
    units: list[UnitReport]
    gpus: list[GpuReport]
    readings: list[GpuReading] = []
    serves_functions: bool = False
    trouble: str = ""


class HeartbeatAck(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat_ack.v1"):
    """Seen. `spread_s` as in the welcome, as the number of links has changed since."""

    server_time: datetime
    spread_s: float = 0.0


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a unit's output. Longer lines are split and flagged; bytes that are not UTF-8 are replaced."""

    unit_id: str
    stream: str
    at: datetime
    text: str
    split: bool = False
    lossy: bool = False


class LogLines(msgspec.Struct, frozen=True, kw_only=True, tag="logs.v1"):
    """Output of units."""

    lines: list[LogLine]


class SecretsAsk(msgspec.Struct, frozen=True, kw_only=True, tag="secrets_ask.v1"):
    """The agent is about to act on a task that names secrets, and needs their values."""

    task_id: str


class SecretValues(msgspec.Struct, frozen=True, kw_only=True, tag="secret_values.v1"):
    """The values by name, or why there are none. They are never stored by the agent."""

    task_id: str
    values: dict[str, bytes] = {}
    error: str = ""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused.v1"):
    """Something the other side sent was not applied. In place of a welcome: `busy`, come back in `retry_after_s`."""

    code: str
    detail: str
    retry_after_s: float = 0.0


FromGateway: TypeAlias = Challenge | Welcome | Tasks | ResultAck | HeartbeatAck | SecretValues | Refused
FromAgent: TypeAlias = Hello | Ask | TaskResult | Heartbeat | LogLines | SecretsAsk

__all__ = [
    "FRAME_BYTES_MAX",
    "LOG_LINE_BYTES_MAX",
    "PROTOCOL_VERSIONS",
    "Ask",
    "Challenge",
    "Close",
    "FromAgent",
    "FromGateway",
    "Gpu",
    "GpuReading",
    "GpuReport",
    "Heartbeat",
    "HeartbeatAck",
    "Hello",
    "LogLine",
    "LogLines",
    "Refused",
    "ResultAck",
    "ResultVerdict",
    "SecretValues",
    "SecretsAsk",
    "TaskResult",
    "Tasks",
    "UnitReport",
    "UnitState",
    "Welcome",
]
