"""What a node's agent and its sidecar say to one another: msgpack packets on a Unix socket (`SOCK_SEQPACKET`).

    sidecar: Has, Reaches       agent: Serve (with a descriptor) …, Ended …, Keep
    sidecar: Kill, Reaches …    agent: Serve, Ended …

The sidecar listens, the agent connects, and comes back when the connection breaks: it then says all it knows again. A
`Serve` of a unit that the sidecar has is no news; units that a `Keep` does not name are forgotten.
"""

from enum import StrEnum
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from penstock.wire.tasks import Serving, WorkerKeys

#: Below what the kernel takes as one packet by default. A list of `UNITS_MAX` fits.
PACKET_BYTES_MAX: Final = 192 << 10
UNITS_MAX: Final = 4096
_DETAIL_CHARACTERS_MAX: Final = 4096

UnitId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=40)]
UnitIds: TypeAlias = Annotated[list[UnitId], Meta(max_length=UNITS_MAX)]


class ExitClass(StrEnum):
    """How a unit's end is seen from outside."""

    EXITED = "exited"
    KILLED = "killed"
    OOM = "oom"


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve.v1"):
    """A worker: a unit whose framework is to be called. With it comes one descriptor: the folder in which the
    framework makes its socket, as the host sees it. `uid` is whom the framework runs as, as the host sees it;
    `memory_bytes` the unit's limit, for messages."""

    unit_id: UnitId
    uid: Annotated[int, Meta(ge=0, lt=1 << 32)]
    serving: Serving
    keys: WorkerKeys
    memory_bytes: Annotated[int, Meta(ge=0)] = 0


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended.v1"):
    """The unit is no more, and why. Attempts that it had are reported as this says."""

    unit_id: UnitId
    exit_class: ExitClass
    exit_code: int = 0
    detail: Annotated[str, Meta(max_length=_DETAIL_CHARACTERS_MAX)] = ""


class Keep(msgspec.Struct, frozen=True, kw_only=True, tag="keep.v1"):
    """All units that serve, after a reconnect: every other one is forgotten."""

    unit_ids: UnitIds


class Has(msgspec.Struct, frozen=True, kw_only=True, tag="has.v1"):
    """The sidecar's first packet: which units it has."""

    unit_ids: UnitIds


class Reaches(msgspec.Struct, frozen=True, kw_only=True, tag="reaches.v1"):
    """Whether the queue can be reached from this node, when the agent comes and whenever that changes."""

    queue: bool


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag="kill.v1"):
    """The unit's framework does not end what it was told to end: end the unit."""

    unit_id: UnitId
    reason: Annotated[str, Meta(max_length=_DETAIL_CHARACTERS_MAX)]


AgentPacket: TypeAlias = Serve | Ended | Keep
SidecarPacket: TypeAlias = Has | Reaches | Kill
