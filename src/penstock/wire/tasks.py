"""Typed node tasks: what a node may be asked to do, and what it answers. No raw shell: commands are argument lists.

A task travels as `SignedTask`: the exact bytes of a `TaskBody` with an Ed25519 signature over them. The agent verifies
the bytes before it decodes them, and looks the type up in `PARAMS`; a type that is absent is refused.
"""

from datetime import datetime
from enum import StrEnum
from typing import Final

import msgspec


class TaskBody(msgspec.Struct, frozen=True, kw_only=True):
    """What is signed. `fence` is the allocation's: an agent refuses a task under a lower one than it has seen."""

    task_id: str
    node_id: str
    type: str
    allocation_id: str | None
    fence: int
    expires_at: datetime
    correlation_id: str
    params: msgspec.Raw


class SignedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task on its way to a node."""

    body: bytes
    key_id: str
    signature: bytes


class Outcome(StrEnum):
    """How a task ended. Refused means: without any side effect."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a unit may use at most."""

    memory_bytes: int
    processes_max: int
    cpus: float
    scratch_bytes: int


class SecretRef(msgspec.Struct, frozen=True, kw_only=True):
    """A secret that a unit gets as the file /run/secrets/<name> and, if `env` is set, as that variable.

    Only the reference travels in the task, which is stored; the agent asks for the value over its link (`SecretsAsk`).
    """

    name: str
    version: int
    env: str = ""


class RuntimeLock(msgspec.Struct, frozen=True, kw_only=True):
    """An interpreter environment: the packages of a lock file with hashes, on top of a base image of the node.

    `digest` is the SHA-256 of base and lock, in hexadecimal: it names the environment on the node. The lock is in its
    normal form and packed (`wire.locks`).
    """

    digest: str
    base: str
    lock: bytes


#: Error code of a start: the function's code archive cannot be used, on this node as on any other.
BAD_CODE: Final = "bad_code"


def is_bad_code(reason: str) -> bool:
    """Whether a unit did not start for that, by the reason of its end."""
    return f"{BAD_CODE}: " in reason


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """A tar.gz archive of a function's code, which the agent fetches from the gateway over mTLS and keeps by digest."""

    sha256: str
    bytes: int


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a unit a function's worker: the sidecar calls the framework that listens in it.

    The keys (`WorkerKeys`) come with the values of secrets, under the name `WORKER_KEYS`. With `framework`, the
    platform's own framework is the unit's command, and runs `handler` (`module:name`) of the code; without a handler it
    answers with what it was given.
    """

    worker: str
    project_id: str
    function: str
    #: The function's name in subjects.
    request: str
    slots: int
    socket: str
    invoke_path: str
    health_path: str
    #: How long the framework may take to become healthy.
    ready_s: float
    framework: bool
    handler: str = ""
    code: Code | None = None


class WorkerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's sidecar proves itself with to NATS, and knows dispatches by."""

    token: str
    mac_key: bytes


WORKER_KEYS: Final = ".worker"


class RuntimeBuild(msgspec.Struct, frozen=True, kw_only=True):
    """Build an environment, unless it is there already. Answer: `RuntimeBuilt`."""

    runtime: RuntimeLock


class RuntimeBuilt(msgspec.Struct, frozen=True, kw_only=True):
    """It can be used: a `UnitStart` names it by its digest."""

    digest: str
    bytes: int
    seconds: float


class RuntimeResolve(msgspec.Struct, frozen=True, kw_only=True):
    """Resolve requirements (`wire.requirements`, normal form) to a lock for a base image. Answer: `RuntimeResolved`."""

    base: str
    requirements: str


class RuntimeResolved(msgspec.Struct, frozen=True, kw_only=True):
    """The lock, in its normal form and packed (`wire.locks`), and the version of Python that it is for."""

    lock: bytes
    python: str
    seconds: float


class UnitStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start a sandboxed unit and answer when its init is ready. Answer: `UnitStarted`.

    A `stock` unit has no tenant yet: it waits for its `UnitHandoff` with the runtime imported. `runtime` is the digest
    of a built environment, or empty for the image's own. `egress` are the rules of `wire.egress`; empty means none.
    """

    unit_id: str
    image: str
    gpu_uuids: list[str]
    limits: Limits
    allocation_id: str = ""
    stock: bool = False
    runtime: str = ""
    env: dict[str, str] = {}
    command: list[str] = []
    secrets: list[SecretRef] = []
    egress: list[str] = []
    serving: Serving | None = None


class UnitHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """Give a stock unit to its one tenant. Answer: `UnitStarted`.

    Idempotent by allocation: a repeat for the same one succeeds, any other is refused with `taken`.
    """

    unit_id: str
    allocation_id: str
    env: dict[str, str] = {}
    command: list[str] = []
    secrets: list[SecretRef] = []
    egress: list[str] = []
    serving: Serving | None = None


class UnitStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The unit runs."""

    unit_id: str
    pid: int
    adopted: bool = False


