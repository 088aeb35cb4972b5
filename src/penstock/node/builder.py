"""Builds tenants' environments: a virtual environment on the base's interpreter with exactly the packages of a lock.

No code of a package runs here. Only wheels are taken, whose installation is unpacking; hashes are required; nothing
that the lock does not name comes along. The installer (uv) works in a sandbox of its own, under a user of its own where
the agent is root: it sees the base, the folder that it builds in and the network, and has bounded time and space.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import Counter, Histogram

from penstock.kit.telemetry import logger
from penstock.node import cleanup, environments
from penstock.node.environments import Environments
from penstock.node.errors import Failed, Refused
from penstock.node.installer import NO_INDEX, Installer, Source, TooBig
from penstock.node.runtimes import Runtime, Runtimes
from penstock.wire import locks
from penstock.wire.tasks import RuntimeBuild, RuntimeBuilt, RuntimeLock

_log = logger(__name__)
#: Different environments at once; more wait.
BUILDS_MAX: Final = 2
_built = Counter("penstock_node_runtime_builds_total", "Environments built, by outcome.", ("outcome",))
_seconds = Histogram(
    "penstock_node_runtime_build_seconds", "How long a build took.", buckets=(1, 5, 15, 30, 60, 120, 300, 600, 1200)
)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a build may take."""

    seconds: float = 540.0
    bytes_max: int = 32 << 30


def shown(environments: Environments, installer: Path | None, source: Source) -> list[Path]:
    """The folders that sandboxes need for building and using environments, and that are staged at the agent's start."""
    files = [*source.folders, *([installer] if installer else [])]
    return [environments.folder, *(path if path.is_dir() else path.parent for path in files)]


class Builder:
    """One build per environment at a time, whoever asks for it; a few different ones at once."""

    def __init__(
        self,
        *,
        images: Runtimes,
        environments: Environments,
        installer: Installer,
        budget: Budget,
        on_stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._images = images
        self._environments = environments
        self._installer = installer
        self._budget = budget
        self._on_stage = on_stage
        self._room = asyncio.Semaphore(BUILDS_MAX)
        self._running: dict[str, asyncio.Task[RuntimeBuilt]] = {}

    async def build(self, request: RuntimeBuild) -> RuntimeBuilt:
        """Build an environment, or find that it has been built; a build that runs is waited for."""
        wanted = request.runtime
        lock = await asyncio.to_thread(_checked, wanted)
        base = self._images.find(wanted.base)
        running = self._running.get(wanted.digest)
        if running is None:
            if found := self._environments.find(base, wanted.digest):
                return RuntimeBuilt(digest=wanted.digest, bytes=found.bytes, seconds=0.0)
            running = asyncio.create_task(self._build(base, wanted.digest, lock), name=f"build-{wanted.digest[:12]}")
            self._running[wanted.digest] = running
            running.add_done_callback(lambda ended: self._ended(wanted.digest, ended))
        return await asyncio.shield(running)

    def _ended(self, digest: str, ended: "asyncio.Task[RuntimeBuilt]") -> None:
        del self._running[digest]
        failed = ended.cancelled() or ended.exception() is not None
        _built.labels("failed" if failed else "succeeded").inc()

    async def close(self) -> None:
        """Give up what is being built."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _build(self, base: Runtime, digest: str, lock: str) -> RuntimeBuilt:
        async with self._room:
            started = time.monotonic()
            folder = self._environments.begin(digest, self._installer.uid)
            try:
                async with asyncio.timeout(self._budget.seconds):
                    size = await self._install(folder, base, lock)
                await self._keep(folder / "env", base, digest, size)
            except TimeoutError as error:
                raise Failed("runtime_timeout", f"it was not built within {self._budget.seconds:g} s") from error
            except OSError as error:
                raise Failed("runtime_failed", str(error)) from error
            finally:
                await cleanup.delete(folder)
            seconds = time.monotonic() - started
        _seconds.observe(seconds)
        _log.info("runtime_built", digest=digest, bytes=size, seconds=round(seconds, 1))
        return RuntimeBuilt(digest=digest, bytes=size, seconds=seconds)

    async def _install(self, folder: Path, base: Runtime, lock: str) -> int:
        uv = self._installer.program()
        self._installer.prepare(folder, "lock.txt", lock)
        self._on_stage("begun")
        env, python = folder / "env", str(folder / "env" / "bin" / "python")
        shown = (uv, *base.folders)
        await self._run(folder, shown, str(uv), "venv", "--relocatable", "--python", str(base.python), str(env))
        self._show_base(env, base)
        options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--python", python]
        if self._installer.source.index_url == NO_INDEX:
            options.append("--no-index")
        asked = (str(uv), "pip", "install", *options, "--requirement", str(folder / "lock.txt"))
        await self._run(folder, (*shown, *self._installer.source.folders), *asked, online=True)
        self._on_stage("installed")
        await self._compile(folder, base)
        return await self._settle(env)

    def _show_base(self, env: Path, base: Runtime) -> None:
        """What the base itself has installed can be imported too, after what the lock names."""
        site = env / "lib" / f"python{base.version}" / "site-packages"
        packages = base.python.parent.parent / "lib" / f"python{base.version}" / "site-packages"
        (site / "penstock_base.pth").write_text(f"{packages}\n")

    async def _compile(self, folder: Path, base: Runtime) -> None:
        """Compile for units, which cannot write here. By the base's interpreter and without `site`: no `.pth` file of
        a package is obeyed. Files that do not compile are left as they are."""
        options = ("-I", "-S", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash")
        with suppress(Failed):
            await self._run(folder, base.folders, str(base.python), *options, str(folder / "env" / "lib"))

    async def _settle(self, env: Path) -> int:
        size = await asyncio.to_thread(environments.settle, env)
        if size > self._budget.bytes_max:
            raise self._too_big()
        return size

    async def _keep(self, env: Path, base: Runtime, digest: str, size: int) -> None:
        # On disk before its name is: after a loss of power it must not be there by half.
        syncing = await asyncio.create_subprocess_exec("sync", "-f", str(env), stderr=asyncio.subprocess.DEVNULL)
        await syncing.wait()
        for gone in self._environments.keep(env, base, digest, size):
            await cleanup.delete(gone)

    async def _run(self, folder: Path, shown: tuple[Path, ...], *argv: str, online: bool = False) -> None:
        """A step of the build, with room for the environment and what it is unpacked from."""
        try:
            await self._installer.run(folder, shown, *argv, bytes_max=2 * self._budget.bytes_max, online=online)
        except TooBig as error:
            raise self._too_big() from error

    def _too_big(self) -> Failed:
        return Failed("runtime_too_big", f"a runtime may have {self._budget.bytes_max} bytes at most")


def _checked(wanted: RuntimeLock) -> str:
    """The lock, if it is what its digest says and nothing else than a lock."""
    try:
        lock = locks.unpack(wanted.lock)
    except locks.BadLock as error:
        raise Refused("malformed", f"the lock is malformed: {error}") from error
    if locks.digest(wanted.base, lock) != wanted.digest:
        raise Refused("malformed", "the digest is not that of base and lock")
    return lock
