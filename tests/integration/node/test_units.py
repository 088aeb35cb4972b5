"""Units in real sandboxes: start, use, limits, end, proof."""

import asyncio
import os
import shutil
import tempfile
import venv
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from node_host import Host, request, tenant_folder
from penstock.kit.ids import new_id
from penstock.node import cgroups, cleanup, layout, procfs
from penstock.node.errors import Failed, NoUnit, Refused
from penstock.node.inventory import Simulated
from penstock.wire.link import UnitState
from penstock.wire.tasks import Limits, UnitStop
from waiting import attempts


def _gpu(index: int) -> str:
    return f"SIM-nod_test-{index}"


async def _stop(host: Host, unit_id: str, grace_s: float = 5.0):
    return await host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=[], grace_s=grace_s))


async def test_a_unit_runs_commands_and_leaves_nothing(host: Host) -> None:
    unit_id = await host.start(gpu_uuids=[_gpu(0), _gpu(1)])
    ran = await host.run(unit_id, "sh", "-c", "cat; echo $PENSTOCK_GPUS; exit 7", stdin=b"hello\n")
    assert (ran.code, ran.exit_class) == (7, "exited")
    assert ran.out == f"hello\n{_gpu(0)},{_gpu(1)}\n"
    record = host.units._units[unit_id].record
    proof = await _stop(host, unit_id)
    assert proof.clean
    assert proof.simulated
    assert not cleanup.processes(record)
    assert not (host.folder / "units" / unit_id).exists()
    assert not any(Path(group).exists() for group in record.groups)
    assert host.units.reports() == []


async def test_starting_again_finds_the_running_unit(host: Host) -> None:
    unit_id = await host.start()
    again = await host.units.start(request(unit_id))
    assert again.adopted
    assert len(host.units.reports()) == 1


async def test_an_absent_unit_is_proved_clean(host: Host) -> None:
    proof = await _stop(host, new_id("alc"))
    assert proof.clean


async def test_an_unknown_image_is_named(host: Host) -> None:
    with pytest.raises(Failed) as failed:
        await host.start(image="python:9")
    assert failed.value.code == "unknown_image"
    assert "python:3" in failed.value.detail
    assert host.units.reports() == []


async def test_a_gpu_is_not_given_twice(host: Host) -> None:
    await host.start(gpu_uuids=[_gpu(0)])
    with pytest.raises(Failed) as failed:
        await host.start(gpu_uuids=[_gpu(0)])
    assert failed.value.code == "gpu_busy"
    with pytest.raises(Failed) as failed:
        await host.start(gpu_uuids=["SIM-other-0"])
    assert failed.value.code == "unknown_gpu"


async def test_a_port_inside_is_reached_through_init(host: Host) -> None:
    unit_id = await host.start()
    code = "import socket; s=socket.create_server(('127.0.0.1', 7000)); c,_=s.accept(); c.sendall(b'inside')"
    server = asyncio.create_task(host.python(unit_id, code))
    connected = await _connect(host, unit_id, 7000)
    with connected:
        assert await asyncio.get_running_loop().sock_recv(connected, 100) == b"inside"
    assert (await server).code == 0
    with pytest.raises(Refused) as refused:
        await host.units.connect_port(unit_id, 7001)
    assert refused.value.code == "refused"


async def test_a_server_on_the_sixth_version_alone_is_reached(host: Host) -> None:
    unit_id = await host.start()
    code = "import socket; s=socket.create_server(('::1', 7000), family=10); c,_=s.accept(); c.sendall(b'six')"
    server = asyncio.create_task(host.python(unit_id, code))
    with await _connect(host, unit_id, 7000) as connected:
        assert await asyncio.get_running_loop().sock_recv(connected, 100) == b"six"
    await server


async def _connect(host: Host, unit_id: str, port: int):
    async for _ in attempts():
        try:
            return await host.units.connect_port(unit_id, port)
        except Refused:
            continue
    raise AssertionError("nothing listened")


async def test_no_unit_and_bad_ports_are_refused(host: Host) -> None:
    with pytest.raises(NoUnit):
        await host.units.connect_port("alc_none", 80)
    unit_id = await host.start()
    with pytest.raises(Refused):
        await host.units.connect_port(unit_id, 0)


async def test_commands_that_cannot_run_say_why(host: Host) -> None:
    unit_id = await host.start()
    for argv, code in ((("no-such-command",), "not_found"), (("/etc/passwd",), "not_executable"), ((), "malformed")):
        with pytest.raises(Refused) as refused:
            await host.run(unit_id, *argv)
        assert refused.value.code == code
    with pytest.raises(Refused) as refused:
        await host.run(unit_id, "echo", "a\0b")
    assert refused.value.code == "malformed"
    with pytest.raises(Refused) as refused:
        await host.run(unit_id, "echo", "x" * 200_000)
    assert refused.value.code == "too_large"
    assert (await host.run(unit_id, "true")).code == 0


