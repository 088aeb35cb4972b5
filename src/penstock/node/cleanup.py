"""Ending a unit and proving that nothing of it is left: no process, no control group, no file, nothing on its GPUs."""

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from penstock.node import cgroups, procfs
from penstock.node.inventory import Inventory
from penstock.node.journal import UnitRecord
from penstock.wire.tasks import CleanupProof

_KILL_TIMEOUT_S: Final = 5.0
_DELETE_TIMEOUT_S: Final = 120.0


def processes(record: UnitRecord) -> set[int]:
    """Every living process of the unit that can be found, by each way of finding them."""
    if record.boot_id != procfs.boot_id():
        return set()
    known = ((record.pid, record.started), (record.init_pid, record.init_started))
    found = {pid for pid, started in known if procfs.alive(pid, started)}
    if record.isolated:
        # An agent may have died between the go and noting init's pid.
        for pid in procfs.children(record.pid) if procfs.alive(record.pid, record.started) else []:
            found.add(pid)
        # Only while its init lives: the kernel empties a namespace before its init is gone, and then gives the
        # namespace's number to the next one, which may be another tenant's.
        if procfs.alive(record.init_pid, record.init_started):
            found.update(procfs.in_pid_namespace(record.pid_namespace))
    else:
        found.update(procfs.with_variable(f"PENSTOCK_UNIT={record.unit_id}"))
    groups = cgroups.members([Path(folder) for folder in record.groups])
    return found | {pid for pid in groups if procfs.start_time(pid)}


def find_init(record: UnitRecord) -> int:
    """The pid of a unit's init when the agent died before it could note it."""
    inside = procfs.children(record.pid) if record.isolated else []
    return inside[0] if inside else record.pid


async def kill_all(record: UnitRecord) -> bool:
    """Kill until nothing is found any more; whether that was reached."""
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while found := await asyncio.to_thread(processes, record):
        if time.monotonic() >= deadline:
            return False
        for pid in found:
            procfs.kill(pid, procfs.start_time(pid))
        await asyncio.sleep(0.01)
    return True


async def delete(folder: Path) -> bool:
    """Delete a unit's folder, however deep or odd its tenant made it; whether it is gone."""
    if not folder.exists():
        return True
    for argv in (
        ["rm", "-rf", "--one-file-system", "--", str(folder)],
        # A tenant of our own user may have taken permissions away from folders.
        ["chmod", "-R", "u+rwX", "--", str(folder)],
        ["rm", "-rf", "--one-file-system", "--", str(folder)],
    ):
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            await asyncio.wait_for(process.wait(), _DELETE_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()
            return False
        if not folder.exists():
            return True
    return False


async def prove(
    record: UnitRecord,
    *,
    folder: Path,
    inventory: Inventory,
    gpu_uuids: Sequence[str],
    give_back: Callable[[], Collection[str]],
) -> CleanupProof:
    """Do away with everything of the unit and say what was seen. Later steps are taken only when earlier ones held:
    nothing is deleted or scrubbed under a process that still runs.

    `give_back` notes that the unit is off its GPUs and says which ones others are on. It is asked once its processes
    are gone, so that of several units that leave a GPU together the last one finds nobody else on it.
    """
    gone = await kill_all(record)
    empty = gone and await cgroups.remove([Path(group) for group in record.groups])
    deleted = gone and await delete(folder)
    held = give_back() if gone else ()
    idle = gone and await asyncio.to_thread(inventory.idle, gpu_uuids, held)
    scrubbed = idle and await inventory.scrub(gpu_uuids, held)
    missing = [
        name
        for name, held in (
            ("a process still runs", gone),
            ("its control group is not empty", empty),
            ("its files are not deleted", deleted),
            ("a process is on its GPUs", idle),
            ("its GPUs' memory is not scrubbed", scrubbed),
        )
        if not held
    ]
    return CleanupProof(
        unit_id=record.unit_id,
        processes_gone=gone,
        cgroup_empty=empty,
        scratch_deleted=deleted,
        gpu_idle=idle,
        memory_scrubbed=scrubbed,
        simulated=inventory.listing().simulated,
        detail=missing[0] if missing else "",
    )
