"""Processes as the kernel shows them, named by pid and start time: a pid alone may be someone else's by now."""

import asyncio
import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")


def start_time(pid: int) -> int:
    """Clock ticks from boot to the process's start; zero when there is none, or only a zombie."""
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return 0
    fields = stat[stat.rindex(b")") + 2 :].split()
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, started: int) -> bool:
    """Whether that very process runs."""
    return pid > 0 and started > 0 and start_time(pid) == started


def children(pid: int) -> list[int]:
    """The direct children of a process."""
    try:
        return [int(part) for part in (_PROC / str(pid) / "task" / str(pid) / "children").read_bytes().split()]
    except OSError:
        return []


def pid_namespace(pid: int) -> int:
    """The inode of a process's pid namespace; zero when unknown."""
    with suppress(OSError):
        return (_PROC / str(pid) / "ns" / "pid").stat().st_ino
    return 0


def in_pid_namespace(inode: int) -> Iterator[int]:
    """Living processes of that pid namespace, nested ones aside."""
    if not inode:
        return
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and pid_namespace(int(entry.name)) == inode and start_time(int(entry.name)):
            yield int(entry.name)


def with_variable(assignment: str) -> Iterator[int]:
    """Living processes that were started with this environment variable."""
    wanted = assignment.encode()
    for entry in _PROC.iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and wanted in (entry / "environ").read_bytes().split(b"\0")
                and start_time(int(entry.name))
            ):
                yield int(entry.name)


def kill(pid: int, started: int, number: int = signal.SIGKILL) -> None:
    """Signal that very process, never one that took its number."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if alive(pid, started):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


async def ended(pid: int, started: int, *, timeout_s: float) -> bool:
    """Wait until that very process has ended; false when it still runs after the time."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return not alive(pid, started)
    try:
        if not alive(pid, started):
            return True
        return await _readable(handle, timeout_s)
    finally:
        os.close(handle)


async def _readable(descriptor: int, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: done.done() or done.set_result(None))
    try:
        await asyncio.wait_for(done, timeout_s)
    except TimeoutError:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        loop.remove_reader(descriptor)
    return True


class Reaper:
    """Collects children that have ended, by number: others of this process's children are not its business."""

    def __init__(self) -> None:
        self._pids: set[int] = set()

    def add(self, pid: int) -> None:
        """Collect this one when it ends; one that is no child of ours is forgotten."""
        self._pids.add(pid)

    def reap(self) -> None:
        """Collect what has ended."""
        self._pids.discard(0)
        for pid in list(self._pids):
            try:
                collected, _ = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                collected = pid
            if collected:
                self._pids.discard(pid)


def boot_id() -> str:
    """Changes with each boot of the host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
