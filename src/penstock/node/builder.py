"""Builds tenants' environments: a virtual environment on the base's interpreter with exactly the packages of a lock.

No code of a package runs here. Only wheels are taken, whose installation is unpacking; hashes are required; nothing
that the lock does not name comes along. The installer (uv) works in a sandbox of its own, under a user of its own where
the agent is root: it sees the base, the folder that it builds in and the network, and has bounded time and space.
"""

import asyncio
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import Counter, Histogram

from penstock.kit.telemetry import logger
from penstock.node import cleanup, environments
from penstock.node.drivers import Driver, Tool
from penstock.node.environments import Environments
from penstock.node.errors import Failed, Refused
from penstock.node.runtimes import Runtime, Runtimes
from penstock.wire import locks
from penstock.wire.tasks import RuntimeBuild, RuntimeBuilt, RuntimeLock

_log = logger(__name__)
#: Different environments at once; more wait.
BUILDS_MAX: Final = 2
NO_INDEX: Final = "none"
_LOOK_S: Final = 1.0
_OUTPUT_BYTES: Final = 16 << 10
_LINES: Final = 12
_DETAIL_CHARS_MAX: Final = 1500
_CREDENTIALS: Final = re.compile(r"(://)[^/\s@]+@")
_UNPRINTABLE: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[^\n\x20-\x7e\u00a0-\uffff]")
#: What the installer may know of the agent's own environment: where packages come from and how to get there.
_SOURCE_PREFIXES: Final = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX", "UV_FIND_LINKS", "UV_HTTP", "SSL_CERT_")
_SOURCE_NAMES: Final = frozenset(
    {"uv_native_tls", "uv_system_certs", "uv_insecure_host", "http_proxy", "https_proxy", "all_proxy", "no_proxy"}
)
#: Of address space: what is in a package must not take the host's memory, be it unpacked or compiled.
_MEMORY_KIB: Final = 8 << 20
_built = Counter("penstock_node_runtime_builds_total", "Environments built, by outcome.", ("outcome",))
_seconds = Histogram(
    "penstock_node_runtime_build_seconds", "How long a build took.", buckets=(1, 5, 15, 30, 60, 120, 300, 600, 1200)
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where packages come from. `env` is for the installer; `config` is its configuration file's content."""

    env: Mapping[str, str]
    index_url: str = ""
    find_links: str = ""
    config: bytes | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Local folders of packages and certificates, which the sandbox must show."""
        env = self.environment()
        named = [*env.get("UV_FIND_LINKS", "").split(","), env.get("SSL_CERT_FILE", ""), env.get("SSL_CERT_DIR", "")]
        paths = [Path(name.removeprefix("file://")) for name in named if name.removeprefix("file://").startswith("/")]
        return tuple(path for path in paths if path.exists())

    def environment(self) -> dict[str, str]:
        """The installer's variables; credentials in them are seen by its user alone."""
        given = {"UV_DEFAULT_INDEX": self.index_url} if self.index_url not in ("", NO_INDEX) else {}
        return {**self.env, **given} | ({"UV_FIND_LINKS": self.find_links} if self.find_links else {})


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a build may take."""

    seconds: float = 540.0
    bytes_max: int = 32 << 30


def source_of(environ: Mapping[str, str], *, index_url: str, find_links: str) -> Source:
    """What the agent's environment and settings say about packages."""
    env = {
        name: value
        for name, value in environ.items()
        if name.startswith(_SOURCE_PREFIXES) or name.lower() in _SOURCE_NAMES
    }
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/"), ".config"))
    given = environ.get("UV_CONFIG_FILE")
    candidates = [Path(given)] if given else [home / "uv" / "uv.toml", Path("/etc/uv/uv.toml")]
    config = next((path.read_bytes() for path in candidates if path.is_file()), None)
    return Source(env=env, index_url=index_url, find_links=find_links, config=config)


def find_installer() -> Path | None:
    """uv from our own environment, else the system's."""
    own = Path(sys.prefix, "bin", "uv")
    found = shutil.which("uv")
    return own if own.exists() else Path(found) if found else None


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
        driver: Driver,
        installer: Path | None,
        source: Source,
        budget: Budget,
        uid: int | None = None,
        on_stage: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._images = images
        self._environments = environments
        self._driver = driver
        self._installer = installer
        self._source = source
        self._budget = budget
        self._uid = uid
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
            folder = self._environments.begin(digest, self._uid)
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
        uv = self._installer
        if uv is None:
            raise Failed("no_installer", "uv is not installed on this node; install penstock[embedded] or uv")
        self._prepare(folder, lock)
        self._on_stage("begun")
        env, python = folder / "env", str(folder / "env" / "bin" / "python")
        shown = (uv, *base.folders)
        await self._run(folder, shown, str(uv), "venv", "--relocatable", "--python", str(base.python), str(env))
        self._show_base(env, base)
        options = ["--require-hashes", "--only-binary", ":all:", "--no-deps", "--python", python]
        if self._source.index_url == NO_INDEX:
            options.append("--no-index")
        asked = (str(uv), "pip", "install", *options, "--requirement", str(folder / "lock.txt"))
        await self._run(folder, (*shown, *self._source.folders), *asked, online=True)
        self._on_stage("installed")
        await self._compile(folder, base)
        return await self._settle(env)

    def _prepare(self, folder: Path, lock: str) -> None:
        for name in ("tmp", "cache"):
            (folder / name).mkdir()
        (folder / "lock.txt").write_text(lock)
        if self._source.config is not None:
            (folder / "uv.toml").write_bytes(self._source.config)
            (folder / "uv.toml").chmod(0o600)
        for entry in folder.iterdir() if self._uid is not None else ():
            os.chown(entry, self._uid or 0, self._uid or 0)

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

    def _too_big(self) -> Failed:
        return Failed("runtime_too_big", f"a runtime may have {self._budget.bytes_max} bytes at most")

    async def _run(self, folder: Path, shown: tuple[Path, ...], *argv: str, online: bool = False) -> None:
        """Run the installer in its sandbox; Failed with its last lines."""
        bounded = ("/bin/sh", "-c", 'ulimit -v "$0" && exec "$@"', str(_MEMORY_KIB), *argv)
        tool = Tool(argv=bounded, folder=folder, shown=shown, uid=self._uid, online=online)
        async with self._process(tool) as process:
            watching = asyncio.create_task(self._watch(folder, process))
            try:
                output = await _tail(process)
                code = await process.wait()
            finally:
                watching.cancel()
            if watching.done() and not watching.cancelled() and watching.result():
                raise self._too_big()
        if code != 0:
            raise Failed("runtime_failed", _last_lines(output) or f"the installer ended with code {code}")

    @asynccontextmanager
    async def _process(self, tool: Tool) -> AsyncIterator[asyncio.subprocess.Process]:
        launch = self._driver.tool(tool)
        try:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(tool.folder),
                cwd="/",
                pass_fds=launch.descriptors,
                start_new_session=True,
            )
        finally:
            for descriptor in launch.owned:
                os.close(descriptor)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def _environment(self, folder: Path) -> dict[str, str]:
        configured = self._source.config is not None
        return {
            **self._source.environment(),
            **({"UV_CONFIG_FILE": str(folder / "uv.toml")} if configured else {"UV_NO_CONFIG": "1"}),
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
            "NO_COLOR": "1",
        }

    async def _watch(self, folder: Path, process: asyncio.subprocess.Process) -> bool:
        """End it once it has taken more than an environment and what it was unpacked from may have."""
        size = 0
        while size <= 2 * self._budget.bytes_max:
            await asyncio.sleep(_LOOK_S)
            size = await asyncio.to_thread(environments.size_of, folder)
        with suppress(ProcessLookupError):
            process.kill()
        return True


def _checked(wanted: RuntimeLock) -> str:
    """The lock, if it is what its digest says and nothing else than a lock."""
    try:
        lock = locks.unpack(wanted.lock)
    except locks.BadLock as error:
        raise Refused("malformed", f"the lock is malformed: {error}") from error
    if locks.digest(wanted.base, lock) != wanted.digest:
        raise Refused("malformed", "the digest is not that of base and lock")
    return lock


async def _tail(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(_OUTPUT_BYTES):
        kept = (kept + chunk)[-_OUTPUT_BYTES:]
    return kept.decode(errors="replace")


def _last_lines(output: str) -> str:
    """What a person needs to see, as one line, without control characters and credentials."""
    shown = _CREDENTIALS.sub(r"\1", _UNPRINTABLE.sub("", output))
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    return "; ".join(lines[-_LINES:])[-_DETAIL_CHARS_MAX:]
