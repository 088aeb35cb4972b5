"""What the node's tests share: a node's parts without its link, and commands run in its units."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.kit.ids import new_id
from penstock.node import cgroups, runtimes, sandbox
from penstock.node.inventory import Simulated
from penstock.node.journal import Journal
from penstock.node.logs import Forwarder
from penstock.node.units import Units
from penstock.wire.tasks import Limits, UnitStart

LIMITS = Limits(memory_bytes=512 << 20, processes_max=128, cpus=2, scratch_bytes=1 << 30)


def tenant_folder() -> Path:
    """The environment of tenant code that `make install` made."""
    return Path(__file__).parent.parent / ".tenant"


@dataclass(frozen=True)
class Ran:
    """What a command in a unit did."""

    code: int
    exit_class: str
    out: str


@dataclass
class Host:
    """A node's parts."""

    folder: Path
    journal: Journal
    units: Units
    logs: Forwarder
    inventory: Simulated

    @staticmethod
    def open(
        folder: Path, tenant: Path, *, on_stage: Callable[[str], None] = lambda _: None, limit: bool = True
    ) -> "Host":
        """Build the parts on `folder`, as an agent does at its start."""
        units_folder = folder / "units"
        units_folder.mkdir(exist_ok=True)
        units_folder.chmod(0o711)
        runtime = runtimes.prepare({"python:3": str(tenant)}, folder / "work")
        uids = range(210_000, 210_100) if os.geteuid() == 0 else None
        driver = sandbox.open_driver(
            folder / "work", units_folder, runtime, uid=uids[0] if uids else None, production=True
        )
        journal = Journal(folder / "journal.db")
        logs = Forwarder()
        inventory = Simulated("nod_test", 8)
        units = Units(
            folder=units_folder,
            journal=journal,
            driver=driver,
            runtimes=runtime,
            inventory=inventory,
            groups=cgroups.find() if limit else cgroups.Groups({}, 1),
            logs=logs,
            uids=uids,
            on_stage=on_stage,
        )
        return Host(folder, journal, units, logs, inventory)

    async def close(self) -> None:
        """Let go, as a stopped agent does: units stay."""
        await self.units.close()
        self.units._driver.close()
        self.journal.close()

    async def start(self, **changes: object) -> str:
        """A running unit."""
        unit_id = new_id("alc")
        await self.units.start(request(unit_id, **changes))
        return unit_id

    async def run(self, unit_id: str, *argv: str, stdin: bytes = b"", timeout: float = 30) -> Ran:
        """Run a command in a unit and collect its output."""
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        try:
            execution = await self.units.execute(
                unit_id, argv=argv, env={}, cwd="", stdin=in_read, stdout=out_write, stderr=out_write
            )
        finally:
            os.close(in_read)
            os.close(out_write)
            os.write(in_write, stdin)
            os.close(in_write)
            collected = asyncio.create_task(asyncio.to_thread(_read_all, out_read))
        ending = await asyncio.wait_for(execution.wait(), timeout)
        return Ran(ending.code, ending.exit_class, (await collected).decode(errors="replace"))

    async def python(self, unit_id: str, code: str, timeout: float = 30) -> Ran:
        """Run Python code in a unit."""
        return await self.run(unit_id, "python3", "-c", code, timeout=timeout)


def request(unit_id: str, **changes: object) -> UnitStart:
    """A unit's start, with small limits."""
    values: dict[str, object] = {"image": "python:3", "gpu_uuids": [], "limits": LIMITS} | changes
    return UnitStart(unit_id=unit_id, **values)  # pyright: ignore[reportArgumentType]


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
