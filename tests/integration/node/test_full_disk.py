"""A node's disk without space: nothing new begins and says why, what ended is told, and all is written later."""

import asyncio
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from node_executor import Desk, sign
from node_host import Host, request
from penstock.kit.ids import new_id
from penstock.node.codes import Codes
from penstock.node.errors import Failed, NodeError
from penstock.node.journal import Journal, Unwritten
from penstock.wire.link import UnitState
from penstock.wire.tasks import UNIT_START, UNIT_STOP, Code, Outcome, UnitStop

NEW = new_id("alc")
#: Runs with a tmpfs of its own at argv[1]: a journal that is filled up, used, and freed again.
_ON_SMALL_DISK = """
import asyncio, os, sys
from pathlib import Path
from node_executor import sign
from penstock.node.journal import Journal, Unwritten, UnitRecord
from penstock.wire.link import TaskResult, UnitState
from penstock.wire.tasks import UNIT_START, UNIT_STOP, Outcome, TaskBody, UnitStop
import msgspec

folder = Path(sys.argv[1])

def task(kind, allocation, fence):
    signed = sign(kind, UnitStop(unit_id="alc_" + allocation, gpu_uuids=[]), allocation_id=allocation, fence=fence)
    return msgspec.msgpack.decode(signed.body, type=TaskBody), signed

async def refused(work):
    try:
        await work
    except Unwritten as error:
        return error.code
    return "written"

async def main():
    journal = Journal(folder / "journal.db")
    first, signed = task(UNIT_START, "a", 1)
    await journal.begin(first, signed, expired=False)
    await journal.put_unit(UnitRecord(unit_id="alc_a", state=UnitState.RUNNING, boot_id="b"))
    with (folder / "fill").open("wb", buffering=0) as fill:
        try:
            while fill.write(bytes(4096)):
                pass
        except OSError:
            pass
    new, new_signed = task(UNIT_START, "b", 1)
    codes = {await refused(journal.begin(new, new_signed, expired=False)) for _ in range(3)}
    codes |= {await refused(journal.put_unit(UnitRecord(unit_id=f"alc_{n}", state=UnitState.STARTING, boot_id="b")))
              for n in range(40)} - {"written"}
    assert codes <= {"disk_full", "disk_failed"} and codes, codes
    stop, stop_signed = task(UNIT_STOP, "a", 2)
    begun = await journal.begin(stop, stop_signed, expired=False)
    late, late_signed = task(UNIT_START, "a", 1)
    stale = await journal.begin(late, late_signed, expired=False)
    for one in (first, stop):
        await journal.finish(TaskResult(task_id=one.task_id, fence=one.fence, outcome=Outcome.SUCCEEDED))
    await journal.note_unit(UnitRecord(unit_id="alc_a", state=UnitState.EXITED, boot_id="b"))
    await journal.drop_unit("alc_a")
    await journal.acknowledge(first.task_id)
    (folder / "fill").unlink()
    await journal.settle()
    journal.close()
    again = Journal(folder / "journal.db")
    kept = [result.task_id for result in await again.unacknowledged()]
    stale_again = await again.begin(late, late_signed, expired=False)
    left = [unit.unit_id for unit in await again.units() if unit.unit_id == "alc_a"]
    print(begun.standing, stale.standing, stale_again.standing, kept == [stop.task_id],
          await again.unfinished() == [], left)

asyncio.run(main())
"""


#: An agent that starts on a disk without space waits, and goes on when there is some.
_STARTED_FULL = """
import asyncio, sys
from pathlib import Path
from penstock.node.journal import Journal, Unwritten
from penstock.node.room import wait_for_room

folder = Path(sys.argv[1])

async def main():
    with (folder / "fill").open("wb", buffering=0) as fill:
        try:
            while fill.write(bytes(4096)):
                pass
        except OSError:
            pass
    try:
        Journal(folder / "journal.db")
    except Unwritten as error:
        print(error.code)
    waiting = asyncio.create_task(wait_for_room(folder, every_s=0.05))
    await asyncio.sleep(0.5)
    print(waiting.done())
    (folder / "fill").unlink()
    async with asyncio.timeout(20):
        await waiting
    Journal(folder / "journal.db").close()
    print(sorted(file.name for file in folder.iterdir()))

asyncio.run(main())
"""


def _on_small_disk(folder: Path, program: str, size: str) -> str:
    """What the program prints, run with a tmpfs of this size at the folder."""
    unshare = shutil.which("unshare")
    assert unshare is not None, "unshare (util-linux) is needed"
    mount = 'mount -t tmpfs -o size="$4" small "$1" && exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [
            unshare,
            "--user",
            "--map-root-user",
            "--mount",
            "sh",
            "-c",
            mount,
            "sh",
            folder,
            sys.executable,
            program,
            size,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_journal_on_a_full_disk_begins_nothing_new_and_loses_no_fact(tmp_path: Path) -> None:
    printed = _on_small_disk(tmp_path, _ON_SMALL_DISK, "256k")
    assert printed.strip().splitlines()[-1:] == ["new stale stale True True []"], printed


