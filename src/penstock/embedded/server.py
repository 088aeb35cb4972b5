"""One embedded server as a value: how to start it, how to tell that it answers, how to stop it.

The same value starts it again after a crash, on the same folder and port.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.embedded import child
from penstock.embedded.child import Child
from penstock.embedded.ports import require_free


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """`url` is what clients connect to; `before_start` clears what a killed predecessor left behind."""

    name: str
    argv: tuple[str | Path, ...]
    env: Mapping[str, str]
    log: Path
    port: int
    url: str
    answers: Callable[[], Awaitable[bool]]
    #: Whether it says anything at all; where that is the same as answering, none is given.
    alive: Callable[[], Awaitable[bool]] | None = None
    before_start: Callable[[], None] = _nothing
    stop_signal: signal.Signals = signal.SIGTERM
    as_ordinary_user: bool = False
    ready_timeout_s: float = 60.0

    async def start(self, marker: Mapping[str, str] | None = None) -> Child:
        """Start it without waiting; `marker` is added to its environment."""
        require_free(self.port, self.name)
        self.before_start()
        return await child.start(
            self.name,
            self.argv,
            log=self.log,
            env={**self.env, **(marker or {})},
            as_ordinary_user=self.as_ordinary_user,
        )


@asynccontextmanager
async def running(server: Server) -> AsyncIterator[tuple[str, Child]]:
    """Start, wait until it answers, yield its URL; stop it at the end."""
    started = await server.start()
    try:
        await started.wait_until(server.answers, timeout_s=server.ready_timeout_s)
        yield server.url, started
    finally:
        await asyncio.shield(started.stop(server.stop_signal))
