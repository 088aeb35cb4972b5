"""What the node's tests share: a node's parts without its link, and commands run in its units."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.kit.ids import new_id
from penstock.node import cgroups, runtimes, sandbox
from penstock.node.builder import Budget, Builder, shown
from penstock.node.codes import Codes
from penstock.node.environments import Environments
from penstock.node.installer import Installer, Source, find_installer
from penstock.node.inventory import Simulated
from penstock.node.journal import Journal
from penstock.node.logs import Forwarder
from penstock.node.resolver import Resolver
from penstock.node.serving import Sidecar, Workers
from penstock.node.units import Units
from penstock.wire import locks
from penstock.wire.link import LogLine, UnitReport, UnitState
from penstock.wire.tasks import Limits, RuntimeBuild, RuntimeBuilt, RuntimeLock, UnitHandoff, UnitStart

BUDGET = Budget(seconds=60, bytes_max=64 << 20)
#: Nobody's: units have others, and those who build environments too.
SIDECAR_UID = 210_200
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


@dataclass(frozen=True)
class Ended:
    """How a unit's own command ended, and what it wrote."""

    exit_code: int | None
    lines: list[LogLine]


@dataclass
class Host:
    """A node's parts."""

    folder: Path
    journal: Journal
    units: Units
    logs: Forwarder
    inventory: Simulated
    builder: Builder | None = None
    resolver: Resolver | None = None

    @staticmethod
    def open(
        folder: Path,
        tenant: Path,
        *,
        on_stage: Callable[[str], None] = lambda _: None,
        limit: bool = True,
        packages: Path | None = None,
        budget: Budget = BUDGET,
        runtimes_bytes_max: int = 1 << 30,
        sidecar: Sidecar | None = None,
        codes: Codes | None = None,
    ) -> "Host":
        """Build the parts on `folder`, as an agent does at its start."""
        units_folder = folder / "units"
        units_folder.mkdir(exist_ok=True)
        units_folder.chmod(0o711)
        built = Environments(folder / "runtimes", bytes_max=runtimes_bytes_max)
        built.clear()
        runtime = runtimes.prepare({"python:3": str(tenant)}, folder / "work", built=built)
        uids = range(210_000, 210_100) if os.geteuid() == 0 else None
        source = Source(env={}, index_url="none", find_links=str(packages or ""))
        driver = sandbox.open_driver(
            folder / "work",
            units_folder,
            runtime,
            uid=uids[0] if uids else None,
            production=True,
            shown=shown(built, find_installer(), source),
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
            workers=Workers(units_folder, sidecar=sidecar, codes=codes),
            sidecar_gid=SIDECAR_UID if uids else None,
            on_stage=on_stage,
        )
        built.in_use = units.runtimes_in_use
        installer = Installer(uv=find_installer(), driver=driver, source=source, uid=uids.stop if uids else None)
        builder = Builder(images=runtime, environments=built, installer=installer, budget=budget, on_stage=on_stage)
        resolver = Resolver(images=runtime, environments=built, installer=installer)
        return Host(folder, journal, units, logs, inventory, builder, resolver)

    async def close(self) -> None:
        """Let go, as a stopped agent does: units stay."""
        if self.builder is not None:
            await self.builder.close()
        await self.units.close()
        self.units._driver.close()
        self.journal.close()

    async def build(self, *lines: str) -> RuntimeBuilt:
        """Build the environment of a lock of these lines on python:3."""
        return await self.build_as(order(*lines))

    async def build_as(self, wanted: RuntimeBuild) -> RuntimeBuilt:
        """Build what the order says."""
        assert self.builder is not None
        return await self.builder.build(wanted)

    async def start(self, **changes: object) -> str:
        """A running unit."""
        unit_id = new_id("alc")
        await self.units.start(request(unit_id, **changes))
        return unit_id

    async def stock(self, **changes: object) -> str:
        """A unit that waits for its tenant."""
        return await self.start(stock=True, **changes)

    async def hand_over(self, unit_id: str, *command: str, values: Mapping[str, bytes] = {}, **changes: object) -> str:
        """The allocation that a stock unit was handed to."""
        allocation_id = new_id("alc")
        await self.units.handoff(handoff(unit_id, allocation_id, command=list(command), **changes), values)
        return allocation_id

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

    async def ended(self, unit_id: str, timeout_s: float = 20) -> Ended:
        """Wait until the unit's own command has ended."""
        async with asyncio.timeout(timeout_s):
            while (report := self._report(unit_id)).state is not UnitState.EXITED:
                await asyncio.sleep(0.01)
        lines: list[LogLine] = []
        # The end is told after the last output, so whatever there is has come.
        with suppress(TimeoutError):
            while True:
                lines += await asyncio.wait_for(self.logs.take(), 0.01)
        return Ended(report.exit_code, lines)

    def _report(self, unit_id: str) -> UnitReport:
        return next(report for report in self.units.reports() if report.unit_id == unit_id)

    async def python(self, unit_id: str, code: str, timeout: float = 30) -> Ran:
        """Run Python code in a unit."""
        return await self.run(unit_id, "python3", "-c", code, timeout=timeout)


def request(unit_id: str, **changes: object) -> UnitStart:
    """A unit's start, with small limits."""
    values: dict[str, object] = {"image": "python:3", "gpu_uuids": [], "limits": LIMITS} | changes
    return UnitStart(unit_id=unit_id, **values)  # pyright: ignore[reportArgumentType]


def handoff(unit_id: str, allocation_id: str, **changes: object) -> UnitHandoff:
    """A stock unit's handoff."""
    return UnitHandoff(unit_id=unit_id, allocation_id=allocation_id, **changes)  # pyright: ignore[reportArgumentType]


def order(*lines: str) -> RuntimeBuild:
    """A build of a lock of these lines on python:3."""
    lock = locks.normal("".join(lines))
    return RuntimeBuild(
        runtime=RuntimeLock(digest=locks.digest("python:3", lock), base="python:3", lock=locks.pack(lock))
    )


def text_of(lines: Sequence[LogLine], stream: str) -> str:
    """What was written to one stream."""
    return "".join(f"{line.text}\n" for line in lines if line.stream == stream)


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