def test_an_agent_that_starts_on_a_full_disk_waits_for_room_and_says_so(tmp_path: Path) -> None:
    printed = _on_small_disk(tmp_path, _STARTED_FULL, "2m").splitlines()
    assert [line for line in printed if "disk_full" in line and "the agent waits" in line]
    assert [line for line in printed if "disk_has_room" in line]
    assert [line for line in printed if line in ("disk_full", "disk_failed")]
    assert "False" in printed
    assert printed[-1] == "['journal.db']"


class _Full:
    """A connection whose disk takes nothing."""

    def __init__(self, db: sqlite3.Connection, error: sqlite3.DatabaseError) -> None:
        self._db = db
        self._error = error

    def __enter__(self) -> "_Full":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing was begun."""

    @property
    def total_changes(self) -> int:
        return self._db.total_changes

    def execute(self, statement: str, *values: Any) -> Any:
        if statement.startswith("select"):
            return self._db.execute(statement, *values)
        raise self._error


def _error(kind: type[sqlite3.DatabaseError], words: str, code: int) -> sqlite3.DatabaseError:
    error = kind(words)
    error.sqlite_errorcode = code
    return error


NO_SPACE = _error(sqlite3.OperationalError, "database or disk is full", sqlite3.SQLITE_FULL)
DAMAGED = _error(sqlite3.DatabaseError, "database disk image is malformed", sqlite3.SQLITE_CORRUPT)


@contextmanager
def full(host: Host, error: sqlite3.DatabaseError = NO_SPACE) -> Iterator[None]:
    """The journal's disk takes nothing while inside."""
    db = host.journal._db
    host.journal._db = _Full(db, error)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        host.journal._db = db


@pytest.mark.parametrize(("error", "code"), [(NO_SPACE, "disk_full"), (DAMAGED, "journal_damaged")])
async def test_units_end_and_stop_on_a_full_disk_and_new_ones_are_refused(
    host: Host, error: sqlite3.DatabaseError, code: str
) -> None:
    desk = Desk(host)
    running, ending = await host.start(), await host.start()
    assert host.journal.trouble == ""
    with full(host, error):
        refused = await desk.ask(sign(UNIT_START, request(NEW)))
        assert (refused.outcome, refused.error_code) == (Outcome.REFUSED, code)
        assert str(error) in host.journal.trouble
        with pytest.raises(NodeError) as failed:
            await host.units.start(request(new_id("alc")))
        assert failed.value.code == code
        host.units.kill(ending, "a test")
        async with asyncio.timeout(30):
            while {report.unit_id: report.state for report in host.units.reports()}[ending] is not UnitState.EXITED:
                await asyncio.sleep(0.05)
        stopped = await desk.ask(sign(UNIT_STOP, UnitStop(unit_id=running, gpu_uuids=[])))
        assert stopped.outcome is Outcome.SUCCEEDED
        await host.journal.settle()
        assert str(error) in host.journal.trouble
    await host.journal.settle()
    assert host.journal.trouble == ""
    assert [(record.unit_id, record.state) for record in await host.journal.units()] == [(ending, UnitState.EXITED)]
    assert await host.journal.unfinished() == []
    started = await desk.ask(sign(UNIT_START, request(NEW)))
    assert started.outcome is Outcome.SUCCEEDED


async def test_trouble_ends_by_itself_when_nothing_is_owed(host: Host) -> None:
    with full(host), pytest.raises(NodeError):
        await host.units.start(request(new_id("alc")))
    await host.journal.settle()
    assert host.journal.trouble == ""


def test_a_damaged_journal_is_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(Unwritten) as failed:
        Journal(path)
    assert failed.value.code == "journal_damaged"
    assert "damaged: file is not a database" in failed.value.detail


async def test_code_that_finds_no_space_takes_that_of_older_code_and_then_says_so(tmp_path: Path) -> None:
    failures = 0

    async def fetch(allocation_id: str) -> AsyncIterator[bytes]:
        nonlocal failures
        failures += 1
        yield b"x"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    codes = Codes(tmp_path, fetch, bytes_max=1 << 20)
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(Failed) as failed:
        await codes.get(Code(sha256="0" * 64, bytes=10), "alc_x")
    assert (failed.value.code, failures, list(tmp_path.iterdir())) == ("disk_full", 2, [])
