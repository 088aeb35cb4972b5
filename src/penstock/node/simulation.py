"""Simulated nodes: real links, real certificates and verified tasks, but no host. For trying a fleet on one machine.

The link, the executor and the checks of a task are the agent's own. What is pretended is what a host would do: units
start and stop after a pause without any process, GPUs are the inventory's simulated ones, and the journal is in memory,
so that all units are gone when the process ends. Everything a simulated node says of itself says that it is simulated.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Final, NoReturn

from penstock.node.errors import Refused
from penstock.node.identity import Identity
from penstock.node.inventory import Simulated
from penstock.node.journal import Begun, Standing
from penstock.node.link import Link, Outbox
from penstock.node.logs import Forwarder
from penstock.node.secrets import Secrets
from penstock.node.serverclock import ServerClock
from penstock.node.tasks import Executor, Handler, Verifier
from penstock.node.tunnel import NodeTunnel
from penstock.wire.link import TaskResult, UnitReport, UnitState
from penstock.wire.tasks import (
    GPU_PROBE,
    HEALTH_PROBE,
    RUNTIME_BUILD,
    RUNTIME_RESOLVE,
    TOPOLOGY_DISCOVER,
    UNIT_HANDOFF,
    UNIT_START,
    UNIT_STOP,
    CleanupProof,
    GpuProbe,
    GpuProbed,
    HealthProbe,
    HealthReport,
    Inventory,
    RuntimeBuild,
    RuntimeBuilt,
    RuntimeResolve,
    SignedTask,
    TaskBody,
    TopologyDiscover,
    UnitHandoff,
    UnitStart,
    UnitStarted,
    UnitStop,
)

_RESULTS_KEPT_MAX: Final = 256
_FENCES_KEPT_MAX: Final = 4096
_SANDBOX: Final = "simulated"


class MemoryJournal:
    """What `node.journal` keeps on disk, for as long as the process lives."""

    def __init__(self) -> None:
        self._begun: dict[str, TaskResult | None] = {}
        self._fences: dict[str, int] = {}

    async def begin(self, task: TaskBody, signed: SignedTask, *, expired: bool) -> Begun:  # noqa: ARG002
        """Note that a task is about to have effects, unless it had them already, is too old or its fence too low."""
        if task.task_id in self._begun:
            result = self._begun[task.task_id]
            return Begun(Standing.DONE, result) if result else Begun(Standing.UNFINISHED)
        if expired:
            return Begun(Standing.EXPIRED)
        if task.allocation_id is not None:
            if task.fence < self._fences.get(task.allocation_id, task.fence):
                return Begun(Standing.STALE)
            self._fences[task.allocation_id] = task.fence
            _forget_oldest(self._fences, _FENCES_KEPT_MAX)
        self._begun[task.task_id] = None
        return Begun(Standing.NEW)

    async def finish(self, result: TaskResult) -> None:
        """Note how a task ended."""
        self._begun[result.task_id] = result

    async def acknowledge(self, task_id: str) -> None:
        """The gateway has the result; the oldest of these are forgotten."""
        result = self._begun.pop(task_id, None)
        if result is not None:
            self._begun[task_id] = result
        finished = [key for key, kept in self._begun.items() if kept is not None]
        for key in finished[:-_RESULTS_KEPT_MAX]:
            del self._begun[key]

    async def unfinished(self) -> list[SignedTask]:
        """Nothing outlives the process."""
        return []

    async def unacknowledged(self) -> list[TaskResult]:
        """Nothing outlives the process."""
        return []


def _forget_oldest(kept: dict[str, int], count_max: int) -> None:
    while len(kept) > count_max:
        del kept[next(iter(kept))]


class PretendedUnits:
    """Units without processes. Each task takes `task_s`."""

    def __init__(self, inventory: Simulated, *, task_s: float) -> None:
        self.changed = asyncio.Event()
        self._inventory = inventory
        self._task_s = task_s
        self._running: set[str] = set()

    def reports(self) -> list[UnitReport]:
        """The complete list, for a heartbeat."""
        return [UnitReport(unit_id=unit_id, state=UnitState.RUNNING) for unit_id in self._running]

    async def connect_port(self, unit_id: str, port: int) -> NoReturn:  # noqa: ARG002 - the Protocol's signature
        """Nothing listens in what does not run."""
        raise Refused("simulated", f"unit {unit_id} is simulated: it has no ports")

    async def execute(self, unit_id: str, **_: object) -> NoReturn:
        """Nothing runs."""
        raise Refused("simulated", f"unit {unit_id} is simulated: it runs no commands")

    def handlers(self) -> Mapping[str, Handler]:
        """Type → what pretends to do it."""
        return {
            UNIT_START: self._start,
            UNIT_HANDOFF: self._start,
            UNIT_STOP: self._stop,
            TOPOLOGY_DISCOVER: self._discover,
            HEALTH_PROBE: self._report,
            GPU_PROBE: self._probe,
            RUNTIME_BUILD: self._build,
            RUNTIME_RESOLVE: self._resolve,
        }

    async def _start(self, request: UnitStart | UnitHandoff, _: Mapping[str, bytes] | None = None) -> UnitStarted:
        await asyncio.sleep(self._task_s)
        adopted = request.unit_id in self._running
        self._running.add(request.unit_id)
        return UnitStarted(unit_id=request.unit_id, pid=0, adopted=adopted)

    async def _stop(self, request: UnitStop) -> CleanupProof:
        await asyncio.sleep(self._task_s)
        self._running.discard(request.unit_id)
        return CleanupProof(
            unit_id=request.unit_id,
            processes_gone=True,
            cgroup_empty=True,
            scratch_deleted=True,
            gpu_idle=True,
            memory_scrubbed=True,
            simulated=True,
            detail="simulated: there was no process",
        )

    async def _discover(self, _: TopologyDiscover) -> Inventory:
        await asyncio.sleep(self._task_s)
        return self._inventory.listing()

    async def _report(self, _: HealthProbe) -> HealthReport:
        await asyncio.sleep(self._task_s)
        return HealthReport(sandbox=_SANDBOX, units=list(self._running), disk_free_bytes=0, memory_free_bytes=0)

    async def _probe(self, request: GpuProbe) -> GpuProbed:
        await asyncio.sleep(self._task_s)
        return GpuProbed(gpu_uuid=request.gpu_uuid, passed=True, detail=_SANDBOX)

    async def _build(self, request: RuntimeBuild) -> RuntimeBuilt:
        await asyncio.sleep(self._task_s)
        return RuntimeBuilt(digest=request.runtime.digest, bytes=0, seconds=self._task_s)

    async def _resolve(self, _: RuntimeResolve) -> NoReturn:
        raise Refused("simulated", "a simulated node asks no package index")


class SimulatedNode:
    """One node's agent without a host. `on_task` is told of each task as it arrives, before anything is checked."""

    def __init__(
        self,
        who: Identity,
        *,
        gpus: int,
        task_s: float,
        on_task: Callable[[SignedTask], None] = lambda _: None,
    ) -> None:
        self.who = who
        self._on_task = on_task
        inventory = Simulated(who.node_id, gpus)
        clock, outbox, secrets, journal = ServerClock(), Outbox(), Secrets(), MemoryJournal()
        units = PretendedUnits(inventory, task_s=task_s)
        self._executor = Executor(
            verifier=Verifier(who.node_id, lambda: who.task_keys),
            journal=journal,
            clock=clock,
            handlers=units.handlers(),
            on_result=outbox.put,
            secrets=secrets.values,
        )
        self.link = Link(
            identity=who,
            clock=clock,
            journal=journal,
            units=units,
            inventory=inventory,
            logs=Forwarder(),
            outbox=outbox,
            submit=self._submit,
            version=f"{version('penstock')} simulated",
            production=False,
            secrets=secrets,
        )
        self._tunnel = NodeTunnel(who, units, self.link.crowd)

    def _submit(self, signed: SignedTask) -> None:
        self._on_task(signed)
        self._executor.submit(signed)

    async def run(self, *, tunnel: bool = False) -> None:
        """Keep the link, and a tunnel if wanted, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.link.run())
                if tunnel:
                    group.create_task(self._tunnel.run())
        finally:
            await self._executor.close()


async def run(nodes: Sequence[SimulatedNode], *, tunnels: bool = False) -> None:
    """All of them, until cancelled."""
    async with asyncio.TaskGroup() as group:
        for node in nodes:
            group.create_task(node.run(tunnel=tunnels))