class UnitStop(msgspec.Struct, frozen=True, kw_only=True):
    """Stop a unit (absent is fine) and prove that nothing of it is left. Answer: `CleanupProof`.

    With `allocation_id`, a stock unit that was handed to another allocation is left alone: refused with `taken`.
    """

    unit_id: str
    gpu_uuids: list[str]
    grace_s: float = 5.0
    allocation_id: str = ""


class CleanupProof(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent saw after the stop. A slot is reused only if `clean`."""

    unit_id: str
    processes_gone: bool
    cgroup_empty: bool
    scratch_deleted: bool
    gpu_idle: bool
    memory_scrubbed: bool
    simulated: bool
    detail: str = ""

    @property
    def clean(self) -> bool:
        """Everything was proved."""
        return (
            self.processes_gone
            and self.cgroup_empty
            and self.scratch_deleted
            and self.gpu_idle
            and self.memory_scrubbed
        )


class TopologyDiscover(msgspec.Struct, frozen=True, kw_only=True):
    """Look at the GPUs again. Answer: `Inventory`."""


class GpuKind(StrEnum):
    """How much of a GPU a slot is."""

    WHOLE = "gpu"
    MIG = "mig"
    MPS = "mps"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or a share of one, as a place for one unit.

    A share names the GPU that it is part of (`parent_uuid`), and its own size: the MIG `profile` (such as 1g.10gb), or
    for MPS the part of the GPU's threads; `memory_bytes` is always what the unit may use. GPUs that reach one another
    by NVLink, directly or not, have the same `nvlink_domain`.
    """

    uuid: str
    index: int
    model: str
    memory_bytes: int
    pci_address: str = ""
    numa_node: int = -1
    kind: GpuKind = GpuKind.WHOLE
    parent_uuid: str = ""
    profile: str = ""
    threads_percent: int = 100
    nvlink_domain: str = ""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has. `simulated` is shown wherever the inventory is."""

    gpus: list[Gpu]
    simulated: bool
    driver_version: str = ""


class HealthProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Check that the node can sandbox, and how full it is. Answer: `HealthReport`."""


class HealthReport(msgspec.Struct, frozen=True, kw_only=True):
    """The node's own view."""

    sandbox: str
    units: list[str]
    disk_free_bytes: int
    memory_free_bytes: int


class GpuProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Prove that a quarantined GPU works again: it answers, has no pending errors, and its memory can be written and
    read. Answer: `GpuProbed`."""

    gpu_uuid: str


class GpuProbed(msgspec.Struct, frozen=True, kw_only=True):
    """What the probe found."""

    gpu_uuid: str
    passed: bool
    detail: str = ""


TOPOLOGY_DISCOVER: Final = "topology.discover"
UNIT_START: Final = "unit.start"
UNIT_HANDOFF: Final = "unit.handoff"
UNIT_STOP: Final = "unit.stop"
RUNTIME_BUILD: Final = "runtime.build"
RUNTIME_RESOLVE: Final = "runtime.resolve"
#: Resolutions that a node works on at once.
RESOLUTIONS_MAX: Final = 2
GPU_PROBE: Final = "gpu.probe"
HEALTH_PROBE: Final = "health.probe"

#: The catalogue: type → (parameters, answer).
PARAMS: Final[dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]]] = {
    TOPOLOGY_DISCOVER: (TopologyDiscover, Inventory),
    UNIT_START: (UnitStart, UnitStarted),
    UNIT_HANDOFF: (UnitHandoff, UnitStarted),
    UNIT_STOP: (UnitStop, CleanupProof),
    RUNTIME_BUILD: (RuntimeBuild, RuntimeBuilt),
    RUNTIME_RESOLVE: (RuntimeResolve, RuntimeResolved),
    GPU_PROBE: (GpuProbe, GpuProbed),
    HEALTH_PROBE: (HealthProbe, HealthReport),
}

#: Names that a tenant may not set: they steer the loader, the driver or the platform.
RESERVED_ENV_PREFIXES: Final = ("LD_", "NVIDIA_", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_", "PENSTOCK_")
