"""Runs an install until it is told to stop."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Final

import uvloop
from rich.console import Console

from penstock.kit import telemetry
from penstock.kit.heartbeat import Heart
from penstock.processes.up.banner import Ready
from penstock.processes.up.display import Display
from penstock.processes.up.endpoints import Wanted
from penstock.processes.up.folder import DataFolder
from penstock.processes.up.install import Install

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def foreground(
    folder: DataFolder, wanted: Wanted, environ: Mapping[str, str], announce: Callable[[Ready], None]
) -> None:
    """Start everything, tell `announce`, and stay until a signal; then stop everything."""
    telemetry.configure("up", level="error", log_format="text" if sys.stderr.isatty() else "json")
    heart = Heart(os.environ)
    folder.prepare()
    with folder.locked(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        display = Display(Console(highlight=False, soft_wrap=True))
        runner.run(_supervise(folder, wanted, display, environ, heart, announce))


async def _supervise(
    folder: DataFolder,
    wanted: Wanted,
    display: Display,
    environ: Mapping[str, str],
    heart: Heart,
    announce: Callable[[Ready], None],
) -> None:
    install = Install(folder, wanted, display, environ)
    told = asyncio.Event()
    beating = asyncio.create_task(heart.beat(), name="heartbeat")
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
        beating.cancel()
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
