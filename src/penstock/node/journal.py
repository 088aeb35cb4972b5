"""What this node has been told and has done, written before it matters: tasks, fences and unit records.

It outlives the agent, however that ends. A task is noted before its first effect; its result is kept until the gateway
has acknowledged it, and for a while after, so that a repeated task gets the same answer and has no second effect. Of
the host's own crash it may lose the last moments: no unit outlives that either.

Without space on the disk, or with a damaged file, nothing new begins. Facts (how a task ended, what became of a unit)
are kept in memory and written when that is possible again, and stops are done all the same: they are what gives space
back.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.kit.full import FULL
from penstock.kit.telemetry import logger
from penstock.node.errors import DISK_FULL, NodeError
from penstock.wire.link import TaskResult, UnitState
from penstock.wire.tasks import UNIT_STOP, Serving, SignedTask, TaskBody, WorkerKeys

_log = logger(__name__)

T = TypeVar("T")
_KEPT_RESULTS_MAX: Final = 4096
#: Far longer than any task lives. A task under a lower fence was signed before the fence was seen, so once the fence is
#: this old its task has expired and is refused for that.
_FENCE_KEPT_S: Final = 86_400
_SCHEMA: Final = """
create table if not exists tasks (
    task_id text primary key, signed blob not null, result blob, acknowledged integer not null default 0
) strict;
create table if not exists fences (
    allocation_id text primary key, fence integer not null, expires_at integer not null
) strict;
create index if not exists fences_by_expiry on fences (expires_at);
create table if not exists units (unit_id text primary key, record blob not null) strict;
create table if not exists probes (id integer primary key, count integer not null) strict;
"""


class UnitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """All that must outlive the agent to find a unit again, or to prove it gone. A `stock` unit's allocation is its
    tenant's, and empty until there is one. The keys of one that serves a function are the sidecar's: they are told to
    it again, and are worth nothing once the worker is gone."""

    unit_id: str
    state: UnitState
    boot_id: str
    uid: int | None = None
    gpu_uuids: list[str] = []
    groups: list[str] = []
    isolated: bool = True
    runtime: str = ""
    pid: int = 0
    started: int = 0
    init_pid: int = 0
    init_started: int = 0
    pid_namespace: int = 0
    exit_code: int | None = None
    exit_class: str = ""
    allocation_id: str = ""
    stock: bool = False
    egress: list[str] = []
    memory_bytes: int = 0
    serving: Serving | None = None
    keys: WorkerKeys | None = None


class Standing(StrEnum):
    """What the journal knows of a task that wants to begin."""

    NEW = "new"
    UNFINISHED = "unfinished"
    DONE = "done"
    STALE = "stale"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Begun:
    """The standing, and the result if there is one."""

    standing: Standing
    result: TaskResult | None = None


class Unwritten(NodeError):
    """The disk took nothing, so what was to be noted first must not begin."""


class Journal:
    """One SQLite file, used by one thread."""

    def __init__(self, path: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        try:
            self._db = self._thread.submit(_open, path).result()
        except sqlite3.DatabaseError as error:
            self._thread.shutdown()
            raise _unwritten(error) from error
        #: Facts that the disk did not take, by what they are of; the thread's own.
        self._owed: dict[tuple[str, str], Callable[[sqlite3.Connection], Any]] = {}
        #: Fences of stops among them.
        self._fences: dict[str, int] = {}
        #: Why the last write was not taken; empty when it was. A read says nothing of it.
        self.trouble = ""

    async def _call(self, work: Callable[[sqlite3.Connection], T], *, of: tuple[str, str] = ("", "")) -> T:
        """Do this now; Unwritten if the disk does not take it. An owed fact of the same is replaced by it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._write, work, of)

    async def _owe(self, work: Callable[[sqlite3.Connection], object], *, of: tuple[str, str]) -> None:
        """Note a fact, now or when the disk takes it; facts are written in the order in which they came."""

        def write() -> None:
            self._owed.pop(of, None)
            self._owed[of] = work
            if (error := self._settle()) is not None:
                FULL.labels("journal").inc()
                _log.warning("journal_owes", what=of[0], id=of[1], error=error.detail)

        await asyncio.get_running_loop().run_in_executor(self._thread, write)

    def _write(self, work: Callable[[sqlite3.Connection], T], of: tuple[str, str]) -> T:
        if self._owed:
            self._settle()
        done = self._transact(work)
        self._owed.pop(of, None)
        return done

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        before = self._db.total_changes
        try:
            with self._db:
                done = work(self._db)
        except sqlite3.DatabaseError as error:
            if not _is_of_the_disk(error):
                raise
            unwritten = _unwritten(error)
            if not self.trouble:
                _log.error("journal_unwritable", code=unwritten.code, error=unwritten.detail)
            self.trouble = unwritten.detail
            raise unwritten from error
        if self.trouble and self._db.total_changes > before:
            _log.info("journal_writable")
            self.trouble = ""
        return done

    def _settle(self) -> Unwritten | None:
        """Write what is owed, in its order, and after trouble anything at all; why not all of it."""
        for of, work in list(self._owed.items()):
            try:
                self._transact(work)
            except Unwritten as error:
                return error
            del self._owed[of]
        self._fences.clear()
        if self.trouble:
            with suppress(Unwritten):
                self._transact(_probe)
        return None

    async def settle(self) -> None:
        """Write what is owed, as far as the disk takes it."""
        if self._owed or self.trouble:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._settle)

    async def begin(self, task: TaskBody, signed: SignedTask, *, expired: bool) -> Begun:
        """Note that a task is about to have effects, unless it had them already, is too old or its fence too low."""
        if task.fence < self._fences.get(task.allocation_id or "", task.fence):
            return Begun(Standing.STALE)

        def begin(db: sqlite3.Connection) -> Begun:
            return _begin(db, task, signed, expired=expired)

        try:
            return await self._call(begin)
        except Unwritten:
            if task.type != UNIT_STOP:
                raise
        await self._owe(begin, of=("begin", task.task_id))
        if task.allocation_id is not None and self._owed:
            self._fences[task.allocation_id] = task.fence
        return Begun(Standing.NEW)

    async def finish(self, result: TaskResult) -> None:
        """Note how a task ended."""
        content = msgspec.msgpack.encode(result)
        await self._owe(
            lambda db: db.execute("update tasks set result = ? where task_id = ?", (content, result.task_id)),
            of=("finish", result.task_id),
        )

    async def unfinished(self) -> list[SignedTask]:
        """Tasks that had begun when the agent ended, oldest first."""
        rows = await self._call(
            lambda db: db.execute("select signed from tasks where result is null order by rowid").fetchall()
        )
        return [msgspec.msgpack.decode(row[0], type=SignedTask) for row in rows]

    async def unacknowledged(self) -> list[TaskResult]:
        """Results that no gateway has acknowledged."""
        rows = await self._call(
            lambda db: db.execute(
                "select result from tasks where result is not null and not acknowledged order by rowid"
            ).fetchall()
        )
        return [msgspec.msgpack.decode(row[0], type=TaskResult) for row in rows]

    async def acknowledge(self, task_id: str) -> None:
        """The gateway has the result; old acknowledged ones are forgotten."""
        await self._owe(lambda db: _acknowledge(db, task_id), of=("acknowledge", task_id))

    async def put_unit(self, record: UnitRecord) -> None:
        """Write a unit's record, before the effect that it tells of."""
        await self._call(_putting(record), of=("unit", record.unit_id))

    async def note_unit(self, record: UnitRecord) -> None:
        """Write what became of a unit."""
        await self._owe(_putting(record), of=("unit", record.unit_id))

    async def drop_unit(self, unit_id: str) -> None:
        """Forget a unit that is proved gone."""
        await self._owe(lambda db: db.execute("delete from units where unit_id = ?", (unit_id,)), of=("unit", unit_id))

    async def units(self) -> list[UnitRecord]:
        """All records."""
        rows = await self._call(lambda db: db.execute("select record from units order by rowid").fetchall())
        return [msgspec.json.decode(row[0], type=UnitRecord) for row in rows]

    def close(self) -> None:
        """Close the file; what is owed gets a last chance."""
        self._thread.submit(self._settle).result()
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()


