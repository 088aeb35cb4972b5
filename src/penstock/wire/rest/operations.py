"""What operators look at: the fleet at a glance, and what is stuck."""

import msgspec

from penstock.wire.rest.states import NodeState
from penstock.wire.times import Time


class GpuCount(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs, or shares of them, of one model. `unusable` ones are on nodes that take no work, or not healthy."""

    model: str
    total: int
    used: int
    free: int
    unusable: int


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
