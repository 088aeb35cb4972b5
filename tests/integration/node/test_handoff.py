"""Stock units: warm without a tenant, handed to exactly one, and from then on like any other unit."""

import asyncio
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from node_executor import Desk, sign, sign_handoff
from node_host import Host, Ran, handoff, request, tenant_folder, text_of
from penstock.kit.ids import new_id
from penstock.node import procfs
from penstock.node.errors import Failed, NoUnit, Refused
from penstock.wire.link import UnitState
from penstock.wire.tasks import UNIT_STOP, Outcome, SecretRef, SignedTask, TaskBody, UnitStarted, UnitStop

_TESTS = Path(__file__).parents[2]
#: Leaves a line in the unit for each time that it runs.
_COMMAND = ["python3", "-c", "open('/tmp/ran', 'a').write('once\\n'); import time; time.sleep(600)"]
_STAGES = ("handoff_recorded", "handoff_sent", "handoff_done", "done")


async def _stop(host: Host, unit_id: str, **changes: object):
    return await host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=[], grace_s=0, **changes))


async def _eventually(host: Host, unit_id: str, *argv: str) -> Ran:
    async with asyncio.timeout(20):
        while (ran := await host.run(unit_id, *argv)).code != 0:
            await asyncio.sleep(0.02)
    return ran


async def test_a_stock_unit_becomes_its_tenants(host: Host) -> None:
    unit_id = await host.stock(gpu_uuids=["SIM-nod_test-1"])
    assert [(r.unit_id, r.state) for r in host.units.reports()] == [(unit_id, UnitState.RUNNING)]
    assert (await host.run(unit_id, "sh", "-c", "cat /proc/[0-9]*/cmdline")).out.count("zygote") == 1
    code = (
        "import json, os, sys; print(json.dumps([os.getppid(), 'ssl' in sys.modules, os.environ['GREETING'],"
        " os.environ['PENSTOCK_UNIT'], os.environ['PENSTOCK_ALLOCATION'], os.getcwd(), os.getsid(0) == os.getpid()]));"
        " open('/tmp/there', 'w'); import time; time.sleep(600)"
    )
    tenant = await host.hand_over(unit_id, "python3", "-c", code, env={"GREETING": "hello"})
    await _eventually(host, unit_id, "test", "-e", "/tmp/there")
    printed = (
        await host.run(unit_id, "sh", "-c", "echo $GREETING $PENSTOCK_UNIT $PENSTOCK_ALLOCATION $PENSTOCK_GPUS")
    ).out
    assert printed == f"hello {unit_id} {tenant} SIM-nod_test-1\n"
    processes = await host.run(unit_id, "sh", "-c", "for p in /proc/[0-9]*; do cat $p/cmdline; echo; done")
    assert processes.out.count("zygote") == 1, "the zygote itself is the command"
    assert [(r.unit_id, r.state) for r in host.units.reports()] == [(unit_id, UnitState.RUNNING)]
    assert (await _stop(host, unit_id)).clean


async def test_the_command_writes_to_the_log_and_its_end_is_the_units(host: Host) -> None:
    unit_id = await host.stock()
    code = (
        "import os, sys; print(os.environ['PENSTOCK_ALLOCATION'], sys.argv); print('e', file=sys.stderr); sys.exit(7)"
    )
    tenant = await host.hand_over(unit_id, "python3", "-c", code, "a", "b")
    ended = await host.ended(unit_id)
    assert ended.exit_code == 7
    assert text_of(ended.lines, "stdout") == f"{tenant} ['-c', 'a', 'b']\n"
    assert text_of(ended.lines, "stderr") == "e\n"
    with pytest.raises(NoUnit):
        await host.run(unit_id, "true")
    assert (await _stop(host, unit_id)).clean


