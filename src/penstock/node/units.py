"""The units of this node: start, use, stop, and find them again after the agent's own restart.

A record is on disk before anything of a unit exists and until it is proved gone. Per unit, callers take turns (the task
executor sees to that); ports and commands may be used at any time.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from penstock.kit.full import is_full
from penstock.kit.telemetry import logger
from penstock.node import cleanup, launcher, procfs
from penstock.node.cgroups import Groups
from penstock.node.control import Control, Ending, Greeting, dial
from penstock.node.drivers import Driver, Spec
from penstock.node.errors import DISK_FULL, Failed, NodeError, NoUnit, Refused, Unlinked
from penstock.node.inventory import Inventory
from penstock.node.journal import Journal, Unwritten
from penstock.node.logs import Forwarder
from penstock.node.runtimes import Runtimes
from penstock.node.sandbox import make_folder
from penstock.node.serving import Workers
from penstock.node.tenant import Tenant, content, tenant
from penstock.node.unit import (
    Execution,
    Unit,
    absent,
    check_env,
    check_gpus,
    check_stock,
    check_tenant,
    free_uid,
    new_record,
)
from penstock.wire.link import UnitReport, UnitState
from penstock.wire.tasks import CleanupProof, UnitHandoff, UnitStart, UnitStarted, UnitStop, WorkerKeys

_log = logger(__name__)
_START_TIMEOUT_S: Final = 20.0
_GREETING_TIMEOUT_S: Final = 10.0
#: A zygote imports what the node's configuration names, which may be much.
_WARMING_S: Final = 60.0
_STOP_GRACE_S_MAX: Final = 300.0
_WATCH_S: Final = 3600.0
_NO_SECRETS: Final[Mapping[str, bytes]] = {}


class Units:
    """All units of this node."""

    def __init__(
        self,
        *,
        folder: Path,
        journal: Journal,
        driver: Driver,
        runtimes: Runtimes,
        inventory: Inventory,
        groups: Groups,
        logs: Forwarder,
        uids: range | None = None,
        workers: Workers | None = None,
        sidecar_gid: int | None = None,
        on_stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._folder = folder
        self._journal = journal
        self._driver = driver
        self._runtimes = runtimes
        self._inventory = inventory
        self._groups = groups
        self._logs = logs
        self._uids = uids
        self._sidecar_gid = sidecar_gid
        self.workers = workers or Workers(folder)
        self._on_stage = on_stage
        self._units: dict[str, Unit] = {}
        self._reaper = procfs.Reaper()
        #: Set whenever a unit ended.
        self.changed = asyncio.Event()

    @property
    def sandbox(self) -> str:
        """How units are kept apart here."""
        return self._driver.name

    def reports(self) -> list[UnitReport]:
        """The complete list, for a heartbeat."""
        return [unit.report() for unit in self._units.values()]

    def runtimes_in_use(self) -> set[str]:
        """The digests of environments that units stand on."""
        return {unit.record.runtime for unit in self._units.values()}

    async def start(self, request: UnitStart, values: Mapping[str, bytes] = _NO_SECRETS) -> UnitStarted:
        """Start a unit, or find that it has been started; the keys of its worker are new all the same. `values` are
        those of the secrets it names."""
        keys = self.workers.keys(request, values)
        existing = self._units.get(request.unit_id)
        if existing is not None:
            if keys is not None:
                await self._note(existing, keys=keys)
                self.workers.register(existing.record)
            return existing.already()
        archive = await self.workers.code(request)
        spec = launcher.spec_of(
            request,
            folder=self._folder / request.unit_id,
            runtime=self._runtimes.choose(request.image, request.runtime),
            inventory=self._inventory,
            uid=free_uid(self._units.values(), self._uids),
        )
        check_gpus(self._units.values(), request.gpu_uuids, {gpu.uuid for gpu in spec.gpus})
        groups = self._groups.folders(request.unit_id)
        record = new_record(request, uid=spec.uid, groups=groups, isolated=self._driver.isolated, keys=keys)
        return await self._start(Unit(record), spec, self._tenant(request, values), archive)

    def _tenant(self, request: UnitStart | UnitHandoff, values: Mapping[str, bytes]) -> Tenant:
        places = self._driver.places(self._folder / request.unit_id, self._runtimes.framework)
        return tenant(request, values, isolated=self._driver.isolated, places=places)

    async def _start(self, unit: Unit, spec: Spec, who: Tenant, archive: Path | None) -> UnitStarted:
        self._units[spec.unit_id] = unit
        try:
            async with asyncio.timeout(_START_TIMEOUT_S + _WARMING_S * spec.stock):
                await self._launch(unit, spec, who, archive)
        except (OSError, TimeoutError, NodeError) as error:
            await self._undo(unit)
            if isinstance(error, (Refused, Failed, Unwritten)):
                raise
            detail = error.detail if isinstance(error, NodeError) else str(error) or "it took too long"
            raise Failed(DISK_FULL if is_full(error) else "sandbox_failed", detail) from error
        return UnitStarted(unit_id=spec.unit_id, pid=unit.record.init_pid)

    async def _launch(self, unit: Unit, spec: Spec, who: Tenant, archive: Path | None) -> None:
        configuration = launcher.configuration(self._driver, spec, who, limited=self._groups.limits)
        await self._note(unit)
        self._on_stage("recorded")
        make_folder(spec.folder, spec.unit_id, spec.uid, sidecar=self._sidecar_gid)
        await self.workers.unpack(archive, spec.unit_id, spec.uid)
        self.workers.register(unit.record)
        groups = self._groups.make(spec.unit_id, spec.limits)
        self._on_stage("prepared")

        async def note(launched: launcher.Launched) -> None:
            self._reaper.add(launched.pid)
            await self._note(unit, pid=launched.pid, started=launched.started)

        launched = await launcher.start(
            self._driver, spec, groups=groups, content=configuration, note=note, on_stage=self._on_stage
        )
        try:
            await self._greet(unit, launched, warm=bool(self._driver.zygote(spec)))
        finally:
            launched.close()

    async def _greet(self, unit: Unit, launched: launcher.Launched, *, warm: bool) -> None:
        try:
            greeting = await self._connect(unit)
        except Unlinked as error:
            raise Failed("sandbox_failed", launched.complaint()) from error
        if warm and not greeting.warm:
            raise Failed("zygote_failed", "the runtime ended while it imported what stock imports")
        self._on_stage("greeted")
        await self._running(unit, launched.init_pid())
        self._on_stage("running")

    async def _connect(self, unit: Unit) -> Greeting:
        """Dial the unit's init and take over its events."""
        unit.control = dial(
            self._folder / unit.record.unit_id,
            on_exit=lambda ending: self._main_ended(unit, ending),
            on_log=lambda stream, dropped, chunk: self._logs.put(*unit.output(stream, dropped, chunk)),
            on_dial=unit.dialled,
            on_lost=lambda: self._lost(unit),
        )
        greeting = await unit.control.greeting(_GREETING_TIMEOUT_S + _WARMING_S * unit.record.stock)
        if unit.record.stock:
            known = unit.record.allocation_id or greeting.tenant
            unit.record = msgspec.structs.replace(unit.record, allocation_id=known)
        if greeting.main is not None:
            self._main_ended(unit, greeting.main)
        return greeting

    async def _running(self, unit: Unit, init_pid: int, *, adopted: bool = False) -> None:
        ended = unit.record.exit_code is not None
        note = self._tell if adopted else self._note
        await note(
            unit,
            state=UnitState.EXITED if ended else UnitState.RUNNING,
            init_pid=init_pid,
            init_started=procfs.start_time(init_pid),
            pid_namespace=procfs.pid_namespace(init_pid) if self._driver.isolated else 0,
        )
        unit.watcher = asyncio.create_task(self._watch(unit), name=f"watch-{unit.record.unit_id}")

    async def _note(self, unit: Unit, **changes: object) -> None:
        unit.record = msgspec.structs.replace(unit.record, **changes)
        await self._journal.put_unit(unit.record)

    async def _tell(self, unit: Unit, **changes: object) -> None:
        """Note what became of a unit: no disk without space keeps it from being reported."""
        unit.record = msgspec.structs.replace(unit.record, **changes)
        await self._journal.note_unit(unit.record)

    async def _undo(self, unit: Unit) -> None:
        await self._remove(unit, unit.record.gpu_uuids)
        _log.warning("unit_undone", unit_id=unit.record.unit_id)

    async def handoff(self, request: UnitHandoff, values: Mapping[str, bytes] = _NO_SECRETS) -> UnitStarted:
        """Give a stock unit to its one tenant, or find that it has been given to it."""
        unit = self._units.get(request.unit_id)
        if unit is None:
            raise NoUnit(request.unit_id)
        check_stock(unit.record)
        check_tenant(unit.record, request.allocation_id)
        keys = self.workers.keys(request, values)
        given = unit.record.allocation_id == request.allocation_id
        if not given or unit.record.state is UnitState.RUNNING:
            brought = content(self._tenant(request, values))
            await self.workers.unpack(await self.workers.code(request), unit.record.unit_id, unit.record.uid)
            given = await self._hand_over(unit, request, brought, keys)
        return UnitStarted(unit_id=request.unit_id, pid=unit.record.init_pid, adopted=given)

    async def _hand_over(self, unit: Unit, request: UnitHandoff, brought: bytes, keys: WorkerKeys | None) -> bool:
        """The record comes first; init then takes in one tenant and no other, however often it is asked."""
        allocation_id = request.allocation_id
        control = self._control(unit.record.unit_id)
        if unit.record.allocation_id != allocation_id or keys is not None:
            given = {"allocation_id": allocation_id, "egress": request.egress, "serving": request.serving, "keys": keys}
            await self._note(unit, **given)
        self._on_stage("handoff_recorded")
        self.workers.register(unit.record)
        try:
            before = await control.handoff(allocation_id, brought, sent=lambda: self._on_stage("handoff_sent"))
        except NodeError as error:
            if error.code == "taken":
                raise
            await self._undo(unit)
            raise Failed("handoff_failed", error.detail) from error
        self._on_stage("handoff_done")
        return before

    async def stop(self, request: UnitStop) -> CleanupProof:
        """Stop a unit and prove it gone; a unit that is not here is proved to have left nothing."""
        unit = self._units.get(request.unit_id) or absent(request.unit_id, self._groups.folders(request.unit_id))
        if request.allocation_id:
            check_tenant(unit.record, request.allocation_id)
        if unit.record.unit_id in self._units:
            self._stop_watching(unit)
            await self._tell(unit, state=UnitState.STOPPING)
            await unit.ask_to_end(min(max(0.0, request.grace_s), _STOP_GRACE_S_MAX))
        return await self._remove(unit, request.gpu_uuids or unit.record.gpu_uuids)

    async def _remove(self, unit: Unit, gpu_uuids: Sequence[str]) -> CleanupProof:
        self._stop_watching(unit)
        unit.hang_up()
        self.workers.ended(unit.record)
        proof = await cleanup.prove(
            unit.record,
            folder=self._folder / unit.record.unit_id,
            inventory=self._inventory,
            gpu_uuids=gpu_uuids,
            give_back=lambda: self._give_back(unit),
        )
        self._reaper.add(unit.record.init_pid)
        self.reap()
        if proof.clean:
            await self._journal.drop_unit(unit.record.unit_id)
            self._units.pop(unit.record.unit_id, None)
            self._logs.forget(unit.record.unit_id)
        return proof

    def _give_back(self, unit: Unit) -> set[str]:
        unit.off_gpus = True
        return {uuid for other in self._units.values() if not other.off_gpus for uuid in other.record.gpu_uuids}

    async def connect_port(self, unit_id: str, port: int) -> socket.socket:
        """A connected, non-blocking TCP socket to a port on the unit's loopback."""
        if not 0 < port < 65536:
            raise Refused("refused", f"port must be 1 to 65535, not {port}")
        return await self._control(unit_id).connect(port)

    async def execute(
        self,
        unit_id: str,
        *,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        stdin: int,
        stdout: int,
        stderr: int,
    ) -> Execution:
        """Run a command in a unit with these descriptors, which the caller keeps and closes."""
        if not argv:
            raise Refused("malformed", "argv is empty")
        check_env(env)
        control = self._control(unit_id)
        name, ending = await control.execute(argv, dict(env), cwd, (stdin, stdout, stderr))
        return Execution(self._units[unit_id], name, ending)

    def _control(self, unit_id: str) -> Control:
        unit = self._units.get(unit_id)
        if unit is None or unit.record.state is not UnitState.RUNNING:
            raise NoUnit(unit_id)
        if unit.control is None:
            raise Unlinked("init_gone", f"unit {unit_id} does not answer")
        return unit.control

    async def recover(self) -> None:
        """After a restart: take over the units that run, and clear away what was only begun."""
        for record in await self._journal.units():
            unit = self._units[record.unit_id] = Unit(record)
            if record.state in (UnitState.STARTING, UnitState.RUNNING):
                await self._recover(unit)

    async def _recover(self, unit: Unit) -> None:
        record = unit.record
        reached = bool(cleanup.processes(record)) and await self._reach(unit)
        if reached:
            init_pid = record.init_pid or cleanup.find_init(record)
            await self._running(unit, init_pid, adopted=True)
            self.workers.register(unit.record)
            _log.info("unit_adopted", unit_id=record.unit_id, pid=init_pid)
        elif record.state is UnitState.STARTING:
            await self._undo(unit)
        else:
            await self._ended(unit)

    async def _reach(self, unit: Unit) -> bool:
        try:
            await self._connect(unit)
        except Unlinked:
            unit.control = None
            return False
        return True

    async def _watch(self, unit: Unit) -> None:
        record = unit.record
        while not await procfs.ended(record.init_pid, record.init_started, timeout_s=_WATCH_S):
            pass
        await self._ended(unit)

    def _stop_watching(self, unit: Unit) -> None:
        """An end that was asked for is not an exit to report."""
        if unit.watcher is not None:
            unit.watcher.cancel()
            unit.watcher = None

    async def _ended(self, unit: Unit) -> None:
        """Init is gone, and with it everything in the unit. Its files stay until it is stopped."""
        self._reaper.add(unit.record.init_pid)
        unit.hang_up()
        if unit.record.state is not UnitState.EXITED:
            ending = unit.classify(Ending(128 + signal.SIGKILL, signalled=True))
            await self._tell(unit, state=UnitState.EXITED, exit_code=ending.code, exit_class=ending.exit_class)
        self.workers.ended(unit.record, unit.doomed)
        self.reap()
        self.changed.set()
        _log.info("unit_ended", unit_id=unit.record.unit_id, exit_class=unit.record.exit_class)

    def _main_ended(self, unit: Unit, ending: Ending) -> None:
        for lines in unit.lines.values():
            self._logs.put(*lines.end())
        seen = unit.classify(ending)
        unit.record = msgspec.structs.replace(unit.record, exit_code=seen.code, exit_class=seen.exit_class)
        if unit.record.state is UnitState.RUNNING:
            unit.record = msgspec.structs.replace(unit.record, state=UnitState.EXITED)
            self.changed.set()
        self.workers.ended(unit.record, unit.doomed)

    def kill(self, unit_id: str, reason: str) -> None:
        """End a unit at once, as if it had died."""
        unit = self._units.get(unit_id)
        if unit is not None and unit.record.state is UnitState.RUNNING:
            _log.warning("unit_killed", unit_id=unit_id, reason=reason)
            self._logs.put(unit.kill(reason))

    def _lost(self, unit: Unit) -> None:
        """Init hung up: it has ended, which its watcher sees, or it is broken, and then the unit is of no use."""
        unit.control = None
        if unit.record.state is UnitState.RUNNING:
            procfs.kill(unit.record.init_pid, unit.record.init_started)

    def reap(self) -> None:
        """Collect what has ended and is our child: launchers, and inits whose launcher was killed."""
        self._reaper.reap()

    async def stop_all(self, grace_s: float) -> None:
        """Stop every unit, for a node that is taken down for good."""
        stops = [self.stop(UnitStop(unit_id=unit_id, gpu_uuids=[], grace_s=grace_s)) for unit_id in list(self._units)]
        await asyncio.gather(*stops)

    async def close(self) -> None:
        """Let go of all units without ending them."""
        for unit in self._units.values():
            if unit.watcher is not None:
                unit.watcher.cancel()
            unit.hang_up()
        self.reap()
