"""What operators look at: the fleet at a glance, and what is stuck."""

import msgspec

from penstock.wire.rest.states import NodeState
from penstock.wire.times import Time


class GpuCount(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs of one model, and their slots. A GPU is `used` while one of its slots is held, and `unusable` when none of
    its slots can be given out: its node takes no work, or it is not healthy."""

    model: str
    total: int
    used: int
    free: int
    unusable: int
    slots_total: int
    slots_free: int


class NodeLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One node in the overview."""

    id: str
    name: str
    state: NodeState
    simulated: bool
    agent_version: str
    gpus_total: int
    gpus_used: int
    gpus_unusable: int
    slots_total: int
    slots_used: int
    units: int
    heartbeat_age_s: float | None
    release_at: Time | None


class FleetOverview(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet now. `node_list` is cut at the limit that was asked for; the counts are of all."""

    at: Time
    nodes: dict[str, int]
    gpus: list[GpuCount]
    allocations: dict[str, int]
    node_list: list[NodeLoad]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that does not get on by itself, why, and the command that repairs it."""

    kind: str
    id: str
    since: Time | None
    reason: str
    repair: str