_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
#: The low byte of an extended error code is the kind.
_KIND: Final = 0xFF


def _is_of_the_disk(error: sqlite3.DatabaseError) -> bool:
    """Not of our statements: those are bugs. A damaged file has no class of its own."""
    return isinstance(error, (sqlite3.OperationalError, sqlite3.InternalError)) or type(error) is sqlite3.DatabaseError


def _unwritten(error: sqlite3.DatabaseError) -> Unwritten:
    kind = getattr(error, "sqlite_errorcode", 0) & _KIND
    if kind in _DAMAGED:
        return Unwritten("journal_damaged", f"the node's journal is damaged: {error}")
    return Unwritten(DISK_FULL if kind == sqlite3.SQLITE_FULL else "disk_failed", f"the node's journal: {error}")


def _probe(db: sqlite3.Connection) -> None:
    db.execute("insert into probes values (0, 1) on conflict (id) do update set count = count + 1")


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level="IMMEDIATE")
    path.chmod(0o600)
    db.execute("pragma journal_mode = wal")
    # Writes are in the kernel when they return, and on the disk soon after: see ADR 27.
    db.execute("pragma synchronous = normal")
    # The keys of a worker that is gone leave no trace.
    db.execute("pragma secure_delete = on")
    db.executescript(_SCHEMA)
    return db