async def test_a_killed_command_takes_its_children_along(host: Host) -> None:
    unit_id = await host.start()
    sink = os.open("/dev/null", os.O_RDWR)
    execution = await host.units.execute(
        unit_id, argv=["sh", "-c", "sleep 1000 & sleep 1000"], env={}, cwd="", stdin=sink, stdout=sink, stderr=sink
    )
    os.close(sink)
    execution.kill()
    ending = await asyncio.wait_for(execution.wait(), 30)
    assert (ending.code, ending.exit_class) == (137, "killed")
    await asyncio.sleep(0.1)
    assert "sleep" not in (await host.run(unit_id, "sh", "-c", "cat /proc/[0-9]*/comm")).out


async def test_137_without_an_oom_record_is_killed(host: Host) -> None:
    unit_id = await host.start()
    ran = await host.run(unit_id, "sh", "-c", "exit 137")
    assert (ran.code, ran.exit_class) == (137, "killed")


@pytest.mark.skipif("memory" not in cgroups.find().limits, reason="no memory control group here")
async def test_too_much_memory_kills_only_that_command_in_that_unit(host: Host) -> None:
    limits = Limits(memory_bytes=96 << 20, processes_max=64, cpus=2, scratch_bytes=1 << 30)
    greedy, other = await host.start(limits=limits), await host.start(limits=limits)
    ran = await host.python(greedy, "x = bytearray(300 << 20); print(len(x))")
    assert (ran.code, ran.exit_class) == (137, "oom")
    assert (await host.run(greedy, "echo", "still")).out == "still\n"
    assert (await host.run(other, "echo", "here")).out == "here\n"


@pytest.mark.parametrize("limit", [True, False], ids=["group", "rlimit"])
async def test_a_fork_bomb_is_bounded(node_folder: Path, limit: bool) -> None:
    host = Host.open(node_folder, tenant_folder(), limit=limit)
    limits = Limits(memory_bytes=512 << 20, processes_max=40, cpus=1, scratch_bytes=1 << 30)
    unit_id = await host.start(limits=limits)
    code = """
import os, time
made = 0
for _ in range(500):
    try:
        if os.fork() == 0:
            os.close(1); os.close(2); time.sleep(100); os._exit(0)
        made += 1
    except OSError:
        break
print(made)
"""
    ran = await host.python(unit_id, code)
    assert 0 < int(ran.out) < 40
    record = host.units._units[unit_id].record
    assert (await _stop(host, unit_id, grace_s=0.2)).clean
    assert not cleanup.processes(record)
    await host.close()


async def test_memory_is_limited_without_control_groups(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder(), limit=False)
    unit_id = await host.start()
    ran = await host.python(unit_id, "x = bytearray(2 << 30)")
    assert ran.code == 1
    assert "MemoryError" in ran.out
    await host.units.stop_all(0)
    await host.close()


async def test_stop_asks_first_and_kills_what_stays(host: Host) -> None:
    polite = await host.start(command=["sh", "-c", "trap 'echo bye; exit 0' TERM; while :; do sleep 0.05; done"])
    await asyncio.sleep(0.2)
    started = asyncio.get_running_loop().time()
    assert (await _stop(host, polite)).clean
    assert asyncio.get_running_loop().time() - started < 3
    stubborn = await host.start(command=["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"])
    await asyncio.sleep(0.2)
    assert (await _stop(host, stubborn, grace_s=0.3)).clean


async def test_a_folder_that_its_tenant_made_odd_is_deleted(host: Host) -> None:
    unit_id = await host.start()
    code = """
import os
for _ in range(1200):
    os.mkdir('d'); os.chdir('d')
os.chdir('/home/unit'); os.mkdir('closed'); open('closed/file', 'w'); os.chmod('closed', 0)
os.symlink('/etc', 'link')
"""
    assert (await host.python(unit_id, code)).code == 0
    assert (await _stop(host, unit_id, grace_s=0)).clean
    assert Path("/etc/passwd").exists()


async def test_the_units_own_command_is_logged_and_its_end_reported(host: Host) -> None:
    unit_id = await host.start(command=["sh", "-c", "echo out; echo err >&2; exit 3"])
    report = await _exited(host, unit_id)
    assert (report.exit_code, report.exit_class) == (3, "exited")
    lines = await asyncio.wait_for(host.logs.take(), 30)
    assert {(line.stream, line.text) for line in lines} == {("stdout", "out"), ("stderr", "err")}
    with pytest.raises(NoUnit):
        await host.run(unit_id, "true")


