"""A child process that never outlives its parent, with its output in a file."""

import asyncio
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.kit.errors import Unavailable

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Child:
    """One running child."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.returncode is None

    async def stop(self, number: int = signal.SIGTERM, *, grace_s: float = 10.0) -> None:
        """Ask it to end; kill it when it does not."""
        if not self.running:
            return
        self.process.send_signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), grace_s)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()

    async def wait_until(self, ready: Callable[[], "asyncio.Future[bool] | object"], *, timeout_s: float) -> None:
        """Poll `ready` until it is true; fail when the child ends first or takes too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            if not self.running:
                raise Unavailable(f"{self.name} ended with code {self.process.returncode}: {self.tail()}")
            answer = ready()
            if (await answer if asyncio.isfuture(answer) or asyncio.iscoroutine(answer) else answer) is True:
                return
            await asyncio.sleep(0.02)
        raise Unavailable(f"{self.name} was not ready after {timeout_s:.0f} s: {self.tail()}")

    def tail(self) -> str:
        """The end of its output."""
        try:
            return self.log.read_text(errors="replace")[-2000:].strip()
        except OSError:
            return "(no output)"


async def start(
    name: str, argv: Sequence[str | Path], *, log: Path, env: Mapping[str, str], cwd: Path | None = None
) -> Child:
    """Start a child in a session of its own (so that Ctrl-C reaches only us) that dies with this process."""
    log.parent.mkdir(parents=True, exist_ok=True)
    parent = os.getpid()

    def bind_to_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(str(part) for part in argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=bind_to_parent,  # noqa: PLW1509 (the parent has no other threads that hold locks here)
        )
    return Child(name, process, log)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
