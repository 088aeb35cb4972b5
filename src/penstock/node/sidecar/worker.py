"""One worker's life: its framework becomes well, it registers, it takes attempts, its unit ends.

It is known to the queue as nobody but itself, and nothing is taken from there before the framework is well.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from ssl import SSLContext
from typing import Final

from prometheus_client import Counter

from penstock.kit import bus
from penstock.kit.bus import Bus
from penstock.kit.telemetry import logger
from penstock.node.errors import NodeError
from penstock.node.sidecar.attempt import Bounds
from penstock.node.sidecar.desk import Desk
from penstock.node.sidecar.errors import Refusal
from penstock.node.sidecar.framework import BROKEN, Framework
from penstock.node.sidecar.gateway import Attempts
from penstock.node.sidecar.letters import Letters
from penstock.node.sidecar.sockets import FrameworkSocket
from penstock.wire import subjects
from penstock.wire.sidecar import Ended, Serve
from penstock.wire.tasks import WorkerKeys

_log = logger(__name__)
_ready = Counter("penstock_sidecar_workers_total", "Workers, by whether their framework became well.", ("outcome",))
_LOOK_S: Final = 0.005
_LOOK_CAP_S: Final = 0.25
#: So long it is looked for as often as can be: most cold starts are over by then.
_LOOK_OFTEN_S: Final = 0.5
_HEALTH_S: Final = 5.0
_CONNECT_AGAIN_S: Final = 0.5
_FAREWELL_S: Final = 15.0
_STOP_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all workers of a node share."""

    nats_url: str
    nats_tls: SSLContext | None = None
    gateway: Attempts
    report_s: float = 3.0
    bounds: Bounds = Bounds()  # noqa: RUF009 (frozen)


class Worker:
    """Serves one unit until `end`. `folder` is its to close; `kill(reason)` has the unit ended."""

    def __init__(self, serve: Serve, folder: int, around: Surroundings, kill: Callable[[str], None]) -> None:
        self._serve = serve
        self._around = around
        self._kill = kill
        self._ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._framework = Framework(FrameworkSocket(folder, serve.serving.socket, uid=serve.uid))
        self._letters = Letters(serve.serving, serve.keys.mac_key)
        self._connected: Bus | None = None
        self._log = _log.bind(unit_id=serve.unit_id, worker=serve.serving.worker, project_id=serve.serving.project_id)
        self._desk = Desk(
            serve,
            self._letters,
            self._bus,
            framework=self._framework,
            gateway=around.gateway,
            bounds=around.bounds,
            ended=self._ended,
            kill=kill,
        )

    @property
    def keys(self) -> WorkerKeys:
        """What it proves itself with."""
        return self._serve.keys

    def end(self, ended: Ended) -> None:
        """The unit is no more; attempts that it had end with it."""
        if not self._ended.done():
            self._ended.set_result(ended)

    async def run(self) -> None:
        """Serve until the unit ends, and then until its results are told; cancelled, give back what is in hand."""
        async with AsyncExitStack() as stack:
            stack.callback(self._framework.close)
            living = asyncio.get_running_loop().create_task(self._live(stack))
            stop_s = _STOP_S
            try:
                await asyncio.wait({living, self._ended}, return_when=asyncio.FIRST_COMPLETED)
                if living.done() and (error := living.exception()) is not None:
                    self._failed(error)
                await asyncio.wait({self._ended})
                stop_s = _FAREWELL_S
            finally:
                if self._ended.done():
                    self._framework.close()
                await self._desk.close(stop_s)
                living.cancel()
                await asyncio.wait({living})

    async def _live(self, stack: AsyncExitStack) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        connecting = loop.create_task(stack.enter_async_context(self._connect()))
        try:
            trouble = await self._until_ready()
            ready_s = loop.time() - began
            self._connected = await connecting
        finally:
            connecting.cancel()
            await asyncio.wait({connecting})
        await self._subscribe(self._connected)
        if trouble:
            _ready.labels("unhealthy").inc()
            self._log.warning("framework_unhealthy", reason=trouble)
            await self._desk.reports.unhealthy(trouble)
            return
        _ready.labels("ready").inc()
        await self._desk.open()
        await self._desk.reports.registered()
        self._log.info("worker_ready", framework_s=round(ready_s, 4), all_s=round(loop.time() - began, 4))
        while True:
            await asyncio.sleep(self._around.report_s)
            await self._desk.reports.heartbeat()

    def _connect(self) -> AbstractAsyncContextManager[Bus]:
        worker = self._serve.serving.worker
        return bus.connect(
            self._around.nats_url,
            name=worker,
            user=worker,
            password=self._serve.keys.token,
            inbox_prefix=subjects.worker_inbox(worker),
            again_s=_CONNECT_AGAIN_S,
            tls=self._around.nats_tls,
        )

    async def _subscribe(self, connected: Bus) -> None:
        await connected.client.subscribe(self._letters.controls, cb=self._desk.control, pending_msgs_limit=4096)
        await connected.client.subscribe(self._letters.answers, cb=self._desk.answered, pending_msgs_limit=4096)

    async def _until_ready(self) -> str:
        """Why the framework cannot be used, or nothing."""
        loop = asyncio.get_running_loop()
        serving = self._serve.serving
        began = loop.time()
        wait_s = _LOOK_S
        while True:
            try:
                await self._framework.check_health(serving.health_path, _HEALTH_S)
            except Refusal as error:
                return str(error)
            except NodeError as error:
                if error.code == BROKEN and serving.framework:
                    # The platform's own framework has tried already, and knows why the handler cannot be used.
                    return error.detail
                trouble = error
            else:
                return ""
            if loop.time() - began > serving.ready_s:
                return f"not healthy within {serving.ready_s:g} s: {trouble}"
            await asyncio.sleep(wait_s)
            if loop.time() - began > _LOOK_OFTEN_S:
                wait_s = min(wait_s * 1.5, _LOOK_CAP_S)

    def _bus(self) -> Bus:
        assert self._connected is not None
        return self._connected

    def _failed(self, error: BaseException) -> None:
        """Nothing that is expected ends it: the worker is of no use, and another one takes its place."""
        self._log.error("worker_failed", exc_info=error)
        self._kill("its sidecar failed")
