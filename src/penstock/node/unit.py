"""One unit in memory, the commands in it, and what a unit may be asked for."""

import asyncio
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.kit.clock import utc_now
from penstock.node import cgroups, procfs
from penstock.node.control import Control, Ending, tcp_connection
from penstock.node.egress import Proxy
from penstock.node.errors import Failed, NodeError, Refused, Unlinked
from penstock.node.journal import UnitRecord
from penstock.node.logs import Lines
from penstock.wire import egress
from penstock.wire.egress import BadRule
from penstock.wire.link import LogLine, UnitReport, UnitState
from penstock.wire.serverless import SOCKET_FOLDER
from penstock.wire.tasks import RESERVED_ENV_PREFIXES, SecretRef, UnitHandoff, UnitStart, UnitStarted, WorkerKeys
from penstock.wire.tunnel import ExecExit

_UNIT_ID: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SECRETS_MAX: Final = 64
_KILL_S: Final = 2.0
#: What names a file in the framework's folder, a path of its HTTP, and a function's name in variables.
_SOCKET: Final = re.compile(rf"(?:{SOCKET_FOLDER}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{{0,63}}")
_URL_PATH: Final = re.compile(r"/[!-~]{0,254}")
_WORKER: Final = re.compile(r"[a-z0-9_-]{1,128}")
_HANDLER: Final = re.compile(r"([A-Za-z_][\w.]{0,254}:[A-Za-z_][\w.]{0,254})?")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SLOTS_MAX: Final = 1000
_SERVING_UNIT_ID_MAX: Final = 40
_NAMES: Final = {
    "worker": _WORKER,
    "function": _WORKER,
    "request": _WORKER,
    "project_id": _WORKER,
    "socket": _SOCKET,
    "invoke_path": _URL_PATH,
    "health_path": _URL_PATH,
    "handler": _HANDLER,
}


def new_record(
    request: UnitStart, *, uid: int | None, groups: Sequence[Path], isolated: bool, keys: WorkerKeys | None
) -> UnitRecord:
    """What is noted of a unit before anything of it exists."""
    return UnitRecord(
        unit_id=request.unit_id,
        state=UnitState.STARTING,
        boot_id=procfs.boot_id(),
        uid=uid,
        gpu_uuids=request.gpu_uuids,
        groups=[str(path) for path in groups],
        runtime=request.runtime,
        isolated=isolated,
        allocation_id="" if request.stock else request.allocation_id,
        stock=request.stock,
        egress=[] if request.stock else request.egress,
        memory_bytes=request.limits.memory_bytes,
        serving=request.serving,
        keys=keys,
    )


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
        self.proxy: Proxy | None = None
        self.watcher: asyncio.Task[None] | None = None
        self.lines: dict[str, Lines] = {}
        #: Its processes are proved gone, so it is on no GPU any more.
        self.off_gpus = False
        #: Why it is to end at once, if somebody said so.
        self.doomed = ""

    def dialled(self, descriptor: int) -> None:
        """Carry a connection to the unit's way out."""
        connection = tcp_connection(descriptor)
        if connection is None:
            return
        if not self.record.egress:
            connection.close()
            return
        if self.proxy is None:
            rules = egress.parse_all(self.record.egress)
            self.proxy = Proxy(self.record.unit_id, rules, allocation_id=self.record.allocation_id)
        self.proxy.accept(connection)

    def hang_up(self) -> None:
        """Let go of init, and end the connections that are carried out of the unit."""
        if self.control is not None:
            self.control.close()
            self.control = None
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None

    def kill(self, reason: str) -> LogLine:
        """End its own command, and with that everything in it; if init does not see to it, init itself. The line tells
        its tenant why."""
        self.doomed = reason
        if self.control is not None:
            self.control.kill("main", signal.SIGKILL)
        asyncio.get_running_loop().call_later(_KILL_S, self._kill_init)
        text = f"the unit was ended: {reason}"
        return LogLine(unit_id=self.record.unit_id, stream="penstock", at=utc_now(), text=text)

    def _kill_init(self) -> None:
        if self.record.state is UnitState.RUNNING:
            procfs.kill(self.record.init_pid, self.record.init_started)

    async def ask_to_end(self, grace_s: float) -> None:
        """Give it so long to end by itself."""
        if self.control is None or not grace_s:
            return
        with suppress(NodeError):
            await self.control.stop()
            await procfs.ended(self.record.init_pid, self.record.init_started, timeout_s=grace_s)

    def already(self) -> UnitStarted:
        """The answer to a start that was done before."""
        if self.record.state not in (UnitState.RUNNING, UnitState.EXITED):
            raise Failed("unit_busy", f"unit {self.record.unit_id} is {self.record.state.value}")
        return UnitStarted(unit_id=self.record.unit_id, pid=self.record.init_pid, adopted=True)

    def report(self) -> UnitReport:
        """As heartbeats tell of it."""
        return UnitReport(
            unit_id=self.record.unit_id,
            state=self.record.state,
            exit_code=self.record.exit_code,
            exit_class=self.record.exit_class,
        )

    def output(self, stream: str, dropped: int, chunk: bytes) -> list[LogLine]:
        """The lines that are whole now."""
        if stream not in ("stdout", "stderr"):
            return []
        lines = self.lines.setdefault(stream, Lines(self.record.unit_id, stream))
        told = lines.feed(f"\n[{dropped} bytes dropped]\n".encode()) if dropped else []
        return [*told, *lines.feed(chunk)]

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


