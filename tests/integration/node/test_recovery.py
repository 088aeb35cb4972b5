"""An agent that is killed at any point of a unit's start leaves one unit or none, never an orphan."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from node_host import Host, request, tenant_folder
from penstock.kit.ids import new_id
from penstock.node import procfs
from penstock.node.sandbox import hostname
from penstock.wire.link import UnitState
from penstock.wire.tasks import UnitStop
from waiting import attempts

#: Until the go nothing of a unit can live on; after it, it must be found again.
BEFORE_GO = ("recorded", "prepared", "spawned", "noted", "limited")
AFTER_GO = ("gone", "greeted", "running", "done")
_TESTS = Path(__file__).parents[2]


def _kill_at(folder: Path, unit_id: str, stage: str) -> None:
    victim = subprocess.Popen(
        [sys.executable, _TESTS / "node_victim.py", folder, unit_id, stage],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=_TESTS,
        start_new_session=True,
    )
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline().decode().strip() == stage
        victim.send_signal(signal.SIGKILL)


def _living(unit_id: str) -> set[int]:
    """Launchers by their command line, inits by the hosts file they see."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or not procfs.start_time(int(entry.name)):
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            if b"node_victim" in command:
                continue
            inside = b"init.pyc" in command and hostname(unit_id) in (entry / "root/etc/hosts").read_text()
        except OSError:
            continue
        if inside or unit_id.encode() in command:
            found.add(int(entry.name))
    return found


async def _gone(unit_id: str) -> bool:
    async for _ in attempts():
        if not _living(unit_id):
            return True
    return False


@pytest.mark.parametrize("stage", BEFORE_GO)
async def test_killed_before_the_go_nothing_lives_on(node_folder: Path, stage: str) -> None:
    unit_id = new_id("alc")
    await asyncio.to_thread(_kill_at, node_folder, unit_id, stage)
    assert await _gone(unit_id)
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    assert host.units.reports() == []
    assert not (node_folder / "units" / unit_id).exists()
    started = await host.units.start(request(unit_id, gpu_uuids=["SIM-nod_test-5"]))
    assert not started.adopted
    assert (await host.run(unit_id, "echo", "once")).out == "once\n"
    await _end(host, unit_id)


@pytest.mark.parametrize("stage", AFTER_GO)
async def test_killed_after_the_go_the_unit_is_adopted(node_folder: Path, stage: str) -> None:
    unit_id = new_id("alc")
    await asyncio.to_thread(_kill_at, node_folder, unit_id, stage)
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    assert [report.state for report in host.units.reports()] == [UnitState.RUNNING]
    again = await host.units.start(request(unit_id, gpu_uuids=["SIM-nod_test-5"]))
    assert again.adopted
    assert len(_living(unit_id)) == 2
    assert (await host.run(unit_id, "echo", "adopted")).out == "adopted\n"
    await _end(host, unit_id)


async def _end(host: Host, unit_id: str) -> None:
    proof = await host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=["SIM-nod_test-5"]))
    assert proof.clean
    assert not _living(unit_id)
    assert await host.journal.units() == []
    await host.close()


async def test_a_unit_that_ended_while_the_agent_was_away_is_reported(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder())
    unit_id = await host.start()
    record = host.units._units[unit_id].record
    await host.close()
    procfs.kill(record.init_pid, record.init_started)
    assert await procfs.ended(record.init_pid, record.init_started, timeout_s=30)
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    assert [(r.state, r.exit_class) for r in host.units.reports()] == [(UnitState.EXITED, "killed")]
    await host.units.stop_all(0)
    await host.close()


async def test_the_commands_end_and_output_while_the_agent_was_away_are_not_lost(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder())
    unit_id = await host.start(command=["sh", "-c", "sleep 0.3; echo late; exit 4"])
    await host.close()
    await asyncio.sleep(0.6)
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    assert [(r.unit_id, r.state, r.exit_code) for r in host.units.reports()] == [(unit_id, UnitState.EXITED, 4)]
    lines = await asyncio.wait_for(host.logs.take(), 30)
    assert [line.text for line in lines] == ["late"]
    await host.units.stop_all(0)
    await host.close()


async def test_commands_of_a_dead_agent_do_not_live_on(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder())
    unit_id = await host.start()
    sink = os.open("/dev/null", os.O_RDWR)
    await host.units.execute(unit_id, argv=["sleep", "1000"], env={}, cwd="", stdin=sink, stdout=sink, stderr=sink)
    os.close(sink)
    assert "sleep" in (await host.run(unit_id, "sh", "-c", "cat /proc/[0-9]*/comm")).out
    await host.close()
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    assert "sleep" not in (await host.run(unit_id, "sh", "-c", "cat /proc/[0-9]*/comm")).out
    await host.units.stop_all(0)
    await host.close()


async def test_a_pid_that_someone_else_has_by_now_is_left_alone(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder())
    unit_id = await host.start()
    record = host.units._units[unit_id].record
    stranger = subprocess.Popen(["sleep", "100"])
    try:
        await host.units._note(host.units._units[unit_id], pid=stranger.pid, started=record.started - 1)
        assert (await host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=[], grace_s=0))).clean
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        await host.close()
