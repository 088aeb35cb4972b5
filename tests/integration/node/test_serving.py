"""Units that serve a function: their code, variables and socket, and what the sidecar is told of them."""

import asyncio
import ctypes
import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from node_host import LIMITS, SIDECAR_UID, Host, handoff, request, tenant_folder, text_of
from penstock.kit.ids import new_id
from penstock.node.codes import Codes
from penstock.node.drivers import PlainDriver
from penstock.node.errors import Failed
from penstock.wire.link import UnitState
from penstock.wire.sidecar import ExitClass
from penstock.wire.tasks import WORKER_KEYS, Code, Serving, UnitStop, WorkerKeys

T = TypeVar("T")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="users of their own need root")
_SOCKET = "/tmp/serverless-framework/framework.sock"
_KEYS = WorkerKeys(token="t0ken", mac_key=b"m" * 32)


@dataclass
class FakeSidecar:
    """Takes down what it is told, and keeps the folders."""

    folders: dict[str, int] = field(default_factory=dict)
    served: dict[str, tuple[int, Serving, WorkerKeys, int]] = field(default_factory=dict)
    ends: list[tuple[str, ExitClass, int, str]] = field(default_factory=list)

    def serve(
        self, unit_id: str, *, uid: int, serving: Serving, keys: WorkerKeys, memory_bytes: int, folder: int
    ) -> None:
        """Only what is news comes here."""
        assert unit_id not in self.served
        self.served[unit_id] = (uid, serving, keys, memory_bytes)
        self.folders[unit_id] = folder

    def ended(self, unit_id: str, *, exit_class: ExitClass, exit_code: int = 0, detail: str = "") -> None:
        """It is no more."""
        self.served.pop(unit_id)
        os.close(self.folders.pop(unit_id))
        self.ends.append((unit_id, exit_class, exit_code, detail))

    async def call(self, unit_id: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """As the sidecar's user, through the folder's descriptor; once the framework answers."""
        head = f"{method} {path} HTTP/1.1\r\nHost: u\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        async with asyncio.timeout(20):
            while True:
                with suppress(FileNotFoundError, ConnectionRefusedError):
                    return await asyncio.to_thread(
                        _as, SIDECAR_UID, lambda: _ask(self.folders[unit_id], head.encode() + body)
                    )
                await asyncio.sleep(0.01)


def _as(uid: int, act: Callable[[], T]) -> T:
    """With the file rights of another user, in this thread alone; nothing is different without root."""
    libc = ctypes.CDLL(None)
    if os.geteuid() == 0:
        libc.setfsgid(uid)
        libc.setfsuid(uid)
    try:
        return act()
    finally:
        if os.geteuid() == 0:
            libc.setfsuid(0)
            libc.setfsgid(0)


def _ask(folder: int, content: bytes) -> tuple[int, bytes]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(f"/proc/self/fd/{folder}/framework.sock")
        connection.sendall(content)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
            head, separator, body = answer.partition(b"\r\n\r\n")
            lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line]
            if separator and lengths and len(body) >= lengths[0]:
                break
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def _archive(files: Mapping[str, str]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return made.getvalue()


def _code(content: bytes) -> Code:
    return Code(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


GOOD = _archive({"main.py": "def hello(payload):\n    return {'got': payload}\n", "data/note.txt": "kept"})
HOSTILE = _archive({"../../../../evil": "x"})


def serving(code: bytes | None = None, **changes: object) -> Serving:
    """A worker of the platform's framework."""
    values: dict[str, object] = {
        "worker": "unit-echo-worker-abcd1234",
        "project_id": "prj_default",
        "function": "echo",
        "request": "echo",
        "slots": 3,
        "socket": "framework.sock",
        "invoke_path": "/invoke",
        "health_path": "/healthz",
        "ready_s": 30,
        "framework": True,
        "handler": "main:hello" if code else "",
        "code": None if code is None else _code(code),
    }
    return Serving(**(values | changes))  # pyright: ignore[reportArgumentType]


def _values(keys: WorkerKeys = _KEYS) -> dict[str, bytes]:
    return {WORKER_KEYS: msgspec.msgpack.encode(keys)}


@dataclass
class Stage:
    """A node with a sidecar, and what a gateway would give it."""

    host: Host
    sidecar: FakeSidecar
    asked: list[str] = field(default_factory=list)
    #: What the gateway gives next; else what is good.
    contents: list[bytes] = field(default_factory=list)

    async def start(self, what: Serving, **changes: object) -> str:
        """A unit that serves from its start."""
        unit_id = new_id("alc")
        wanted = request(unit_id, allocation_id=unit_id, serving=what, **changes)
        await self.host.units.start(wanted, _values())
        return unit_id

    async def hand_over(self, unit_id: str, what: Serving, allocation_id: str = "", keys: WorkerKeys = _KEYS) -> str:
        """A stock unit that begins to serve."""
        allocation_id = allocation_id or new_id("alc")
        await self.host.units.handoff(handoff(unit_id, allocation_id, serving=what), _values(keys))
        return allocation_id

    def state(self, unit_id: str) -> UnitState:
        """As a heartbeat would say."""
        return next(report.state for report in self.host.units.reports() if report.unit_id == unit_id)


def _open(folder: Path) -> Stage:
    async def fetch(allocation_id: str) -> AsyncIterator[bytes]:
        stage.asked.append(allocation_id)
        yield stage.contents.pop(0) if stage.contents else GOOD

    sidecar, codes = FakeSidecar(), Codes(folder / "codes", fetch, bytes_max=1 << 20)
    stage = Stage(Host.open(folder, tenant_folder(), sidecar=sidecar, codes=codes), sidecar)
    return stage


@pytest.fixture
async def stage(node_folder: Path) -> AsyncIterator[Stage]:
    """All units are stopped at the end."""
    opened = _open(node_folder)
    yield opened
    await opened.host.units.stop_all(0)
    await opened.host.close()
    assert opened.sidecar.folders == {}, "every unit that was told of has ended"


async def _stop(stage: Stage, unit_id: str, grace_s: float = 0) -> None:
    proof = await stage.host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=[], grace_s=grace_s))
    assert proof.clean, proof.detail


