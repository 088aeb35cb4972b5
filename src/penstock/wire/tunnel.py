"""Tunnel frames: many byte streams over one socket that the node opened (`GET /tunnel` over mTLS).

A stream leads to a TCP port inside a unit or to a command run in it. The agent only moves bytes: HTTP and WebSocket are
spoken end to end by the gateway and the unit's own server. Flow control is by credit: a side may send `window` bytes,
then waits for `Credit`. One WebSocket message is a msgpack array of frames: a tick's small ones travel together.
"""

from typing import Final, TypeAlias

import msgspec

#: What a side may send on a new stream before it gets credit.
WINDOW_BYTES: Final = 1 << 20
#: The largest payload of one data frame.
DATA_BYTES_MAX: Final = 128 << 10
FRAME_BYTES_MAX: Final = 1 << 20
STREAMS_MAX: Final = 4096

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2
#: Carries one msgpack `ExecExit`, last.
CONTROL: Final = 3


class UnitPort(msgspec.Struct, frozen=True, kw_only=True, tag="port.v1"):
    """A TCP port on the unit's own loopback."""

    unit_id: str
    port: int


class UnitExec(msgspec.Struct, frozen=True, kw_only=True, tag="exec.v1"):
    """A command in the unit. Data on STDIN goes in, on STDOUT and STDERR comes out, then CONTROL says how it ended.
    `End` from the opener closes its standard input; `Abort` kills it."""

    unit_id: str
    argv: list[str]
    env: dict[str, str] = {}
    cwd: str = ""


Target: TypeAlias = UnitPort | UnitExec


class ExecExit(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended: its code (128 + signal when killed) and a class: exited, killed, oom."""

    code: int
    exit_class: str


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Start a stream. `node_id` tells a peer gateway where to; empty on a node's own tunnel."""

    stream: int
    target: Target
    node_id: str = ""


class Data(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Bytes on a channel of a stream."""

    stream: int
    channel: int
    payload: bytes


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The receiver consumed this many bytes."""

    stream: int
    bytes: int


class End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """No more data from this side."""

    stream: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The stream is over for both. Codes: refused (nothing listens), no_unit, no_node, lost, cancelled, protocol,
    exhausted (a limit of the tunnel)."""

    stream: int
    code: str
    detail: str = ""


Frame: TypeAlias = Open | Data | Credit | End | Abort
