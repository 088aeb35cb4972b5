"""Temporal's development server, tuned: its defaults hold every saga to 20 polls a second."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from penstock.embedded import binaries
from penstock.embedded.child import Child
from penstock.embedded.ports import free_port
from penstock.embedded.server import Server, running

_TIMEOUT: Final = aiohttp.ClientTimeout(total=2)
_DYNAMIC: Final = {
    "history.transferProcessorMaxPollRPS": "2000",
    "history.timerProcessorMaxPollRPS": "2000",
    "history.visibilityProcessorMaxPollRPS": "200",
    "matching.numTaskqueueReadPartitions": "1",
    "matching.numTaskqueueWritePartitions": "1",
    "system.enableEagerWorkflowStart": "true",
}


@asynccontextmanager
async def run(folder: Path, port: int, ui_port: int, log: Path) -> AsyncIterator[tuple[str, Child]]:
    """Start on `folder`; yields the address. Stops it at the end."""
    async with running(prepare(folder, port, ui_port, log)) as started:
        yield started


def prepare(folder: Path, port: int, ui_port: int, log: Path) -> Server:
    """The server of `folder`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    http_port = free_port()
    return Server(
        name="temporal",
        argv=(binaries.temporal(), *_arguments(folder, port, ui_port, http_port)),
        env={"HOME": str(folder), "TEMPORAL_DISABLE_UPDATE_CHECK": "1"},
        log=log,
        port=port,
        url=f"127.0.0.1:{port}",
        answers=lambda: _answers(http_port),
    )


def _arguments(folder: Path, port: int, ui_port: int, http_port: int) -> list[str]:
    options = {
        "--ip": "127.0.0.1",
        "--port": str(port),
        "--http-port": str(http_port),
        "--ui-port": str(ui_port),
        "--metrics-port": str(free_port()),
        "--db-filename": str(folder / "temporal.db"),
        "--log-level": "error",
    }
    given = [part for option in options.items() for part in option]
    pragmas = [part for value in ("journal_mode=wal", "synchronous=1") for part in ("--sqlite-pragma", value)]
    dynamic = [part for name, value in _DYNAMIC.items() for part in ("--dynamic-config-value", f"{name}={value}")]
    return ["server", "start-dev", *given, *pragmas, *dynamic]


async def _answers(http_port: int) -> bool:
    """By its HTTP API, which says the same as the one by gRPC, and needs no SDK."""
    url = f"http://127.0.0.1:{http_port}/api/v1/namespaces/default"
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session, session.get(url) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