async def test_a_unit_serves_from_its_start(stage: Stage) -> None:
    unit_id = await stage.start(serving(GOOD))
    uid, told, keys, memory_bytes = stage.sidecar.served[unit_id]
    assert (told.socket, keys, memory_bytes) == (_SOCKET, _KEYS, LIMITS.memory_bytes)
    assert (await stage.sidecar.call(unit_id, "GET", "/healthz"))[0] == 200
    status, answer = await stage.sidecar.call(unit_id, "POST", "/invoke", json.dumps(_INVOKE).encode())
    assert (status, json.loads(answer)["body"]) == (200, {"got": {"n": 7}})
    app = stage.host.folder / "units" / unit_id / "home" / "app"
    assert (app / "data" / "note.txt").read_text() == "kept"
    assert app.stat().st_uid == (app / "main.py").stat().st_uid == uid
    assert stage.asked == [unit_id]
    second = await stage.start(serving(GOOD))
    assert stage.asked == [unit_id], "the archive is kept"
    await _stop(stage, second)
    await _stop(stage, unit_id)
    assert [(end[0], end[1]) for end in stage.sidecar.ends] == [(second, "killed"), (unit_id, "killed")]


_INVOKE = {
    "version": "v1",
    "invocationID": "inv-1",
    "serverlessRequestID": "echo",
    "workerName": "unit-echo-worker-abcd1234",
    "workerNamespace": "prj_default",
    "mode": "sync",
    "state": "running",
    "contentType": "application/json",
    "headers": {},
    "attributes": {},
    "payload": {"n": 7},
    "timeoutSeconds": 20,
    "dispatchedAt": "2026-01-01T00:00:00Z",
}