async def test_what_is_no_python_is_executed(host: Host) -> None:
    unit_id = await host.stock()
    await host.hand_over(unit_id, "sh", "-c", "echo $0 $A; cat /proc/[0-9]*/cmdline | grep -c [z]ygote", env={"A": "b"})
    ended = await host.ended(unit_id)
    assert (ended.exit_code, text_of(ended.lines, "stdout")) == (1, "sh b\n0\n")
    killed = await host.stock()
    await host.hand_over(killed, "python3", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert (await host.ended(killed)).exit_code == 143
    missing = await host.stock()
    await host.hand_over(missing, "no-such-command")
    assert (await host.ended(missing)).exit_code == 127


async def test_without_a_command_the_unit_is_there_for_others(host: Host) -> None:
    unit_id = await host.stock()
    tenant = await host.hand_over(unit_id)
    assert (await host.run(unit_id, "sh", "-c", "echo $PENSTOCK_ALLOCATION")).out == f"{tenant}\n"
    gone = await _eventually(host, unit_id, "sh", "-c", "! cat /proc/[0-9]*/cmdline | grep [z]ygote")
    assert gone.code == 0


async def test_a_killed_zygote_only_costs_time(host: Host) -> None:
    unit_id = await host.stock()
    await host.run(unit_id, "sh", "-c", "kill -9 $(grep -l [z]ygote /proc/[0-9]*/cmdline | cut -d/ -f3)")
    await host.hand_over(unit_id, "python3", "-c", "print('ran')")
    ended = await host.ended(unit_id)
    assert (ended.exit_code, text_of(ended.lines, "stdout")) == (0, "ran\n")


async def test_one_unit_has_one_tenant(host: Host) -> None:
    unit_id = await host.stock()
    tenant = await host.hand_over(unit_id, *_COMMAND)
    again = await host.units.handoff(handoff(unit_id, tenant, command=_COMMAND, env={"LATE": "x"}))
    assert again.adopted
    with pytest.raises(Refused) as refused:
        await host.hand_over(unit_id, *_COMMAND)
    assert refused.value.code == "taken"
    with pytest.raises(Refused) as refused:
        await _stop(host, unit_id, allocation_id="alc_other")
    assert refused.value.code == "taken"
    assert (await _eventually(host, unit_id, "cat", "/tmp/ran")).out == "once\n"
    assert (await host.run(unit_id, "sh", "-c", "echo $LATE")).out == "\n"
    assert (await _stop(host, unit_id, allocation_id=tenant)).clean


async def test_init_itself_knows_its_tenant(host: Host) -> None:
    """Should the agent's record ever be wrong."""
    unit_id = await host.stock()
    tenant = await host.hand_over(unit_id, *_COMMAND)
    await host.units._note(host.units._units[unit_id], allocation_id="")
    with pytest.raises(Refused) as refused:
        await host.hand_over(unit_id, *_COMMAND)
    assert refused.value.code == "taken"
    await host.units._note(host.units._units[unit_id], allocation_id=tenant)
    assert (await _eventually(host, unit_id, "cat", "/tmp/ran")).out == "once\n"


async def test_only_stock_is_handed_over(host: Host) -> None:
    with pytest.raises(NoUnit):
        await host.hand_over("alc_none")
    with pytest.raises(Refused) as refused:
        await host.hand_over(await host.start())
    assert refused.value.code == "not_stock"


async def test_a_handoff_that_fails_leaves_no_unit(host: Host) -> None:
    unit_id = await host.stock()
    await host.run(unit_id, "sh", "-c", "dd if=/dev/zero of=/run/secrets/full bs=64k 2>/dev/null")
    with pytest.raises(Failed) as failed:
        await host.hand_over(unit_id, "true", secrets=[SecretRef(name="key", version=1)], values={"key": b"x" * 5000})
    assert failed.value.code == "handoff_failed"
    assert host.units.reports() == []


async def test_stock_whose_runtime_cannot_warm_up_is_a_failure(host: Host) -> None:
    runtime = host.units._runtimes.find("python:3")
    broken = host.folder / "work" / "broken.pyc"
    broken.write_bytes(b"no program")
    broken.chmod(0o644)
    object.__setattr__(runtime, "zygote", broken)
    with pytest.raises(Failed) as failed:
        await host.stock()
    assert failed.value.code == "zygote_failed"
    assert host.units.reports() == []


def _kill_at(folder: Path, unit_id: str, stage: str, task: SignedTask) -> None:
    victim = subprocess.Popen(
        [sys.executable, _TESTS / "node_victim.py", folder, unit_id, stage],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_TESTS,
        start_new_session=True,
    )
    with victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        victim.stdin.write(msgspec.msgpack.encode(task))
        victim.stdin.close()
        # The adoption of the unit is logged before it.
        assert stage in (line.decode().strip() for line in victim.stdout)
        victim.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("stage", _STAGES)
async def test_killed_at_any_stage_the_command_runs_once_and_for_its_tenant(node_folder: Path, stage: str) -> None:
    host = Host.open(node_folder, tenant_folder())
    unit_id, tenant = await host.stock(), new_id("alc")
    await host.close()
    task = sign_handoff(handoff(unit_id, tenant, command=_COMMAND))
    await asyncio.to_thread(_kill_at, node_folder, unit_id, stage, task)
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    assert [report.state for report in host.units.reports()] == [UnitState.RUNNING]
    with pytest.raises(Refused) as refused:
        await host.hand_over(unit_id, *_COMMAND)
    assert refused.value.code == "taken"
    desk = Desk(host)
    await desk.executor.resume()
    desk.tell_time()
    result = await desk.result()
    assert result.outcome is Outcome.SUCCEEDED
    started = msgspec.msgpack.decode(result.answer, type=UnitStarted)
    assert started.adopted == (stage in ("handoff_sent", "handoff_done"))
    assert await desk.ask(task) == result
    assert (await _eventually(host, unit_id, "cat", "/tmp/ran")).out == "once\n"
    assert (await host.run(unit_id, "sh", "-c", "echo $PENSTOCK_ALLOCATION")).out == f"{tenant}\n"
    init = host.units._units[unit_id].record.init_pid
    assert (await _stop(host, unit_id)).clean
    assert not procfs.start_time(init)
    assert await host.journal.units() == []
    await host.close()


async def _begin(host: Host, task: SignedTask) -> None:
    """As an agent that dies right after noting it."""
    await host.journal.begin(msgspec.msgpack.decode(task.body, type=TaskBody), task, expired=False)


async def test_a_handoff_that_expired_while_the_agent_was_away_stops_the_unit(host: Host) -> None:
    untouched, anothers = await host.stock(), await host.stock()
    await host.hand_over(anothers, *_COMMAND)
    for unit_id in (untouched, anothers):
        await _begin(host, sign_handoff(handoff(unit_id, "alc_late", command=_COMMAND)))
    desk = Desk(host)
    await desk.executor.resume()
    desk.tell_time(timedelta(hours=1))
    results = [await desk.result(), await desk.result()]
    assert sorted((r.outcome, r.error_code) for r in results) == [
        (Outcome.FAILED, "expired"),
        (Outcome.REFUSED, "taken"),
    ]
    assert [report.unit_id for report in host.units.reports()] == [anothers]


async def test_handoffs_are_fenced_and_expire(host: Host) -> None:
    unit_id, desk = await host.stock(), Desk(host)
    stop = sign(UNIT_STOP, UnitStop(unit_id="alc_gone", gpu_uuids=[]), allocation_id="alc_a", fence=5)
    assert (await desk.ask(stop)).outcome is Outcome.SUCCEEDED
    stale = sign_handoff(handoff(unit_id, "alc_a", command=_COMMAND), fence=4)
    old = sign_handoff(handoff(unit_id, "alc_b"), expires_at=datetime.now(UTC) - timedelta(seconds=1))
    odd = sign_handoff(handoff(unit_id, "alc_b", env={"LD_PRELOAD": "x"}))
    codes = [(await desk.ask(task)).error_code for task in (stale, old, odd)]
    assert codes == ["stale_fence", "expired", "reserved_env"]
    assert host.units._units[unit_id].record.allocation_id == ""
    assert (await desk.ask(sign_handoff(handoff(unit_id, "alc_b")))).outcome is Outcome.SUCCEEDED
    assert (await desk.ask(sign_handoff(handoff(unit_id, "alc_c")))).error_code == "taken"
    assert (await desk.ask(sign_handoff(handoff("alc_none", "alc_c")))).error_code == "no_unit"


async def test_secrets_are_asked_for_and_never_noted(host: Host) -> None:
    unit_id = await host.stock()
    task = sign_handoff(handoff(unit_id, "alc_a", secrets=_SECRETS))
    assert (await Desk(host, _VALUES).ask(task)).outcome is Outcome.SUCCEEDED
    assert (await host.run(unit_id, "cat", "/run/secrets/token")).out == "s3cret-value"
    kept = b"".join(path.read_bytes() for path in host.folder.glob("journal.db*"))
    assert b"blob.bin" in kept
    assert b"s3cret-value" not in kept


async def test_without_its_secrets_nothing_runs(host: Host) -> None:
    for desk in (Desk(host), Desk(host, {"token": b"but no blob"})):
        task = sign_handoff(handoff(await host.stock(), "alc_a", command=_COMMAND, secrets=_SECRETS))
        result = await desk.ask(task)
        assert (result.outcome, result.error_code) == (Outcome.FAILED, "secrets_unavailable")


async def test_untouched_stock_is_adopted_and_still_warm(node_folder: Path) -> None:
    host = Host.open(node_folder, tenant_folder())
    unit_id = await host.stock()
    await host.close()
    host = Host.open(node_folder, tenant_folder())
    await host.units.recover()
    await host.hand_over(unit_id, "python3", "-c", "import sys; print('ssl' in sys.modules)")
    assert text_of((await host.ended(unit_id)).lines, "stdout") == "True\n"
    await host.units.stop_all(0)
    await host.close()


_SECRETS = [SecretRef(name="token", version=1, env="TOKEN"), SecretRef(name="blob.bin", version=3)]
_VALUES = {"token": b"s3cret-value", "blob.bin": b"\0\xff" * 1000}


@pytest.mark.parametrize("warm", [True, False], ids=["handoff", "start"])
async def test_secrets_are_files_and_variables_and_nowhere_else(host: Host, warm: bool) -> None:
    code = "import os, time; print(os.environ['TOKEN'], open('/run/secrets/token').read(), flush=True); time.sleep(600)"
    command = ["python3", "-c", code]
    if warm:
        unit_id = await host.stock()
        await host.hand_over(unit_id, *command, secrets=_SECRETS, values=_VALUES)
    else:
        unit_id = new_id("alc")
        await host.units.start(request(unit_id, command=command, secrets=_SECRETS), _VALUES)
    lines = await asyncio.wait_for(host.logs.take(), 20)
    assert text_of(lines, "stdout") == "s3cret-value s3cret-value\n"
    seen = await host.run(unit_id, "sh", "-c", "cd /run/secrets; stat -c '%a %u %n' . *; wc -c < blob.bin; echo $TOKEN")
    assert seen.out == "700 1000 .\n400 1000 blob.bin\n400 1000 token\n2000\ns3cret-value\n"
    assert "tmpfs /run/secrets tmpfs" in (await host.run(unit_id, "cat", "/proc/mounts")).out
    record = host.units._units[unit_id].record
    assert b"s3cret" not in Path(f"/proc/{record.init_pid}/environ").read_bytes()
    for path in [*host.folder.rglob("*"), *Path("/proc").glob("[0-9]*/cmdline")]:
        try:
            content = path.read_bytes() if path.is_file() else b""
        except OSError:
            continue
        assert b"s3cret-value" not in content, path


async def test_modules_that_the_node_names_are_imported_too(host: Host) -> None:
    runtime = host.units._runtimes.find("python:3")
    object.__setattr__(runtime, "preload", ("wsgiref.simple_server", "no_such_module_at_all"))
    unit_id = await host.stock()
    await host.hand_over(unit_id, "python3", "-c", "import sys; print('wsgiref.simple_server' in sys.modules)")
    assert text_of((await host.ended(unit_id)).lines, "stdout") == "True\n"
