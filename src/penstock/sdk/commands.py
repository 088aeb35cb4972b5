"""A command run inside a unit over the gateway's `/ws/exec/<allocation>`, without any I/O.

The first text frame opens the command. Binary frames carry a channel byte (stdin, stdout, stderr) and data. A text
frame `eof` closes standard input. The server's last text frame says how the command ended, or why there was none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from penstock.sdk.errors import ApiError, BadAnswer, InvalidArgument, for_status
from penstock.sdk.protocol import ANSWER_BYTES_MAX, Steps, call
from penstock.sdk.target import Target
from penstock.wire.rest import Whoami
from penstock.wire.unreadable import UNREADABLE

EOF_FRAME: Final = '{"type":"eof"}'

#: What a refusal's code stands for; codes may have a group before the last dot.
_STATUS: Final[dict[str, int]] = {
    "invalid_request": 400,
    "not_runnable": 400,
    "unauthenticated": 401,
    "permission_denied": 403,
    "origin_refused": 403,
    "not_found": 404,
    "conflict": 409,
    "not_active": 409,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to run: an argument list, never a shell line."""

    allocation_id: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str = ""
    stdin: bytes = b""

    def opening(self) -> str:
        """The first frame."""
        return msgspec.json.encode({"argv": list(self.argv), "env": dict(self.env), "cwd": self.cwd}).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """How a command ended and what it wrote."""

    exit_code: int
    exit_class: str
    stdout: bytes
    stderr: bytes


def with_gateway(target: Target) -> Steps[Target]:
    """The target with the gateway's address. The api is asked for it where nobody gave one."""
    if target.gateway_url:
        return target
    me = yield from call("GET", "/whoami", Whoami)
    try:
        return target.with_gateway(me.gateway_url)
    except InvalidArgument as error:
        raise BadAnswer(f"the api names no usable gateway: {error.message}") from error


class Collected:
    """The output of a command, held in memory up to the limit of any answer."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytes]] = {}
        self._size = 0

    def add(self, channel: int, data: bytes) -> None:
        """Keep more of it."""
        self._size += len(data)
        if self._size > ANSWER_BYTES_MAX:
            raise BadAnswer(f"the command wrote more than {ANSWER_BYTES_MAX >> 20} MB")
        self._parts.setdefault(channel, []).append(data)

    def bytes(self, channel: int) -> bytes:
        """Everything on one channel."""
        return b"".join(self._parts.get(channel, []))


class Exit(msgspec.Struct, frozen=True, tag="exit"):
    """The command ended."""

    code: int
    exit_class: str = msgspec.field(name="class", default="exited")


class Refused(msgspec.Struct, frozen=True, tag="error"):
    """There was no command, or it was lost."""

    code: str
    message: str
    field: str | None = None
    correlation_id: str | None = None

    def error(self) -> ApiError:
        """The same as a call's error."""
        status = _STATUS.get(self.code.rpartition(".")[2], 502)
        return for_status(status)(
            self.message, code=self.code, field=self.field, correlation_id=self.correlation_id, status=status
        )


LastFrame: TypeAlias = Exit | Refused


def ending(text: str) -> Exit:
    """How the command ended, by the server's text frame."""
    try:
        frame = msgspec.json.decode(text, type=LastFrame)
    except UNREADABLE as error:
        raise BadAnswer(f"the gateway sent a frame that is not as agreed: {error}") from error
    if isinstance(frame, Refused):
        raise frame.error()
    return frame
