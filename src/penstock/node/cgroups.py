"""Limits on memory, processes and CPU by control groups, version 1 or 2, wherever this process may make some.

Each unit gets a group of its own below the agent's. What cannot be limited this way is said by `Groups.limits`, so that
rlimits take its place.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.wire.tasks import Limits

_MOUNT: Final = Path("/sys/fs/cgroup")
_CONTROLLERS: Final = ("memory", "pids", "cpu")
_PERIOD_US: Final = 100_000
_REMOVE_TRIES: Final = 50


@dataclass(frozen=True)
class Groups:
    """Where groups can be made: one folder that holds all controllers (v2), or one per controller (v1)."""

    bases: dict[str, Path]
    version: int

    @property
    def limits(self) -> frozenset[str]:
        """The controllers that work here."""
        return frozenset(self.bases)

    def folders(self, unit_id: str) -> list[Path]:
        """The unit's groups, whether or not they exist."""
        return list(dict.fromkeys(base / f"penstock-{unit_id}" for base in self.bases.values()))

    def make(self, unit_id: str, limits: Limits) -> list[Path]:
        """Make the unit's groups with its limits."""
        folders = self.folders(unit_id)
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for controller, base in self.bases.items():
            for name, value in _settings(self.version, controller, limits):
                with suppress(FileNotFoundError):
                    (base / f"penstock-{unit_id}" / name).write_text(value)
        return folders


def _settings(version: int, controller: str, limits: Limits) -> list[tuple[str, str]]:
    quota = str(max(1000, int(limits.cpus * _PERIOD_US)))
    memory, processes = str(limits.memory_bytes), str(limits.processes_max)
    if version == 2:
        return {
            "memory": [("memory.max", memory), ("memory.swap.max", "0")],
            "pids": [("pids.max", processes)],
            "cpu": [("cpu.max", f"{quota} {_PERIOD_US}")],
        }[controller]
    return {
        "memory": [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)],
        "pids": [("pids.max", processes)],
        "cpu": [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", quota)],
    }[controller]


def join(folders: list[Path], pid: int) -> None:
    """Move a process, which has no children yet, into the groups."""
    for folder in folders:
        (folder / "cgroup.procs").write_text(str(pid))


def members(folders: list[Path]) -> set[int]:
    """All processes in the groups."""
    found: set[int] = set()
    for folder in folders:
        with suppress(OSError):
            found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return found


def oom_kills(folders: list[Path]) -> int:
    """How often the kernel killed something in the group for want of memory."""
    for folder in folders:
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                for line in (folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
    return 0


async def remove(folders: list[Path]) -> bool:
    """Remove empty groups; whether all are gone. The kernel empties a group a moment after its last process."""
    for _ in range(_REMOVE_TRIES):
        for folder in folders:
            with suppress(FileNotFoundError, OSError):
                folder.rmdir()
        if not any(folder.exists() for folder in folders):
            return True
        await asyncio.sleep(0.02)
    return False


def find(mount: Path = _MOUNT, own: str = "/proc/self/cgroup") -> Groups:
    """The groups that this process may make children of."""
    try:
        lines = [line.split(":", 2) for line in Path(own).read_text().splitlines()]
    except OSError:
        return Groups({}, 2)
    unified = next((path for number, _, path in lines if number == "0"), None)
    if unified is not None and (mount / "cgroup.controllers").exists():
        return Groups(_version_2(mount / unified.lstrip("/")), 2)
    return Groups(_version_1(mount, lines), 1)


def _version_1(mount: Path, lines: list[list[str]]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for _, names, path in lines:
        for controller in set(names.split(",")) & set(_CONTROLLERS):
            base = mount / names / path.lstrip("/")
            base = base if base.exists() else mount / controller / path.lstrip("/")
            if os.access(base, os.W_OK):
                found[controller] = base
    return found


def _version_2(own: Path) -> dict[str, Path]:
    """Version 2 lets only groups without processes of their own hand controllers down: the agent moves into a leaf."""
    try:
        offered = set((own / "cgroup.controllers").read_text().split()) & set(_CONTROLLERS)
        if not offered or not os.access(own, os.W_OK):
            return {}
        given = set((own / "cgroup.subtree_control").read_text().split())
        if not offered <= given:
            leaf = own / "penstock-agent"
            leaf.mkdir(exist_ok=True)
            for pid in members([own]):
                (leaf / "cgroup.procs").write_text(str(pid))
            (own / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(offered)))
    except OSError:
        return {}
    return dict.fromkeys(sorted(offered), own)
