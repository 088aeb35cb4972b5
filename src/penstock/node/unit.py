"""One unit in memory, the commands in it, and what a unit may be asked for."""

import asyncio
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.node import cgroups
from penstock.node.control import Control, Ending
from penstock.node.errors import Refused, Unlinked
from penstock.node.journal import UnitRecord
from penstock.node.logs import Lines
from penstock.wire.tasks import RESERVED_ENV_PREFIXES, UnitStart
from penstock.wire.tunnel import ExecExit

_UNIT_ID: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Execution:
    """A command that runs in a unit."""

    def __init__(self, unit: "Unit", name: str, ending: asyncio.Future[Ending]) -> None:
        self._unit = unit
        self._name = name
        self._ending = ending
        self._ooms = unit.ooms()

    async def wait(self) -> ExecExit:
        """How it ended; a unit that ends takes its commands with it."""
        try:
            ending = await asyncio.shield(self._ending)
        except Unlinked:
            ending = Ending(128 + signal.SIGKILL, signalled=True)
        return self._unit.classify(ending, self._ooms)

    def kill(self) -> None:
        """Kill it and what it started; already ended is fine."""
        if self._unit.control is not None:
            self._unit.control.kill(self._name, signal.SIGKILL)


class Unit:
    """One unit in memory: its record, and the connection to its init while there is one."""

    def __init__(self, record: UnitRecord) -> None:
        self.record = record
        self.control: Control | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.lines: dict[str, Lines] = {}

    def ooms(self) -> int:
        """How often the kernel has killed in this unit for want of memory."""
        return cgroups.oom_kills([Path(group) for group in self.record.groups])

    def classify(self, ending: Ending, ooms_before: int = 0) -> ExecExit:
        """137 is a kill even when a shell only passes the number on; it was for want of memory if the kernel counted
        one."""
        killed = ending.signalled or ending.code == 128 + signal.SIGKILL
        out_of_memory = ending.code == 128 + signal.SIGKILL and self.ooms() > ooms_before
        kind = "oom" if out_of_memory else "killed" if killed else "exited"
        return ExecExit(code=ending.code, exit_class=kind)


def check_start(request: UnitStart) -> None:
    """Refuse what must never be acted on: a name that is no folder's, or variables that steer loader or driver."""
    check_unit_id(request.unit_id)
    check_env(request.env)


def check_unit_id(unit_id: str) -> None:
    """A unit's id names its folder and its groups, so it must not lead anywhere else."""
    if _UNIT_ID.fullmatch(unit_id) is None:
        raise Refused("malformed", "unit_id must be lower-case letters, digits, _ and -, at most 64")


def check_env(env: Mapping[str, str]) -> None:
    """Refuse reserved and malformed names."""
    for name in env:
        if name.startswith(RESERVED_ENV_PREFIXES):
            raise Refused("reserved_env", f"the variable {name} is reserved")
        if _VARIABLE.fullmatch(name) is None:
            raise Refused("malformed", f"{name!r} is not a variable's name")
