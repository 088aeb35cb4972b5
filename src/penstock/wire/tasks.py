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


class UnitStart(msgspec.Struct, frozen=True, kw_only=True):
    """Start a sandboxed unit and answer when its init is ready. Answer: `UnitStarted`."""

    unit_id: str
    image: str
    gpu_uuids: list[str]
    limits: Limits
    env: dict[str, str] = {}
    command: list[str] = []


class UnitStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The unit runs."""

    unit_id: str
    pid: int
    adopted: bool = False


class UnitStop(msgspec.Struct, frozen=True, kw_only=True):
    """Stop a unit (absent is fine) and prove that nothing of it is left. Answer: `CleanupProof`."""

    unit_id: str
    gpu_uuids: list[str]
    grace_s: float = 5.0


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


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as the node sees it."""

    uuid: str
    index: int
    model: str
    memory_bytes: int
    pci_address: str = ""
    numa_node: int = -1


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


TOPOLOGY_DISCOVER: Final = "topology.discover"
UNIT_START: Final = "unit.start"
UNIT_STOP: Final = "unit.stop"
HEALTH_PROBE: Final = "health.probe"

#: The catalogue: type → (parameters, answer).
PARAMS: Final[dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]]] = {
    TOPOLOGY_DISCOVER: (TopologyDiscover, Inventory),
    UNIT_START: (UnitStart, UnitStarted),
    UNIT_STOP: (UnitStop, CleanupProof),
    HEALTH_PROBE: (HealthProbe, HealthReport),
}

#: Names that a tenant may not set: they steer the loader, the driver or the platform.
RESERVED_ENV_PREFIXES: Final = ("LD_", "NVIDIA_", "CUDA_VISIBLE_DEVICES", "PENSTOCK_")