def _putting(record: UnitRecord) -> Callable[[sqlite3.Connection], object]:
    content = msgspec.json.encode(record)
    return lambda db: db.execute("insert or replace into units values (?, ?)", (record.unit_id, content))


def _begin(db: sqlite3.Connection, task: TaskBody, signed: SignedTask, *, expired: bool) -> Begun:
    row = db.execute("select result from tasks where task_id = ?", (task.task_id,)).fetchone()
    if row is not None:
        if row[0] is None:
            return Begun(Standing.UNFINISHED)
        return Begun(Standing.DONE, msgspec.msgpack.decode(row[0], type=TaskResult))
    if expired:
        return Begun(Standing.EXPIRED)
    if task.allocation_id is not None:
        seen = db.execute("select fence from fences where allocation_id = ?", (task.allocation_id,)).fetchone()
        if seen is not None and task.fence < seen[0]:
            return Begun(Standing.STALE)
        _keep_fence(db, task.allocation_id, task.fence, int(task.expires_at.timestamp()))
    db.execute("insert into tasks (task_id, signed) values (?, ?)", (task.task_id, msgspec.msgpack.encode(signed)))
    return Begun(Standing.NEW)


def _keep_fence(db: sqlite3.Connection, allocation_id: str, fence: int, expires_at: int) -> None:
    """Remember this fence and forget old ones. The task is fresh, so its expiry tells the server's time well enough."""
    db.execute("insert or replace into fences values (?, ?, ?)", (allocation_id, fence, expires_at))
    db.execute("delete from fences where expires_at < ?", (expires_at - _FENCE_KEPT_S,))


def _acknowledge(db: sqlite3.Connection, task_id: str) -> None:
    db.execute("update tasks set acknowledged = 1 where task_id = ? and result is not null", (task_id,))
    db.execute(
        "delete from tasks where acknowledged and rowid <="
        " (select coalesce(max(rowid), 0) from tasks where acknowledged) - ?",
        (_KEPT_RESULTS_MAX,),
    )