async def test_a_stock_unit_begins_to_serve(stage: Stage) -> None:
    unit_id = await stage.host.stock()
    assert unit_id not in stage.sidecar.served
    await stage.hand_over(unit_id, serving(GOOD))
    status, answer = await stage.sidecar.call(unit_id, "POST", "/invoke", json.dumps(_INVOKE).encode())
    assert (status, json.loads(answer)["body"]) == (200, {"got": {"n": 7}})
    ran = await stage.host.run(unit_id, "sh", "-c", "cat /proc/[0-9]*/cmdline")
    assert ran.out.count("zygote") == 1, "the zygote itself is the framework"


async def test_other_commands_do_not_see_what_is_ours(stage: Stage) -> None:
    unit_id = await stage.host.stock(image="python:3.12")
    code = "import sys; print([name for name in sys.modules if name.startswith('penstock')]); import penstock"
    await stage.host.hand_over(unit_id, "python3", "-c", code)
    ended = await stage.host.ended(unit_id)
    assert (ended.exit_code, text_of(ended.lines, "stdout")) == (1, "[]\n")
    assert "No module named 'penstock'" in text_of(ended.lines, "stderr")


async def test_a_command_of_the_tenants_own_finds_everything(stage: Stage) -> None:
    names = ("REQUEST_ID", "WORKER_NAME", "WORKER_NAMESPACE", "FRAMEWORK_SOCKET_PATH", "FRAMEWORK_INVOKE_PATH")
    shown = " ".join(f"$SERVERLESS_{name}" for name in (*names, "FRAMEWORK_HEALTH_PATH"))
    what = serving(GOOD, framework=False, handler="", invoke_path="/i", health_path="/h", socket=_SOCKET)
    unit_id = await stage.start(what, command=["sleep", "600"], env={"SERVERLESS_WORKER_NAME": "mine"})
    ran = await stage.host.run(
        unit_id, "sh", "-c", f"echo {shown}; cat $PENSTOCK_CODE/data/note.txt; env; ls /run/secrets"
    )
    assert ran.out.startswith(f"echo unit-echo-worker-abcd1234 prj_default {_SOCKET} /i /h\nkept")
    assert "t0ken" not in ran.out
    assert ".worker" not in ran.out
    assert "PENSTOCK_HANDLER" not in ran.out


@as_root
async def test_the_socket_is_for_the_sidecar_alone(stage: Stage) -> None:
    code = (
        "import os, socket, time; path = os.environ['SERVERLESS_FRAMEWORK_SOCKET_PATH']; s = socket.socket(1);"
        "s.bind(path); os.chmod(path, 0o660); s.listen(); time.sleep(600)"
    )
    unit_id = await stage.start(serving(framework=False), command=["python3", "-c", code])
    uid, folder = stage.sidecar.served[unit_id][0], stage.sidecar.folders[unit_id]
    path = f"/proc/self/fd/{folder}/framework.sock"
    connection = socket.socket(socket.AF_UNIX)
    async with asyncio.timeout(20):
        while True:
            with suppress(OSError):
                await asyncio.to_thread(_as, SIDECAR_UID, lambda: connection.connect(path))
                break
            await asyncio.sleep(0.01)
    connection.close()
    found = Path(path).stat()
    assert (found.st_uid, found.st_gid) == (uid, SIDECAR_UID)
    for other in (uid + 1, 65534, SIDECAR_UID + 1):
        with pytest.raises(PermissionError), socket.socket(socket.AF_UNIX) as stranger:
            _as(other, lambda stranger=stranger: stranger.connect(path))


@as_root
async def test_a_tenant_reaches_neither_the_sidecars_files_nor_nats(stage: Stage, tmp_path: Path) -> None:
    unit_id = await stage.start(serving())
    uid = stage.sidecar.served[unit_id][0]
    kept = stage.host.folder / "sidecar"
    kept.mkdir(mode=0o700)
    (kept / "credentials").write_text("secret")
    os.chown(kept, SIDECAR_UID, SIDECAR_UID)
    with pytest.raises(PermissionError):
        _as(uid, (kept / "credentials").read_text)
    assert (await stage.host.run(unit_id, "cat", str(kept / "credentials"))).code != 0
    with socket.create_server(("127.0.0.1", 0)) as nats:
        code = f"import socket; socket.create_connection(('127.0.0.1', {nats.getsockname()[1]}), 2)"
        ran = await stage.host.python(unit_id, code)
    assert "ConnectionRefusedError" in ran.out
    outside = next((info[4][0] for info in socket.getaddrinfo(socket.gethostname(), 0, socket.AF_INET)), "10.0.0.1")
    ran = await stage.host.python(unit_id, f"import socket; socket.create_connection(('{outside}', 4222), 2)")
    assert ran.code != 0


