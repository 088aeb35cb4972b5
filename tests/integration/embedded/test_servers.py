"""The embedded servers on folders that crashes left behind."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import asyncpg
import pytest

from penstock.embedded import nats, postgres, temporal
from penstock.embedded.child import Child
from penstock.embedded.ports import free_port
from penstock.kit.bus import EVENTS, connect
from penstock.kit.errors import Unavailable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that others cannot read."""
    tmp_path.chmod(0o700)
    return tmp_path


async def _kill(child: Child) -> None:
    child.kill()
    await child.process.wait()


async def _sql(url: str, statement: str) -> object:
    conn = await asyncpg.connect(url)
    try:
        return await conn.fetchval(statement)
    finally:
        await conn.close()


async def test_postgres_keeps_what_was_committed_before_it_was_killed(folder: Path) -> None:
    async with postgres.run(folder / "postgres", free_port(), folder / "log") as (url, child):
        await _sql(url, "create table kept as select 41 + 1 as answer")
        await _kill(child)
    async with postgres.run(folder / "postgres", free_port(), folder / "log") as (url, _):
        assert await _sql(url, "select answer from kept") == 42


async def test_postgres_starts_although_its_pid_file_names_a_living_stranger(folder: Path) -> None:
    async with postgres.run(folder / "postgres", free_port(), folder / "log") as (_, child):
        await _kill(child)
    pid_file = folder / "postgres" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    with subprocess.Popen(["sleep", "60"]) as stranger:
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        async with postgres.run(folder / "postgres", free_port(), folder / "log") as (url, _):
            assert await _sql(url, "select 1") == 1
        stranger.kill()


@pytest.mark.parametrize("left_behind", ["postgres.new", "postgres"])
async def test_postgres_starts_over_when_initialisation_was_cut_short(folder: Path, left_behind: str) -> None:
    (folder / left_behind / "base").mkdir(parents=True)
    (folder / left_behind / "postgresql.conf").write_text("half")
    async with postgres.run(folder / "postgres", free_port(), folder / "log") as (url, _):
        assert await _sql(url, "select 1") == 1
    assert not (folder / "postgres.new").exists()


async def test_a_lost_password_is_an_error_and_never_a_new_database(folder: Path) -> None:
    async with postgres.run(folder / "postgres", free_port(), folder / "log"):
        pass
    (folder / "postgres.password").unlink()
    with pytest.raises(Unavailable, match=r"postgres\.password is gone"):
        await postgres.prepare(folder / "postgres", free_port(), folder / "log")
    assert (folder / "postgres" / "PG_VERSION").exists()


async def test_nats_keeps_its_streams_when_killed_and_asks_for_its_token(folder: Path) -> None:
    async with nats.run(folder / "nats", free_port(), folder / "log") as (url, child):
        async with connect(url, name="test") as bus:
            await bus.ensure_stream(EVENTS)
            await bus.js.publish("evt.test", b"kept")
        await _kill(child)
    async with nats.run(folder / "nats", free_port(), folder / "log") as (url, child):
        async with connect(url, name="test") as bus:
            assert (await bus.js.stream_info("EVENTS")).state.messages == 1
        assert await nats._answers(int(url.rsplit(":", 1)[1]), "wrong") is False


async def test_temporal_answers_again_after_it_was_killed(folder: Path) -> None:
    async with temporal.run(folder / "temporal", free_port(), free_port(), folder / "log") as (_, child):
        await _kill(child)
    async with temporal.run(folder / "temporal", free_port(), free_port(), folder / "log") as (_, child):
        assert child.running


async def test_a_busy_port_is_named_with_its_holder(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port}, wanted for nats, is in use by .*\(pid {os.getpid()}\)"):
            async with nats.run(folder / "nats", port, folder / "log"):
                pass


async def test_secrets_and_logs_are_for_their_owner_only(folder: Path) -> None:
    async with (
        postgres.run(folder / "postgres", free_port(), folder / "pg.log"),
        nats.run(folder / "nats", free_port(), folder / "nats.log"),
    ):
        for file in ("postgres.password", "nats.token", "nats.conf", "pg.log", "nats.log"):
            assert (folder / file).stat().st_mode & 0o077 == 0, file


_OWNER = """
import asyncio, sys
from pathlib import Path
from penstock.embedded import nats, postgres, temporal
from penstock.embedded.ports import free_port
async def main(folder):
    async with postgres.run(folder / "postgres", free_port(), folder / "pg.log") as (url, pg), \\
            nats.run(folder / "nats", free_port(), folder / "nats.log") as (_, n), \\
            temporal.run(folder / "temporal", free_port(), free_port(), folder / "t.log") as (_, t):
        print(pg.pid, n.pid, t.pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main(Path(sys.argv[1])))
"""


def _owner(folder: Path, *prefix: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", _OWNER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _processes_of(folder: Path) -> list[str]:
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(folder) in command and entry.parent.name != str(os.getpid()):
            found.append(command)
    return found


async def _gone(folder: Path, *, within_s: float) -> list[str]:
    deadline = time.monotonic() + within_s
    while (left := _processes_of(folder)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


async def test_no_server_outlives_its_killed_owner(folder: Path) -> None:
    with _owner(folder) as owner:
        pids = await asyncio.to_thread(owner.stdout.readline)
        assert len(pids.split()) == 3
        assert len(_processes_of(folder)) >= 4
        owner.kill()
    assert await _gone(folder, within_s=5) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the suite itself runs as an ordinary user")
async def test_an_ordinary_user_can_run_them(folder: Path) -> None:
    with _owner(folder, "unshare", "--user", "--map-user=1000", "--map-group=1000") as owner:
        pids = (await asyncio.to_thread(owner.stdout.readline)).split()
        assert len(pids) == 3
        # In the owner's own namespace: Postgres did not need another.
        namespaces = {Path(f"/proc/{pid}/ns/user").readlink() for pid in [*pids, str(owner.pid)]}
        assert len(namespaces) == 1
        assert _processes_of(folder)
        assert namespaces != {Path("/proc/self/ns/user").readlink()}
        owner.communicate("\n")
    assert owner.returncode == 0
    assert _processes_of(folder) == []
