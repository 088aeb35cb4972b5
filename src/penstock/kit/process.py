"""How every process runs: telemetry first, then its body until a signal, then a clean end.

Its event loop sends heartbeats to whoever supervises it (`kit/heartbeat.py`). Each process also answers `/healthz` and
`/metrics` on a loopback port of its own (`ops_port`, 0 for none).
"""

import asyncio
import faulthandler
import gc
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, TextIO

import uvloop
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from penstock.kit import telemetry
from penstock.kit.bus import Bus
from penstock.kit.clock import backoff_s
from penstock.kit.errors import PenstockError
from penstock.kit.heartbeat import Heart
from penstock.kit.telemetry import logger

_log = logger(__name__)
#: Requests make garbage by the hundred and leave no cycles: look less often than the default.
_GC_THRESHOLD: Final = (10_000, 10, 10)


def main(name: str, body: Callable[[AsyncExitStack], Coroutine[Any, Any, None]], **configure: str) -> None:
    """Run `body(stack)` until it ends or a signal comes; everything entered on the stack is closed."""
    _hold_standard_descriptors()
    # Where it stands, when a supervisor ends it because its loop does not move.
    faulthandler.enable(file=2)
    heart = Heart(os.environ)
    telemetry.configure(name, **configure)
    code = 0
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signal(name, body, heart))
    except PenstockError as error:
        _log.error("process_failed", error=error.detail, field=error.field)
        code = 1
    telemetry.flush()
    _flush(sys.stdout, sys.stderr)
    # The Temporal SDK's threads can abort the interpreter while it shuts down; everything is closed by now.
    os._exit(code)


def _hold_standard_descriptors() -> None:
    """A process may be started with its output closed: the next socket must not take that number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _flush(*streams: TextIO | None) -> None:
    """A disk without space or a reader that has gone changes nothing about how a process ends."""
    for stream in streams:
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()


async def _until_signal(name: str, body: Callable[[AsyncExitStack], Coroutine[Any, Any, None]], heart: Heart) -> None:
    beating = asyncio.create_task(heart.beat(), name="heartbeat")
    async with AsyncExitStack() as stack:
        stack.callback(beating.cancel)
        task = asyncio.create_task(body(stack), name=name)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            _log.info("process_stopping")


async def serve_ops(stack: AsyncExitStack, port: int, *, healthy: Callable[[], bool] = lambda: True) -> None:
    """Answer health checks and metrics on loopback."""
    if not port:
        return

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"ok": healthy()}, status=200 if healthy() else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", health), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", port).start()


def settle_memory() -> None:
    """For busy processes, once all is set up: what lives as long as the process need not be looked at again whenever
    garbage is collected, and that need not happen so often."""
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)


def allow_many_files() -> None:
    """For processes that hold many connections: as many files as the host grants."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def every(seconds: float, work: Callable[[], Awaitable[object]], *, name: str) -> None:
    """Call `work` for ever; a failure is logged and tried again after a back-off."""
    failures = 0
    while True:
        try:
            await work()
            failures = 0
        except Exception:  # noqa: BLE001 (a loop's supervisor: the loop goes on)
            failures += 1
            _log.exception("loop_failed", loop=name)
        heed_cancellation()
        await asyncio.sleep(seconds if not failures else max(seconds, backoff_s(failures)))


def heed_cancellation() -> None:
    """For loops, after each piece of work. Before Python 3.12 `asyncio.wait_for`, which clients of servers use, can
    swallow a cancellation that comes in the moment of the answer; nats-py swallows one while it flushes. A loop would
    then never end."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def guarded(work: Awaitable[object], *, name: str, **context: object) -> None:
    """One piece of a loop's work; a failure is logged, and the loop goes on with the next."""
    try:
        await work
    except Exception:  # noqa: BLE001 (a loop's supervisor: the loop goes on)
        _log.exception("loop_failed", loop=name, **context)
    heed_cancellation()


async def woken(
    bus: Bus,
    hints: Sequence[str],
    work: Callable[[], Awaitable[object]],
    *,
    every_s: float,
    name: str,
    queue: str = "",
    pause_s: float = 0.0,
) -> None:
    """Call `work` for ever: when one of the hints comes, and now and then in case it was lost. The pause after each
    call gathers what a crowd hinted."""
    wake = asyncio.Event()

    async def ring(_: str, __: bytes) -> None:
        wake.set()

    async def turn() -> None:
        wake.clear()
        await work()
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await wake.wait()

    for hint in hints:
        await bus.on_hint(hint, ring, queue=queue)
    await every(pause_s, turn, name=name)
