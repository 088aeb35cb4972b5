"""Starting one unit's processes, up to the moment when its init answers.

The order leaves no orphan at any point where the agent may die: the launcher waits at its gate; its pid is noted; then
it joins its control groups and gets the go with the configuration. Secrets travel only through that pipe.
"""

import asyncio
import os
import re
import socket
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.node import cgroups, control, procfs
from penstock.node.drivers import GO, Driver, Spec
from penstock.node.errors import Failed
from penstock.node.inventory import Inventory
from penstock.node.runtimes import Runtime
from penstock.node.tenant import Tenant, configure
from penstock.wire.tasks import UnitStart

_FILES_MAX: Final = 65536
_INFO: Final = "boot.json"
_COMPLAINT_BYTES_MAX: Final = 2000


class Launched:
    """A launcher at its gate."""

    def __init__(self, pid: int, gate: int, folder: Path) -> None:
        self.pid = pid
        self.started = procfs.start_time(pid)
        self._gate = gate
        self._folder = folder

    def go(self, configuration: bytes) -> None:
        """Open the gate. Larger configurations than the pipe holds are written as init reads them."""
        try:
            with os.fdopen(self._gate, "wb", buffering=0) as pipe:
                self._gate = -1
                pending = memoryview(GO + configuration)
                while pending:
                    pending = pending[pipe.write(pending) or 0 :]
        except BrokenPipeError as error:
            raise Failed("sandbox_failed", f"the unit's launcher ended: {self.complaint()}") from error

    def init_pid(self) -> int:
        """The pid of init as the host sees it; the launcher's own without a sandbox."""
        found = re.search(rb'"child-pid": (\d+)', (self._folder / _INFO).read_bytes())
        return int(found[1]) if found else self.pid

    def complaint(self) -> str:
        """What the launcher wrote on its standard error."""
        with suppress(OSError):
            content = (self._folder / "boot.log").read_bytes()[-_COMPLAINT_BYTES_MAX:]
            return content.decode(errors="replace").strip() or "it said nothing"
        return "it said nothing"

    def close(self) -> None:
        """Shut the gate if it is still closed: a launcher that waits there ends."""
        if self._gate >= 0:
            os.close(self._gate)
            self._gate = -1


def spec_of(request: UnitStart, *, folder: Path, runtime: Runtime, inventory: Inventory, uid: int | None) -> Spec:
    """What the driver must know of the unit that is asked for. Its GPUs are those of them that there are."""
    listing = inventory.listing()
    return Spec(
        unit_id=request.unit_id,
        folder=folder,
        runtime=runtime,
        limits=request.limits,
        uid=uid,
        gpus=tuple(gpu for gpu in listing.gpus if gpu.uuid in request.gpu_uuids),
        devices=tuple(inventory.devices(request.gpu_uuids)),
        mps=inventory.mps(request.gpu_uuids),
        simulated=listing.simulated,
        allocation_id=request.allocation_id,
        stock=request.stock,
    )


def spawn(driver: Driver, spec: Spec) -> Launched:
    """Start the launcher of a unit. It does nothing until `go`."""
    listener = control.listen(spec.folder)
    gate_read, gate_write = os.pipe()
    # A file: a pipe would break when the agent dies, and its launcher with it.
    info = os.open(spec.folder / _INFO, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    launch = driver.launch(spec, listener=listener.fileno(), info=info)
    try:
        with (spec.folder / "boot.log").open("wb") as complaints:
            process = subprocess.Popen(
                launch.argv,
                stdin=gate_read,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=launch.descriptors,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                start_new_session=True,
            )
    except BaseException:
        os.close(gate_write)
        raise
    finally:
        _close(listener, gate_read, info, *launch.owned)
    # Units outlive this object and even this process: `Units` reaps, not subprocess.
    process.returncode = 0
    return Launched(process.pid, gate_write, spec.folder)


def _close(listener: socket.socket, *descriptors: int) -> None:
    listener.close()
    for descriptor in descriptors:
        os.close(descriptor)


def configuration(driver: Driver, spec: Spec, tenant: Tenant, *, limited: frozenset[str]) -> bytes:
    """Init's configuration. Where control groups cannot limit memory, the address space is limited."""
    limits = {
        # Every process counts, init too; the group, where there is one, is what really limits.
        "processes": 0 if "pids" in limited or not driver.isolated else spec.limits.processes_max,
        "files": _FILES_MAX,
        "file_bytes": spec.limits.scratch_bytes,
        "address_space": 0 if "memory" in limited else spec.limits.memory_bytes,
    }
    return configure(
        replace(tenant, env={**tenant.env, **driver.environment(spec)}),
        isolated=driver.isolated,
        secrets_folder=driver.secrets(spec),
        limits=limits,
        zygote=driver.zygote(spec),
    )


async def start(
    driver: Driver,
    spec: Spec,
    *,
    groups: list[Path],
    content: bytes,
    note: Callable[[Launched], Awaitable[None]],
    on_stage: Callable[[str], None],
) -> Launched:
    """Spawn, note durably, limit, go."""
    launched = await asyncio.to_thread(spawn, driver, spec)
    try:
        on_stage("spawned")
        await note(launched)
        on_stage("noted")
        await asyncio.to_thread(cgroups.join, groups, launched.pid)
        on_stage("limited")
        await asyncio.to_thread(launched.go, content)
    except BaseException:
        launched.close()
        raise
    on_stage("gone")
    return launched
