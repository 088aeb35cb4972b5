"""The sidecar as a process of its own: it becomes another user, needs none of its program files after that, and nobody
else reaches what it knows."""

import asyncio
import hashlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import penstock
from integration.sidecar.frameworks import Request, frames, replies
from integration.sidecar.stage import WAIT_S, Stage
from penstock.node.sidecarlink import SidecarLink
from penstock.wire.serverless import MetricType, Reference, State
from penstock.wire.sidecar import ExitClass

SIDECAR = 180_001
STRANGER = 180_002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
#: Tells of every import once the process is nobody privileged; what is loaded already makes no event.
WATCH = """
import os, sys
def watch(event, args):
    if event == "import" and os.geteuid() != 0 and args[0] not in sys.modules:
        os.write(2, f"LATE IMPORT {args[0]}\\n".encode())
sys.addaudithook(watch)
os.write(2, b"WATCHING IMPORTS\\n")
"""


@dataclass
class Sidecar:
    """A process, and the agent's link to it."""

    process: asyncio.subprocess.Process
    link: SidecarLink
    path: Path
    log: Path


@asynccontextmanager
async def sidecar(stage: Stage, folder: Path, **settings: str) -> AsyncIterator[Sidecar]:
    """Run from a copy of the program in a folder that only its owner can enter."""
    folder.chmod(0o700)
    shutil.copytree(Path(penstock.__file__).parent, folder / "lib" / "penstock", dirs_exist_ok=True)
    (folder / "lib" / "sitecustomize.py").write_text(WATCH)
    server = stage.bus.client.connected_url
    assert server is not None
    path, log = folder / "sidecar.sock", folder / "sidecar.log"
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(folder / "lib"),
        "PENSTOCK_SIDECAR_NATS_URL": f"nats://127.0.0.1:{server.port}",
        "PENSTOCK_GATEWAY_URL": stage.gateway.url,
        "PENSTOCK_SIDECAR_SOCKET": str(path),
        "PENSTOCK_SIDECAR_OPS_PORT": "0",
        "PENSTOCK_SIDECAR_HEARTBEAT_S": "0.2",
        **{f"PENSTOCK_SIDECAR_{name.upper()}": value for name, value in settings.items()},
    }
    program = "from penstock.command import main; main()"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, "serve", "sidecar", env=env, cwd=folder, stderr=output, stdout=output
        )
    uid = int(settings["uid"]) if "uid" in settings else None
    link = SidecarLink(path, uid=uid, on_kill=lambda *_: None)
    running = asyncio.create_task(link.run())
    try:
        yield Sidecar(process, link, path, log)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        link.close()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), WAIT_S)


@pytest.fixture
def folder() -> "AsyncIterator[Path]":
    with tempfile.TemporaryDirectory(prefix="penstock-sidecar-") as name:
        yield Path(name)


@as_root
async def test_it_serves_as_another_user_without_its_program_files(stage: Stage, folder: Path) -> None:
    unit = await stage.unit(start=False, serve=False)
    os.chown(unit.framework.folder, 0, SIDECAR)
    unit.framework.folder.chmod(0o2770)
    stage.folder.chmod(0o700)
    await unit.framework.start()
    payload = b'{"large": true}'
    stage.gateway.payloads["inv-process-2"] = payload
    kept = Reference(key="k", bytes=len(payload), sha256=hashlib.sha256(payload).hexdigest())
    async with sidecar(stage, folder, uid=str(SIDECAR)) as run:
        unit.stage = replace(stage, link=run.link)
        unit.serve()
        await unit.metric(MetricType.REGISTERED)
        assert (await unit.invoke("inv-process-1")).state is State.SUCCEEDED
        unit.framework.invoke = replies({"body": "x" * (5 << 20)})
        large = await unit.invoke("inv-process-2", payloadRef=kept)
        assert large.bodyRef is not None
        unit.framework.invoke = frames({"stdout": "a"}, {"reply": {"statusCode": 700}})
        assert (await unit.invoke("inv-process-3")).state is State.FAILED
        pid = run.process.pid
        status = Path(f"/proc/{pid}/status").read_text()
        assert f"Uid:\t{SIDECAR}\t{SIDECAR}\t{SIDECAR}" in status
        assert "CapEff:\t0000000000000000" in status
        assert "Groups:\t \n" in status
        for target in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/fd/0", str(run.path), str(run.log)):
            assert _as(STRANGER, lambda target=target: os.close(os.open(target, os.O_RDONLY))) == "PermissionError"
        assert _as(STRANGER, lambda: os.kill(pid, 0)) == "PermissionError"
        unit.end(ExitClass.EXITED)
    said = run.log.read_text()
    assert "privileges_dropped" in said
    assert "WATCHING IMPORTS" in said
    assert "LATE IMPORT" not in said, said
    assert "Traceback" not in said, said
    assert "x" * 100 not in said
    assert f"token-{unit.number}" not in said


async def test_an_ordinary_users_sidecar_stays_what_it_is_and_gives_back_what_it_cannot_end(
    stage: Stage, folder: Path
) -> None:
    called = asyncio.Event()

    async def hang(_: Request, __: asyncio.StreamWriter) -> None:
        called.set()
        await asyncio.sleep(60)

    unit = await stage.unit(serve=False, invoke=hang)
    async with sidecar(stage, folder) as run:
        unit.stage = replace(stage, link=run.link)
        unit.serve()
        await unit.metric(MetricType.REGISTERED)
        await unit.dispatch("inv-stopped")
        await called.wait()
        run.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(run.process.wait(), WAIT_S) == 0
        unit.end(ExitClass.EXITED)
    assert "privileges_kept" in run.log.read_text()
    unit.framework.invoke = replies({"body": "by the next one"})
    async with sidecar(stage, folder) as run:
        unit.stage = replace(stage, link=run.link)
        unit.serve()
        assert bytes((await unit.result("inv-stopped")).body) == b'"by the next one"'


async def test_an_address_with_credentials_is_refused(stage: Stage, folder: Path) -> None:
    async with sidecar(stage, folder, nats_url="nats://penstock:password@127.0.0.1:1") as run:
        assert await asyncio.wait_for(run.process.wait(), WAIT_S) == 1
    said = run.log.read_text()
    assert "credentials" in said
    assert "password@" not in said


def _as(uid: int, act: Callable[[], object]) -> str:
    """What happens when another user tries: the error's name, or nothing."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
        except BaseException as error:
            os.write(write, type(error).__name__.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as said:
        return said.read()