async def test_a_command_that_cannot_start_is_an_exit_of_127(host: Host) -> None:
    unit_id = await host.start(command=["no-such-command"])
    report = await _exited(host, unit_id)
    assert report.exit_code == 127


async def _exited(host: Host, unit_id: str):
    async for _ in attempts():
        report = next(report for report in host.units.reports() if report.unit_id == unit_id)
        if report.state is UnitState.EXITED:
            return report
    raise AssertionError("the unit did not end")


async def test_a_long_line_and_odd_bytes_come_flagged(host: Host) -> None:
    code = "import sys; sys.stdout.buffer.write(b'x' * 300_000 + b'\\n' + b'\\xff\\xfe odd\\n')"
    unit_id = await host.start(command=["python3", "-c", code])
    await _exited(host, unit_id)
    lines = await asyncio.wait_for(host.logs.take(), 30)
    long, odd = lines[:-1], lines[-1]
    assert sum(len(line.text) for line in long) == 300_000
    assert all(line.split and len(line.text) <= 64 << 10 for line in long)
    assert odd.lossy
    assert "odd" in odd.text


async def test_a_killed_init_is_an_ended_unit(host: Host) -> None:
    unit_id = await host.start()
    record = host.units._units[unit_id].record
    procfs.kill(record.init_pid, record.init_started)
    report = await _exited(host, unit_id)
    assert report.exit_class == "killed"
    assert (await _stop(host, unit_id)).clean


async def test_a_proof_fails_while_a_process_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    unit_id = await host.start(gpu_uuids=[_gpu(3)])
    monkeypatch.setattr(cleanup, "_KILL_TIMEOUT_S", 0.05)
    monkeypatch.setattr(procfs, "kill", lambda *_: None)
    proof = await _stop(host, unit_id, grace_s=0)
    assert not proof.clean
    assert not proof.processes_gone
    assert not proof.scratch_deleted
    assert (host.folder / "units" / unit_id).exists()
    monkeypatch.undo()
    assert (await _stop(host, unit_id, grace_s=0)).clean


async def test_units_run_as_users_of_their_own(host: Host) -> None:
    if os.geteuid() != 0:
        pytest.skip("an ordinary user has only itself")
    first, second = await host.start(), await host.start()
    owners = set()
    for unit_id in (first, second):
        assert (await host.run(unit_id, "touch", "/home/unit/made")).code == 0
        owners.add((host.folder / "units" / unit_id / "home" / "made").stat().st_uid)
    assert len(owners) == 2
    assert 0 not in owners


async def test_twenty_units_start_at_once(host: Host) -> None:
    started = await asyncio.gather(*(host.start() for _ in range(20)))
    assert len(set(started)) == 20
    outputs = await asyncio.gather(*(host.run(unit_id, "hostname") for unit_id in started))
    assert [ran.out.strip().replace("-", "_") for ran in outputs] == list(started)


async def test_a_runtime_below_tmp_is_still_seen(node_folder: Path) -> None:
    """As in a clone of the project below /tmp, which units see their own folder as."""
    place = Path(tempfile.mkdtemp(prefix="penstock-tenant-", dir="/tmp"))
    try:
        venv.create(place / "tenant", symlinks=True, with_pip=False)
        host = Host.open(node_folder, place / "tenant")
        unit_id = await host.start()
        ran = await host.python(unit_id, "import sys; print(sys.prefix)")
        assert ran.out.strip() == str(place / "tenant")
        assert (await host.run(unit_id, "sh", "-c", "echo x > /tmp/made && rm /tmp/made")).code == 0
        assert (await host.run(unit_id, "touch", str(place / "tenant" / "made"))).code != 0
        await host.units.stop_all(0)
        await host.close()
    finally:
        shutil.rmtree(place)


class Watched(Simulated):
    """GPUs shared by MPS that note which other places were held when one of them was to be scrubbed."""

    def __init__(self) -> None:
        super().__init__("nod_test", 1, layout.parse("mps:3"))
        self.held: list[set[str]] = []

    async def scrub(self, uuids: Sequence[str], held: Collection[str] = ()) -> bool:
        self.held.append(set(held))
        return True


async def test_of_shares_that_are_given_back_together_the_last_finds_nobody_else(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = Watched()
    monkeypatch.setattr(host.units, "_inventory", inventory)
    shares = [gpu.uuid for gpu in inventory.listing().gpus]
    units = [await host.start(gpu_uuids=[share]) for share in shares]
    assert (await _stop(host, units[0], grace_s=0)).clean
    assert inventory.held == [set(shares[1:])]
    proofs = await asyncio.gather(*(_stop(host, unit_id, grace_s=0) for unit_id in units[1:]))
    assert all(proof.clean for proof in proofs)
    assert inventory.held[-1] == set()
    assert len(inventory.held[1]) == 1