async def test_without_a_sandbox_paths_are_the_hosts(stage: Stage) -> None:
    stage.host.units._driver.close()
    stage.host.units._driver = PlainDriver()
    unit_id = await stage.start(serving(GOOD))
    status, answer = await stage.sidecar.call(unit_id, "POST", "/invoke", json.dumps(_INVOKE).encode())
    assert (status, json.loads(answer)["body"]) == (200, {"got": {"n": 7}})
    uid, told, _, _ = stage.sidecar.served[unit_id]
    assert (uid, told.socket) == (os.geteuid(), _SOCKET)
    stock = await stage.host.stock()
    await stage.hand_over(stock, serving())
    assert (await stage.sidecar.call(stock, "GET", "/healthz"))[0] == 200


async def test_without_a_sidecar_nothing_is_served(host: Host) -> None:
    stock = await host.stock()
    unit_id = new_id("alc")
    for act in (
        host.units.start(request(unit_id, allocation_id=unit_id, serving=serving()), _values()),
        host.units.handoff(handoff(stock, unit_id, serving=serving()), _values()),
    ):
        with pytest.raises(Failed) as failed:
            await act
        assert failed.value.code == "no_sidecar"
    assert [report.unit_id for report in host.units.reports()] == [stock]


async def test_a_hostile_archive_leaves_nothing(stage: Stage) -> None:
    stage.contents.append(HOSTILE)
    with pytest.raises(Failed) as failed:
        await stage.start(serving(HOSTILE))
    assert failed.value.code == "bad_code"
    assert stage.host.units.reports() == []
    unit_id = await stage.host.stock()
    with pytest.raises(Failed) as failed:
        await stage.hand_over(unit_id, serving(HOSTILE))
    assert failed.value.code == "bad_code"
    assert stage.sidecar.served == {}
    units = stage.host.folder / "units"
    assert [entry.name for entry in units.iterdir()] == [unit_id]
    assert not list((units / unit_id).glob("code-*"))
    assert not list(stage.host.folder.rglob("evil"))
    await stage.hand_over(unit_id, serving(GOOD))
    assert (await stage.sidecar.call(unit_id, "GET", "/healthz"))[0] == 200


async def test_an_archive_that_would_hold_the_agent_up_is_refused_while_the_agent_goes_on(stage: Stage) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w:gz") as archive:
        header = tarfile.TarInfo("pax")
        header.type, content = tarfile.XHDTYPE, b"2 " * ((1 << 19) - 64) + b"=\n"
        header.size = len(content)
        archive.addfile(header, io.BytesIO(content))
        archive.addfile(tarfile.TarInfo("a"))
    stage.contents.append(plain.getvalue())
    starting = asyncio.create_task(stage.start(serving(plain.getvalue())))
    with pytest.raises(Failed) as failed:
        async with asyncio.timeout(15):
            await starting
    assert failed.value.code == "bad_code"
    assert stage.host.units.reports() == []


async def test_other_bytes_than_the_version_names_are_no_code(stage: Stage) -> None:
    stage.contents += [GOOD + b"more"] * 5
    with pytest.raises(Failed) as failed:
        await stage.start(serving(GOOD))
    assert failed.value.code == "code_unavailable"
    assert not list((stage.host.folder / "codes").iterdir())


