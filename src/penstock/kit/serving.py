"""Serves an ASGI application inside the running event loop, until cancelled.

No process is started: what dies with `kill -9` is the whole server. More processes on one port are forked before the
loop starts (`fork_workers`) and end with the first.
"""

import asyncio
import ctypes
import os
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from penstock.kit import listener
from penstock.kit.asgi import Bridge
from penstock.kit.errors import Invalid, Unavailable
from penstock.kit.heartbeat import Listener, Silence
from penstock.kit.telemetry import logger

CONNECTIONS_MAX: Final = 4096
_STOP_GRACE_S: Final = 5.0
#: Longer than the pools of usual clients and load balancers (60 s) keep a connection that they do not use.
_IDLE_S: Final = 75.0
_LINGER_S: Final = 1.0
#: A client that reads nothing of its answer for so long is ended.
_STALL_S: Final = 30.0
#: The cancellation of handlers and the end of their connections come after the grace.
_CLEAN_UP_S: Final = 3.0
_WATCH_S: Final = 1.0
#: Sooner than the supervisor's own patience.
_SILENT_MAX_S: Final = 20.0
_PR_SET_PDEATHSIG: Final = 1

_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    """Where to listen, and with which certificate if any."""

    host: str
    port: int
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context, or Invalid."""
        return listener.tls_context(self.tls_cert, self.tls_key, field="tls_cert")


async def serve(app: Any, listen: Listen, *, stopping: Callable[[], None]) -> None:
    """Serve until cancelled. Then `stopping` ends what would never end by itself, and the rest gets a moment."""
    server = listener.listener(
        Bridge(app).handle,
        idle_s=_IDLE_S,
        linger_s=_LINGER_S,
        connections_max=CONNECTIONS_MAX,
        stall_s=_STALL_S,
    )
    runner = web.ServerRunner(server, shutdown_timeout=_STOP_GRACE_S)
    await runner.setup()
    sockets = await listener.listen(server, listen.host, listen.port, tls=listen.tls, shared=True)
    _log.info("listening", host=listen.host, port=listen.port, tls=bool(listen.tls_cert))
    try:
        await asyncio.Event().wait()
    finally:
        stopping()
        sockets.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_GRACE_S + _CLEAN_UP_S):
                await runner.cleanup()


def check(listen: Listen) -> None:
    """Fail early and in words: the server shares its port with others of its kind, and would not notice a stranger."""
    if bool(listen.tls_cert) != bool(listen.tls_key):
        raise Invalid("tls_cert and tls_key come together", field="tls_cert")
    for path in filter(None, (listen.tls_cert, listen.tls_key)):
        if not Path(path).is_file():
            raise Invalid(f"cannot read {path}", field="tls_cert")
    _ = listen.tls
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
            probe.listen(1)
        except OSError as error:
            raise Invalid(f"cannot listen on {listen.host}:{listen.port}: {error.strerror}", field="port") from error


@dataclass(frozen=True, slots=True)
class Workers:
    """The processes on one port, as one of them sees it: the first knows the others."""

    first: bool
    others: tuple[int, ...] = ()
    beats: Listener | None = None


def fork_workers(count: int) -> Workers:
    """Become `count` processes. The kernel ends the others when the first ends, however it ends."""
    if count == 1:
        return Workers(first=True)
    parent = os.getpid()
    others: list[int] = []
    beats = Listener()
    for _ in range(count - 1):
        pid = os.fork()
        if pid == 0:
            os.environ.pop("WATCHDOG_PID", None)
            os.environ.update(beats.environment(_SILENT_MAX_S))
            beats.close()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)
            return Workers(first=False)
        others.append(pid)
    return Workers(first=True, others=tuple(others), beats=beats)


async def watch(workers: Workers) -> None:
    """End when another worker has ended or stands still: the supervisor starts all of them again."""
    if workers.beats is None:
        return
    silences = {pid: Silence(_WATCH_S) for pid in workers.others}
    workers.beats.listen(lambda pid: silences[pid].heard() if pid in silences else None)
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        await asyncio.sleep(_WATCH_S)
        pid, status = os.waitpid(-1, os.WNOHANG)  # noqa: ASYNC222 (it does not wait)
        if pid in workers.others:
            raise Unavailable(f"worker {pid} ended with status {status}")
        for pid, silence in silences.items():
            if silence.passed(loop.time() - began) > _SILENT_MAX_S:
                os.kill(pid, signal.SIGKILL)
                raise Unavailable(f"worker {pid} did not respond for {_SILENT_MAX_S:.0f} s")
