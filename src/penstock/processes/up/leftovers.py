"""Finds what an install left running: processes by the mark in their environment, units by the node's journal."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.node import cleanup
from penstock.node.journal import Journal
from penstock.processes.up.folder import DataFolder

MARK: Final = "PENSTOCK_SUPERVISED"
_POLL_S: Final = 0.05


def mark(folder: Path) -> dict[str, str]:
    """What to add to a child's environment."""
    return {MARK: str(folder)}


def marked(folder: Path) -> Iterator[int]:
    """The living processes of this install, other than this one."""
    wanted = f"{MARK}={folder}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0") and not _dead(entry):
                yield pid


async def clear(folder: Path, *, grace_s: float) -> list[int]:
    """Wait for them to end by themselves, then kill what is left; the pids that had to be killed."""
    for _ in range(int(grace_s / _POLL_S)):
        if not any(marked(folder)):
            return []
        await asyncio.sleep(_POLL_S)
    left = list(marked(folder))
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return left


async def end_units(folder: DataFolder) -> int:
    """Kill the units that an agent left, which no longer runs; how many there were. The next agent clears up."""
    file = folder.node / "journal.db"
    if not file.exists():
        return 0
    journal = await asyncio.to_thread(Journal, file)
    try:
        left = [record for record in await journal.units() if cleanup.processes(record)]
        await asyncio.gather(*(cleanup.kill_all(record) for record in left))
    finally:
        await asyncio.to_thread(journal.close)
    return len(left)


def _dead(entry: Path) -> bool:
    """Ended and not yet collected by its parent."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("Z", "X")