async def test_code_that_the_nodes_disk_changed_is_fetched_anew(stage: Stage) -> None:
    await stage.start(serving(GOOD))
    (kept,) = (stage.host.folder / "codes").iterdir()
    kept.write_bytes(bytes(len(GOOD)))
    with pytest.raises(Failed) as failed:
        await stage.start(serving(GOOD))
    assert failed.value.code == "code_not_unpacked"
    await stage.start(serving(GOOD))


async def test_nothing_is_written_through_what_a_tenant_made(stage: Stage, tmp_path: Path) -> None:
    unit_id = await stage.host.stock()
    what = serving(GOOD, framework=False)
    allocation_id = await stage.hand_over(unit_id, what)
    await stage.host.run(unit_id, "sh", "-c", f"rm -rf ~/app; ln -s {tmp_path} ~/app")
    home = stage.host.folder / "units" / unit_id / "home"
    assert (home / "app").is_symlink()
    await stage.hand_over(unit_id, what, allocation_id)
    assert list(tmp_path.iterdir()) == []
    assert (home / "app").is_symlink()


async def test_newer_keys_replace_those_before(stage: Stage) -> None:
    unit_id = await stage.host.stock()
    allocation_id = await stage.hand_over(unit_id, serving())
    newer = WorkerKeys(token="newer", mac_key=b"n" * 32)
    await stage.hand_over(unit_id, serving(), allocation_id, newer)
    assert stage.sidecar.served[unit_id][2] == newer
    await stage.hand_over(unit_id, serving(), allocation_id, newer)
    assert len(stage.sidecar.ends) == 1


async def test_the_next_agent_tells_the_sidecar_again(stage: Stage) -> None:
    unit_id = await stage.host.stock()
    await stage.hand_over(unit_id, serving(GOOD))
    before = stage.sidecar.served[unit_id]
    await stage.host.close()
    next_one = _open(stage.host.folder)
    await next_one.host.units.recover()
    assert next_one.sidecar.served == {unit_id: before}
    assert (await next_one.sidecar.call(unit_id, "GET", "/healthz"))[0] == 200
    os.close(stage.sidecar.folders.pop(unit_id))
    stage.host, stage.sidecar = next_one.host, next_one.sidecar


async def test_a_unit_is_ended_at_the_sidecars_word(stage: Stage) -> None:
    unit_id = await stage.start(serving(GOOD))
    await stage.sidecar.call(unit_id, "GET", "/healthz")
    stage.host.units.kill(unit_id, "it does not stop")
    ended = await stage.host.ended(unit_id)
    assert ended.exit_code == 137
    assert stage.sidecar.ends == [(unit_id, "killed", 137, "it does not stop")]
    told = [line.text for line in ended.lines if line.stream == "penstock"]
    assert told == ["the unit was ended: it does not stop"], "its tenant is told why"
    stage.host.units.kill(unit_id, "again")
    stage.host.units.kill("alc_unknown", "nobody")


async def test_leaked_processes_and_memory_go_with_the_unit(stage: Stage) -> None:
    code = (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        held = [os.open('/dev/null', 0) for _ in range(100)]\n"
        "        time.sleep(600)\n"
        "open('/tmp/there', 'w')\n"
        "time.sleep(600)\n"
    )
    unit_id = await stage.start(serving(framework=False), command=["python3", "-c", code])
    async with asyncio.timeout(20):
        while (await stage.host.run(unit_id, "test", "-e", "/tmp/there")).code:
            await asyncio.sleep(0.02)
    await _stop(stage, unit_id)
    assert stage.sidecar.ends[0][1] == "killed"


async def test_memory_that_runs_out_is_told_as_such(stage: Stage) -> None:
    if "memory" not in stage.host.units._groups.limits:
        pytest.skip("this host cannot limit memory by control groups")
    limits = msgspec.structs.replace(LIMITS, memory_bytes=64 << 20)
    command = ["python3", "-c", "held = []\nwhile True: held.append(bytearray(1 << 20))"]
    unit_id = await stage.start(serving(framework=False), command=command, limits=limits)
    await stage.host.ended(unit_id)
    assert [end[:3] for end in stage.sidecar.ends] == [(unit_id, "oom", 137)]
