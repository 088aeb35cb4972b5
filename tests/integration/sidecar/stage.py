"""A node's sidecar between a real NATS and scripted frameworks, with the test as activator, gateway and agent."""

import asyncio
import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from nats.aio.msg import Msg

from integration.sidecar.frameworks import ScriptedFramework
from penstock.embedded import binaries
from penstock.embedded.child import Child, free_port
from penstock.embedded.server import Server, running
from penstock.kit import bus as buses
from penstock.kit.bus import Bus
from penstock.node.sidecar import roster
from penstock.node.sidecar.attempt import Bounds
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.output import Pace
from penstock.node.sidecar.roster import Roster
from penstock.node.sidecar.worker import Surroundings
from penstock.node.sidecarlink import SidecarLink
from penstock.serverless import streams
from penstock.serverless.callout import permissions
from penstock.wire import subjects
from penstock.wire.serverless import (
    MAC_HEADER,
    VERSION,
    DeadLetterMessage,
    InvocationResultMessage,
    MetricType,
    Mode,
    OutputMessage,
    Reference,
    State,
    WorkerDispatchMessage,
    WorkerMetricMessage,
)
from penstock.wire.sidecar import ExitClass
from penstock.wire.tasks import Serving, WorkerKeys

T = TypeVar("T")
WAIT_S = 20.0
WORKERS = 200
PASSWORD = "of-the-test"
PROJECT = "prj_default"
SOCKET = "/tmp/serverless-framework/framework.sock"


def nats_server(folder: Path, port: int) -> Server:
    """One account, with as many workers as tests need, each with the rights of a worker."""
    users: list[dict[str, Any]] = [{"user": "app", "password": PASSWORD}]
    for number in range(WORKERS):
        rights = permissions(function(number), worker_name(number))
        allowed = {"publish": rights["pub"]["allow"], "subscribe": rights["sub"]["allow"]}
        users.append({"user": worker_name(number), "password": token(number), "permissions": allowed})
    config = folder / "nats.conf"
    store = {"store_dir": str(folder / "store"), "max_file_store": 16 << 30}
    settings = {"host": "127.0.0.1", "port": port, "max_payload": 2 << 20, "jetstream": store}
    config.write_text(json.dumps({**settings, "authorization": {"users": users}}))

    async def answers() -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.write(
            f'CONNECT {{"user":"app","pass":"{PASSWORD}","verbose":false,"pedantic":false}}\r\n'
            "SUB up 1\r\nPUB $JS.API.INFO up 0\r\n\r\n".encode()
        )
        try:
            async with asyncio.timeout(1):
                while line := await reader.readline():
                    if line.startswith(b"MSG"):
                        return True
        except TimeoutError:
            return False
        finally:
            writer.close()
        return False

    return Server(
        name="nats",
        argv=(binaries.nats_server(), "-c", config),
        env={},
        log=folder / "nats.log",
        port=port,
        url=f"nats://app:{PASSWORD}@127.0.0.1:{port}",
        answers=answers,
    )


def function(number: int) -> str:
    return f"fn{number}"


def worker_name(number: int) -> str:
    return f"unit-fn{number}-worker-{number:08d}"


def token(number: int) -> str:
    return f"token-{number}"


