"""A child process that never outlives its parent, with its output in a file.

Every child leads a session of its own, so that Ctrl-C reaches only us and a stop reaches everything the child left
behind. The kernel kills it when this process ends, however it ends.
"""

import asyncio
import ctypes
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from penstock.embedded.ports import free_port, listening
from penstock.kit.errors import Unavailable

__all__ = ["Child", "free_port", "listening", "rotate", "start"]

LOG_BYTES_MAX: Final = 32 << 20
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWUSER: Final = 0x10000000
_NO_NAMESPACE: Final = 71
_TAIL_BYTES: Final = 8192
_LINE_CHARS_MAX: Final = 500
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

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        if code is None:
            return "still runs"
        if code == _NO_NAMESPACE:
            return "could not enter a user namespace: this system forbids them; run as an ordinary user instead"
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    async def stop(self, number: int = signal.SIGTERM, *, grace_s: float = 10.0) -> None:
        """Ask it to end, kill it when it does not, and end what it left in its session."""
        if self.running:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)
            try:
                await asyncio.wait_for(self.process.wait(), grace_s)
            except TimeoutError:
                self.kill()
                await self.process.wait()
        self.kill_group()

    def kill(self) -> None:
        """End it at once."""
        with suppress(ProcessLookupError):
            self.process.kill()

    def abort(self) -> None:
        """End it at once, with a word about where it stands if it can."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)

    def kill_children(self) -> None:
        """End its children, whichever groups they lead: those of a stopped server would hold what the next needs."""
        with suppress(OSError):
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            self.kill()
            for pid in children:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)

    def kill_group(self) -> None:
        """End what is left in the group that it led."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def wait_until(self, ready: Callable[[], "asyncio.Future[bool] | object"], *, timeout_s: float) -> None:
        """Poll `ready` until it is true; fail when the child ends first or takes too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while asyncio.get_running_loop().time() < deadline:
            if not self.running:
                raise Unavailable(f"{self.name} {self.ending}: {self.last_words()}")
            answer = ready()
            if (await answer if asyncio.isfuture(answer) or asyncio.iscoroutine(answer) else answer) is True:
                return
            await asyncio.sleep(0.02)
        raise Unavailable(f"{self.name} was not ready after {timeout_s:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of its output, and where the rest is."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                lines = file.read(_TAIL_BYTES).decode(errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{last[-_LINE_CHARS_MAX:]} (all of it: {self.log})"


async def start(
    name: str,
    argv: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str],
    cwd: Path | None = None,
    as_ordinary_user: bool = False,
) -> Child:
    """Start a child; with `as_ordinary_user` root gets another number in a user namespace of the child's own."""
    parent = os.getpid()
    uid, gid = os.geteuid(), os.getegid()

    def confine() -> None:
        if as_ordinary_user and uid == 0:
            _enter_user_namespace(uid, gid)
        # After the namespace, because a change of credentials takes this setting back.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    with _appending(log) as output:
        process = await asyncio.create_subprocess_exec(
            *(str(part) for part in argv),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
            preexec_fn=confine,
        )
    return Child(name, process, log)


def _appending(log: Path) -> BinaryIO:
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    rotate(log)
    return open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600))


def rotate(log: Path) -> None:
    """Keep a log bounded: one older copy, and the file itself emptied in place, for its writers hold it open."""
    try:
        if log.stat().st_size <= LOG_BYTES_MAX:
            return
        _copy(log, log.with_suffix(".log.1"))
        os.truncate(log, 0)
    except OSError:
        return


def _copy(log: Path, older: Path) -> None:
    """On a full disk there is no older copy: to have space again matters more."""
    try:
        older.write_bytes(log.read_bytes()[-LOG_BYTES_MAX:])
    except OSError:
        older.unlink(missing_ok=True)


def _enter_user_namespace(uid: int, gid: int) -> None:
    """Become user 1000 in a namespace that maps it to who we are; runs between fork and exec."""
    try:
        if _libc.unshare(_CLONE_NEWUSER) != 0:
            os._exit(_NO_NAMESPACE)
        for name, value in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
            file = os.open(f"/proc/self/{name}", os.O_WRONLY)
            os.write(file, value.encode())
            os.close(file)
    except OSError:
        os._exit(_NO_NAMESPACE)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
