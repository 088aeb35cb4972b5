"""Tenants' environments: built once from a lock, used read-only, whole or not there."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from node_executor import Desk, sign
from node_host import Host, order, request, tenant_folder
from penstock.kit.ids import new_id
from penstock.node import environments
from penstock.node.builder import Budget
from penstock.node.errors import Failed, Refused
from penstock.node.tasks import CONCURRENCY
from penstock.wire import locks
from penstock.wire.tasks import RUNTIME_BUILD, UNIT_STOP, Outcome, RuntimeBuild, RuntimeBuilt, RuntimeLock, UnitStop
from wheels import sdist, wheel

_TESTS = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder of packages that the installer's user can read."""
    folder = tmp_path / "packages"
    folder.mkdir()
    return folder


@pytest.fixture
async def host(node_folder: Path, packages: Path) -> AsyncIterator[Host]:
    """A node that builds from that folder alone."""
    host = Host.open(node_folder, tenant_folder(), packages=packages)
    yield host
    await host.units.stop_all(0)
    await host.close()


def _left(host: Host) -> list[str]:
    return sorted(entry.name for entry in (host.folder / "runtimes").iterdir())


async def test_a_unit_imports_what_the_lock_names_and_cannot_change_it(host: Host, packages: Path) -> None:
    files = {"tiny/__init__.py": "VERSION = '1.0'\ndef say(): print('said')\n"}
    wanted = order(wheel(packages, files=files))
    built = await host.build_as(wanted)
    assert built.bytes > 0
    assert _left(host) == [built.digest]
    folder = host.folder / "runtimes" / built.digest
    assert list(folder.glob("lib/*/site-packages/tiny/__pycache__/*.pyc")), "not compiled for units, which cannot write"
    if os.geteuid() == 0:
        assert (folder / "bin").stat().st_uid != 0
    unit_id = await host.start(runtime=built.digest)
    ran = await host.run(unit_id, "python", "-c", "import sys, tiny; print(tiny.VERSION, sys.prefix)")
    assert ran.out == f"1.0 {folder}\n"
    assert (await host.run(unit_id, "tiny-say")).out == "said\n"
    write = f"open({str(folder / 'bin' / 'evil')!r}, 'w')"
    assert "Read-only file system" in (await host.python(unit_id, write)).out
    other = await host.start()
    assert "No module named 'tiny'" in (await host.python(other, "import tiny")).out
    assert (await host.run(other, "ls", str(folder))).code != 0, "it is shown to units of others"


async def test_the_units_own_command_has_the_packages_too(host: Host, packages: Path) -> None:
    built = await host.build(wheel(packages))
    unit_id = await host.start(runtime=built.digest, command=["python", "-c", "import tiny; raise SystemExit(7)"])
    async with asyncio.timeout(20):
        while host.units._units[unit_id].record.exit_code is None:
            await asyncio.sleep(0.02)
    assert host.units._units[unit_id].record.exit_code == 7


async def test_it_is_built_once_however_often_it_is_asked_for(node_folder: Path, packages: Path) -> None:
    stages: list[str] = []
    host = Host.open(node_folder, tenant_folder(), packages=packages, on_stage=stages.append)
    wanted = order(wheel(packages))
    first, second = await asyncio.gather(host.build_as(wanted), host.build_as(wanted))
    assert first == second
    shutil.rmtree(packages)
    again = await host.build_as(wanted)
    assert (again.bytes, again.seconds) == (first.bytes, 0.0)
    assert stages.count("begun") == 1
    await host.close()


async def test_an_environment_that_is_not_there_is_named(host: Host) -> None:
    with pytest.raises(Failed) as failed:
        await host.start(runtime="0" * 64)
    assert failed.value.code == "no_runtime"
    with pytest.raises(Refused):
        await host.start(runtime="../../etc")
    assert host.units.reports() == []


async def test_another_file_than_the_locks_is_refused(host: Host, packages: Path) -> None:
    line = wheel(packages)
    wheel(packages, files={"tiny/more.py": "EVIL = True\n"})
    with pytest.raises(Failed) as failed:
        await host.build(line)
    assert failed.value.code == "runtime_failed"
    assert "hash" in failed.value.detail.lower()
    assert "\n" not in failed.value.detail
    assert _left(host) == []


