"""Runs an install until it is told to stop, in the foreground or detached."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import uvloop
from rich.console import Console

from penstock.kit import telemetry
from penstock.kit.errors import Conflict, Invalid, PenstockError, Unavailable
from penstock.processes.up.display import Display
from penstock.processes.up.endpoints import Wanted
from penstock.processes.up.folder import AlreadyRunning, DataFolder
from penstock.processes.up.install import Install, Ready

_DETACHED_START_S: Final = 240.0
_POLL_S: Final = 0.1
#: How a supervisor's exit code is told again by who started it.
_AS: Final[dict[int, type[PenstockError]]] = {1: Invalid, 5: Conflict}
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def foreground(
    folder: DataFolder, wanted: Wanted, environ: Mapping[str, str], announce: Callable[[Ready], None]
) -> None:
    """Start everything, tell `announce`, and stay until a signal; then stop everything."""
    telemetry.configure("up", level="error", log_format="text" if sys.stderr.isatty() else "json")
    folder.prepare()
    with folder.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        display = Display(Console(highlight=False, soft_wrap=True))
        runner.run(_supervise(Install(folder, wanted, display, environ), display, announce))


async def _supervise(install: Install, display: Display, announce: Callable[[Ready], None]) -> None:
    told = asyncio.Event()
    body = asyncio.create_task(_until_told(install, told, announce))

    def signalled() -> None:
        if told.is_set():
            display.say("stopping at once")
            install.kill()
            return
        told.set()

    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, signalled)
    try:
        await body
    finally:
        if told.is_set():
            display.say("stopping; once more to kill")
        told.set()
        await install.stop()
    display.say("everything has stopped")


async def _until_told(install: Install, told: asyncio.Event, announce: Callable[[Ready], None]) -> None:
    starting = asyncio.create_task(install.start())
    waiting = asyncio.create_task(told.wait())
    rotating = asyncio.create_task(install.keep_logs_bounded())
    try:
        await asyncio.wait((starting, waiting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            announce(starting.result())
            await waiting
    finally:
        for task in (starting, waiting, rotating):
            task.cancel()
        await asyncio.gather(starting, waiting, rotating, return_exceptions=True)


def detached(folder: DataFolder, arguments: Sequence[str], environ: Mapping[str, str]) -> Ready:
    """Start a supervisor of its own; what there is to tell when everything is ready."""
    folder.prepare()
    if holder := folder.holder():
        raise AlreadyRunning(
            f"{folder.path} is in use by another `penstock up` (pid {holder}); stop it with `penstock down`,"
            " or name another folder with --data"
        )
    folder.forget()
    log = folder.log / "up.log"
    with open(log, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.command", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
            start_new_session=True,
        )
    try:
        return _until_ready(folder, supervisor, Console(stderr=True, highlight=False))
    except BaseException:
        with suppress(ProcessLookupError):
            supervisor.send_signal(signal.SIGTERM)
        raise


def _until_ready(folder: DataFolder, supervisor: "subprocess.Popen[bytes]", console: Console) -> Ready:
    deadline = time.monotonic() + _DETACHED_START_S
    with console.status("starting"):
        while time.monotonic() < deadline:
            status, instance = folder.status(), folder.instance()
            if status and instance and status.pid == supervisor.pid and status.ready:
                return Ready(instance=instance, simulated_gpus=status.simulated_gpus, notes=status.notes)
            if supervisor.poll() is not None:
                raise _AS.get(supervisor.returncode, Unavailable)(_last_words(folder))
            time.sleep(_POLL_S)
    raise Unavailable(f"it was not ready after {_DETACHED_START_S:.0f} s: {_last_words(folder)}")


def _last_words(folder: DataFolder) -> str:
    """Its error without the command line's frame, which is put around it again."""
    lines = (folder.log / "up.log").read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it ended without a word"
    return re.sub(r" \((?:code|field)=[^()]*\)$", "", last.removeprefix("error: "))