def absent(unit_id: str, groups: Iterable[Path]) -> Unit:
    """A unit that is not here, as far as is known; what it may have left is looked for all the same."""
    left = [str(path) for path in groups]
    return Unit(UnitRecord(unit_id=unit_id, state=UnitState.STOPPING, boot_id=procfs.boot_id(), groups=left))


def check_gpus(units: Iterable[Unit], wanted: Sequence[str], known: set[str]) -> None:
    """A GPU is given to one unit at a time, and only one that there is."""
    held = {uuid: unit.record.unit_id for unit in units for uuid in unit.record.gpu_uuids}
    for uuid in wanted:
        if uuid not in known:
            raise Failed("unknown_gpu", f"this node has no GPU {uuid}")
        if uuid in held:
            raise Failed("gpu_busy", f"GPU {uuid} is still held by unit {held[uuid]}")


def free_uid(units: Iterable[Unit], uids: range | None) -> int | None:
    """A host user that no unit has; None where all units are the agent's own."""
    if uids is None:
        return None
    taken = {unit.record.uid for unit in units}
    free = next((uid for uid in uids if uid not in taken), None)
    if free is None:
        raise Failed("out_of_users", "all of the node's users for units are taken")
    return free


def check_start(request: UnitStart) -> None:
    """Refuse what must never be acted on: a name that is no folder's, or variables that steer loader or driver."""
    check_unit_id(request.unit_id)
    check_allocation_id(request.allocation_id)
    check_env(request.env)
    check_secrets(request.secrets)
    check_egress(request.egress)
    check_serving(request)
    if request.stock and (request.command or request.secrets or request.serving):
        raise Refused("malformed", "a stock unit has no tenant, so it has no command, no secrets and serves nothing")


def check_handoff(request: UnitHandoff) -> None:
    """As for a start; and stock is handed to somebody."""
    check_unit_id(request.unit_id)
    if not request.allocation_id:
        raise Refused("malformed", "allocation_id is empty")
    check_allocation_id(request.allocation_id)
    check_env(request.env)
    check_secrets(request.secrets)
    check_egress(request.egress)
    check_serving(request)


def check_stock(record: UnitRecord) -> None:
    """Refuse to hand over a unit that was started for a tenant."""
    if not record.stock:
        raise Refused("not_stock", f"unit {record.unit_id} was started for a tenant")


def check_tenant(record: UnitRecord, allocation_id: str) -> None:
    """Refuse what one allocation asks of a stock unit that was handed to another."""
    if record.stock and record.allocation_id not in ("", allocation_id):
        raise Refused("taken", f"unit {record.unit_id} was handed to another allocation")


def check_unit_id(unit_id: str) -> None:
    """A unit's id names its folder and its groups, so it must not lead anywhere else."""
    if _UNIT_ID.fullmatch(unit_id) is None:
        raise Refused("malformed", "unit_id must be lower-case letters, digits, _ and -, at most 64")


def check_allocation_id(allocation_id: str) -> None:
    """An allocation's id is told to init and to the unit's commands."""
    if allocation_id and _UNIT_ID.fullmatch(allocation_id) is None:
        raise Refused("malformed", "allocation_id must be lower-case letters, digits, _ and -, at most 64")


def check_secrets(secrets: Sequence[SecretRef]) -> None:
    """Refuse names that are no file's, too many of them, and variables that are not the tenant's to set."""
    if len(secrets) > _SECRETS_MAX:
        raise Refused("malformed", f"a unit has at most {_SECRETS_MAX} secrets")
    for secret in secrets:
        if _SECRET.fullmatch(secret.name) is None:
            raise Refused("malformed", f"{secret.name!r} is not a secret's name")
    check_env({secret.env: "" for secret in secrets if secret.env})


def check_serving(request: UnitStart | UnitHandoff) -> None:
    """Refuse what is no function's worker: its names become files, paths and variables."""
    serving = request.serving
    if serving is None:
        return
    if len(request.unit_id) > _SERVING_UNIT_ID_MAX or not request.allocation_id:
        raise Refused("malformed", f"a unit that serves has an allocation and an id of at most {_SERVING_UNIT_ID_MAX}")
    if not 1 <= serving.slots <= _SLOTS_MAX:
        raise Refused("malformed", f"serving.slots must be 1 to {_SLOTS_MAX}")
    for field, pattern in _NAMES.items():
        if pattern.fullmatch(getattr(serving, field)) is None:
            raise Refused("malformed", f"serving.{field} cannot be used")
    if serving.code is not None and (_DIGEST.fullmatch(serving.code.sha256) is None or serving.code.bytes < 0):
        raise Refused("malformed", "serving.code is no archive's digest and size")


def check_egress(rules: Sequence[str]) -> None:
    """Refuse rules that cannot be read: nothing may be let out by mistake."""
    try:
        egress.parse_all(rules)
    except BadRule as error:
        raise Refused("malformed", f"egress: {error}") from error


def check_env(env: Mapping[str, str]) -> None:
    """Refuse reserved and malformed names."""
    for name in env:
        if name.startswith(RESERVED_ENV_PREFIXES):
            raise Refused("reserved_env", f"the variable {name} is reserved")
        if _VARIABLE.fullmatch(name) is None:
            raise Refused("malformed", f"{name!r} is not a variable's name")