async def test_source_packages_are_refused_and_never_run(host: Host, packages: Path, tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    with pytest.raises(Failed) as failed:
        await host.build(sdist(packages, "fromsource", canary=canary))
    assert failed.value.code == "runtime_failed"
    assert "fromsource" in failed.value.detail
    assert not canary.exists()


async def test_no_code_of_a_package_runs_during_the_build(host: Host, packages: Path, tmp_path: Path) -> None:
    """Neither of a `.pth` file, nor of what imports at the interpreter's start would take."""
    canary = tmp_path / "ran"
    tmp_path.chmod(0o777)
    code = f"open({str(canary)!r}, 'w').close()\n"
    files = {"evil.pth": f"import builtins; builtins.open({str(canary)!r}, 'w')\n", "sitecustomize.py": code}
    first = wheel(packages, files=files)
    built = await host.build(first, wheel(packages, "second"))
    assert list((host.folder / "runtimes" / built.digest).glob("lib/*/site-packages/evil.pth"))
    assert not canary.exists()


async def test_a_lock_that_is_none_or_not_its_digests_is_refused(host: Host) -> None:
    lock = "tiny==1.0 --hash=sha256:" + "0" * 64 + "\n"
    for digest, packed in (
        ("0" * 64, locks.pack(lock)),
        (locks.digest("python:3", "-e ."), locks.pack("-e .")),
        (locks.digest("python:3", lock), b"garbage"),
    ):
        with pytest.raises(Refused):
            await host.build_as(RuntimeBuild(runtime=RuntimeLock(digest=digest, base="python:3", lock=packed)))
    assert _left(host) == []


async def test_too_big_or_too_slow_leaves_nothing(node_folder: Path, packages: Path) -> None:
    line = wheel(packages, files={"tiny/data.txt": os.urandom(1 << 20).hex()})
    for budget, code in (
        (Budget(seconds=60, bytes_max=1 << 20), "runtime_too_big"),
        (Budget(seconds=0.01, bytes_max=64 << 20), "runtime_timeout"),
    ):
        host = Host.open(node_folder, tenant_folder(), packages=packages, budget=budget)
        with pytest.raises(Failed) as failed:
            await host.build(line)
        assert failed.value.code == code
        assert _left(host) == []
        await host.close()


async def test_the_longest_unused_make_room_but_none_in_use(
    node_folder: Path, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "FRESH_S", 0.0)
    lines = [wheel(packages, f"big{n}", files={f"big{n}/data.txt": os.urandom(512 << 10).hex()}) for n in range(4)]
    host = Host.open(node_folder, tenant_folder(), packages=packages, runtimes_bytes_max=3 << 20)
    used = (await host.build(lines[0])).digest
    unit_id = await host.start(runtime=used)
    idle = (await host.build(lines[1])).digest
    for age, digest in ((2000, used), (1000, idle)):
        then = time.time() - age
        os.utime(host.folder / "runtimes" / digest / "penstock.json", (then, then))
    third = (await host.build(lines[2])).digest
    assert _left(host) == sorted([used, third]), "the older one is in use"
    assert (await host.python(unit_id, "import big0")).code == 0
    await host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=[], grace_s=0))
    fourth = (await host.build(lines[3])).digest
    assert _left(host) == sorted([third, fourth])
    await host.close()


async def test_killed_during_the_build_nothing_is_there_by_half(node_folder: Path, packages: Path) -> None:
    wanted = order(wheel(packages))
    await asyncio.to_thread(_kill_at, node_folder, packages, wanted, "installed")
    assert [entry.name[0] for entry in (node_folder / "runtimes").iterdir()] == ["."]
    host = Host.open(node_folder, tenant_folder(), packages=packages)
    assert _left(host) == []
    built = await host.build_as(wanted)
    assert _left(host) == [built.digest]
    await host.close()


def _kill_at(folder: Path, packages: Path, wanted: RuntimeBuild, stage: str) -> None:
    lock = locks.unpack(wanted.runtime.lock)
    victim = subprocess.Popen(
        [sys.executable, _TESTS / "build_victim.py", folder, packages, lock, stage],
        stdout=subprocess.PIPE,
        cwd=_TESTS,
        start_new_session=True,
    )
    with victim:
        assert victim.stdout is not None
        assert victim.stdout.readline().decode().strip() == stage
        victim.send_signal(signal.SIGKILL)


async def test_a_base_of_another_interpreter_is_built_for_again(host: Host, packages: Path) -> None:
    wanted = order(wheel(packages))
    built = await host.build_as(wanted)
    marker = host.folder / "runtimes" / built.digest / "penstock.json"
    marker.write_text(marker.read_text().replace("3.", "2.", 1))
    with pytest.raises(Failed):
        await host.units.start(request(new_id("alc"), runtime=built.digest))
    assert (await host.build_as(wanted)).seconds > 0
    await host.start(runtime=built.digest)


async def test_units_stop_however_many_builds_wait(host: Host) -> None:
    unit_id = await host.start()
    begun, never = asyncio.Event(), asyncio.Event()
    waiting: list[str] = []

    async def hold(wanted: RuntimeBuild) -> RuntimeBuilt:
        waiting.append(wanted.runtime.digest)
        if len(waiting) == CONCURRENCY:
            begun.set()
        await never.wait()
        return RuntimeBuilt(digest="", bytes=0, seconds=0.0)

    desk = Desk(host, handlers={RUNTIME_BUILD: hold})
    desk.tell_time()
    build = RuntimeBuild(runtime=RuntimeLock(digest="0" * 64, base="python:3", lock=b""))
    for _ in range(CONCURRENCY + 5):
        desk.executor.submit(sign(RUNTIME_BUILD, build, allocation_id=unit_id))
    await asyncio.wait_for(begun.wait(), 20)
    stopped = await desk.ask(sign(UNIT_STOP, UnitStop(unit_id=unit_id, gpu_uuids=[]), allocation_id=unit_id, fence=2))
    assert stopped.outcome is Outcome.SUCCEEDED
    await desk.executor.close()


async def test_a_build_has_bounded_memory(host: Host, node_folder: Path) -> None:
    assert host.builder is not None
    with pytest.raises(Failed, match=r": 8388608$"):
        await host.builder._run(node_folder, (), "/bin/sh", "-c", "ulimit -v; exit 1")