class Gateway:
    """What the sidecar asks of the gateway. `refuse` is a status for the next answers, `over` are invocations of which
    no attempt counts any more."""

    def __init__(self) -> None:
        self.over: set[str] = set()
        self.payloads: dict[str, bytes] = {}
        self.results: dict[str, bytes] = {}
        self.bearers: list[str] = []
        self.refuse: list[int] = []
        self.url = ""

    @asynccontextmanager
    async def run(self) -> AsyncIterator["Gateway"]:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/attempts/{project}/{invocation}/current", self._current),
                web.get("/attempts/{project}/{invocation}/payload", self._payload),
                web.put("/attempts/{project}/{invocation}/result", self._result),
                web.get("/attempts/{project}/{invocation}/calls/{called}", self._called),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _current(self, request: web.Request) -> web.Response:
        return web.Response(status=401 if request.match_info["invocation"] in self.over else 204)

    async def _payload(self, request: web.Request) -> web.Response:
        self.bearers.append(request.headers["Authorization"])
        return web.Response(body=self.payloads[request.match_info["invocation"]])

    async def _called(self, request: web.Request) -> web.Response:
        self.bearers.append(request.headers["Authorization"])
        return web.Response(body=self.results[request.match_info["called"]])

    async def _result(self, request: web.Request) -> web.Response:
        self.bearers.append(request.headers["Authorization"])
        body = await request.read()
        if self.refuse:
            return web.Response(status=self.refuse.pop(0))
        self.results[request.match_info["invocation"]] = body
        kept = Reference(key="kept", bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        return web.Response(body=msgspec.json.encode(kept), content_type="application/json")


class Heard:
    """Everything that went over the function subjects, decoded, in order."""

    def __init__(self) -> None:
        self.results: list[InvocationResultMessage] = []
        self.metrics: list[WorkerMetricMessage] = []
        self.outputs: list[OutputMessage] = []
        self.letters: list[tuple[str, DeadLetterMessage]] = []
        self.calls: list[Msg] = []
        self._news = asyncio.Event()

    async def receive(self, message: Msg) -> None:
        kind = message.subject.split(".")[2]
        if kind == "result":
            self.results.append(msgspec.json.decode(message.data, type=InvocationResultMessage))
        elif kind == "metrics":
            self.metrics.append(msgspec.json.decode(message.data, type=WorkerMetricMessage))
        elif kind == "output":
            self.outputs.append(msgspec.json.decode(message.data, type=OutputMessage))
        elif kind == "dlq":
            self.letters.append((message.subject, msgspec.json.decode(message.data, type=DeadLetterMessage)))
        elif kind == "call":
            self.calls.append(message)
        self._news.set()

    async def until(self, find: Callable[[], T | None], timeout_s: float = WAIT_S) -> T:
        """What `find` finds at last."""
        async with asyncio.timeout(timeout_s):
            while (found := find()) is None or found is False:
                self._news.clear()
                try:
                    async with asyncio.timeout(0.05):
                        await self._news.wait()
                except TimeoutError:
                    pass
            return found


@dataclass
class Unit:
    """One unit with a scripted framework, and the queue's side of its worker."""

    stage: "Stage"
    number: int
    framework: ScriptedFramework
    slots: int
    mac_key: bytes = field(default_factory=lambda: os.urandom(32))

    @property
    def id(self) -> str:
        return f"unt_{self.number}"

    @property
    def worker(self) -> str:
        return worker_name(self.number)

    @property
    def request(self) -> str:
        return function(self.number)

    def serve(
        self, *, socket: str = SOCKET, ready_s: float = 20.0, uid: int | None = None, framework: bool = False
    ) -> None:
        """What the agent does when the unit has started."""
        serving = Serving(
            worker=self.worker,
            project_id=PROJECT,
            function=self.request,
            request=self.request,
            slots=self.slots,
            socket=socket,
            invoke_path="/invoke",
            health_path="/healthz",
            ready_s=ready_s,
            framework=framework,
        )
        self.stage.link.serve(
            self.id,
            uid=os.geteuid() if uid is None else uid,
            serving=serving,
            keys=WorkerKeys(token=token(self.number), mac_key=self.mac_key),
            memory_bytes=64 << 20,
            folder=os.open(self.framework.folder, os.O_PATH | os.O_DIRECTORY),
        )

    def end(self, exit_class: ExitClass, detail: str = "") -> None:
        self.stage.link.ended(self.id, exit_class=exit_class, detail=detail)

    def message(self, invocation_id: str, *, attempt: int = 1, timeout_s: float = 30.0, **more: Any) -> bytes:
        message = WorkerDispatchMessage(
            version=VERSION,
            invocationID=invocation_id,
            serverlessRequestID=self.request,
            mode=Mode.ASYNC,
            state=State.DISPATCHING,
            contentType="application/json",
            resultSubject=subjects.result(self.request),
            metricsSubject=subjects.metrics(self.request),
            workerName=self.worker,
            workerNamespace=PROJECT,
            dispatchedAt=datetime.now(UTC),
            timeoutSeconds=timeout_s,
            projectID=PROJECT,
            attempt=attempt,
            token="ab" * 16,
            **{"payload": msgspec.Raw(b'{"n": 1}'), **more},
        )
        return msgspec.json.encode(message)

    async def dispatch(self, invocation_id: str, **more: Any) -> None:
        await self.send(self.message(invocation_id, **more))

    async def send(self, body: bytes, *, key: bytes | None = None) -> None:
        subject = subjects.dispatch(self.request, self.worker)
        await self.stage.bus.js.publish(subject, body, headers={MAC_HEADER: mac(key or self.mac_key, subject, body)})

    async def order(self, subject: str, message: msgspec.Struct, *, key: bytes | None = None) -> None:
        body = msgspec.json.encode(message)
        headers = {MAC_HEADER: mac(key or self.mac_key, subject, body)}
        await self.stage.bus.client.publish(subject, body, headers=headers)

    async def result(self, invocation_id: str) -> InvocationResultMessage:
        heard = self.stage.heard
        return await heard.until(
            lambda: next((each for each in heard.results if each.invocationID == invocation_id), None)
        )

    async def invoke(self, invocation_id: str, **more: Any) -> InvocationResultMessage:
        await self.dispatch(invocation_id, **more)
        return await self.result(invocation_id)

    async def metric(self, kind: MetricType, invocation_id: str = "") -> WorkerMetricMessage:
        heard = self.stage.heard

        def find() -> WorkerMetricMessage | None:
            return next(
                (
                    each
                    for each in heard.metrics
                    if each.workerName == self.worker
                    and each.eventType is kind
                    and (not invocation_id or each.invocationID == invocation_id)
                ),
                None,
            )

        return await heard.until(find)

    async def left(self) -> int:
        """Messages of this worker that the queue still has to bring or hear of."""
        info = await self.stage.bus.js.consumer_info("WORK", self.worker)
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def until_acknowledged(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while await self.left():
                await asyncio.sleep(0.02)


@dataclass
class Stage:
    """Everything; `unit()` adds a worker."""

    bus: Bus
    heard: Heard
    gateway: Gateway
    link: SidecarLink
    folder: Path
    kills: list[tuple[str, str]]
    roster: Roster
    child: Child
    units: list[Unit] = field(default_factory=list)

    async def catch_up(self) -> None:
        """Hear what came before we were connected again, as the stream has it."""
        await self.heard.until(lambda: self.bus.client.is_connected)
        await self.bus.client.flush()
        state = (await self.bus.js.stream_info(streams.OUT)).state
        for seq in range(state.first_seq, state.last_seq + 1):
            kept = await self.bus.js.get_msg(streams.OUT, seq)
            await self.heard.receive(Msg(self.bus.client, kept.subject or "", data=kept.data or b""))

    async def unit(self, *, slots: int = 1, start: bool = True, serve: bool = True, **framework: Any) -> Unit:
        """A unit whose framework listens, and that is served."""
        number = len(self.units)
        folder = self.folder / f"unit-{number}"
        folder.mkdir()
        unit = Unit(self, number, ScriptedFramework(folder, **framework), slots)
        self.units.append(unit)
        await streams.ensure_worker(self.bus, request=unit.request, worker=unit.worker, slots=slots)
        if start:
            await unit.framework.start()
        if serve:
            unit.serve()
        return unit

    async def ready(self, **given: Any) -> Unit:
        """A unit that is registered."""
        unit = await self.unit(**given)
        await unit.metric(MetricType.REGISTERED)
        return unit


def mac(key: bytes, subject: str, body: bytes) -> str:
    return "sha256=" + hmac.digest(key, subject.encode() + b"\0" + body, hashlib.sha256).hex()


#: Smaller than in earnest, so that tests need not be large.
BOUNDS = Bounds(
    inline_bytes_max=64 << 10,
    result_bytes_max=6 << 20,
    grace_s=0.3,
    call_again_s=0.2,
    pace=Pace(bytes_per_s=64 << 10, burst_bytes=64 << 10, bytes_max=256 << 10),
)


@asynccontextmanager
async def staged(nats_url: str, child: Child, folder: Path) -> AsyncIterator[Stage]:
    """A sidecar in this process, with the agent's own link to it."""
    async with AsyncExitStack() as stack:
        app = nats_url.rpartition("@")[0].rpartition("//")[2]
        bare = nats_url.replace(f"{app}@", "")
        bus = await stack.enter_async_context(buses.connect(nats_url, name="test"))
        await streams.ensure(bus)
        heard = Heard()
        await bus.client.subscribe("runtime.serverless.>", cb=heard.receive)
        gateway = await stack.enter_async_context(Gateway().run())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        around = Surroundings(nats_url=bare, gateway=Attempts(session, gateway.url), report_s=0.2, bounds=BOUNDS)
        kills: list[tuple[str, str]] = []
        path = folder / "sidecar.sock"
        served = Roster(roster.bind(path), frozenset({os.geteuid()}), around)
        link = SidecarLink(path, uid=None, on_kill=lambda unit_id, reason: kills.append((unit_id, reason)))
        tasks = [asyncio.create_task(served.run()), asyncio.create_task(link.run())]
        stage = Stage(bus, heard, gateway, link, folder, kills, served, child)
        try:
            yield stage
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            link.close()
            for unit in stage.units:
                await unit.framework.stop()


@asynccontextmanager
async def nats_and_stage() -> AsyncIterator[tuple[Stage, Server]]:
    with tempfile.TemporaryDirectory(prefix="penstock-sidecar-") as name:
        server = nats_server(Path(name), free_port())
        async with running(server) as (url, child), staged(url, child, Path(name)) as stage:
            yield stage, server
