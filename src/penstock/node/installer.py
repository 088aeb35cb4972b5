"""The installer of packages (uv), run in a sandbox of its own with bounded time, memory, space and output.

Under a user of its own where the agent is root: it sees the base, the folder that it works in and the network. Its
sources are the operator's alone.
"""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.node import environments
from penstock.node.drivers import Driver, Tool
from penstock.node.errors import Failed

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


class TooBig(Failed):
    """The installer took more space than it may."""

    def __init__(self) -> None:
        super().__init__("too_big", "the installer took too much space")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installer:
    """`uv` is none on a node without it. `uid` is whom it runs as, where the agent is root."""

    uv: Path | None
    driver: Driver
    source: Source
    uid: int | None = None

    def program(self) -> Path:
        """uv itself."""
        if self.uv is None:
            raise Failed("no_installer", "uv is not installed on this node; install penstock[embedded] or uv")
        return self.uv

    def prepare(self, folder: Path, name: str, text: str) -> None:
        """Make the folder ready, with one file that the installer reads."""
        for each in ("tmp", "cache"):
            (folder / each).mkdir()
        (folder / name).write_text(text)
        if self.source.config is not None:
            (folder / "uv.toml").write_bytes(self.source.config)
            (folder / "uv.toml").chmod(0o600)
        for entry in folder.iterdir() if self.uid is not None else ():
            os.chown(entry, self.uid or 0, self.uid or 0)

    async def run(
        self, folder: Path, shown: tuple[Path, ...], *argv: str, bytes_max: int, online: bool = False
    ) -> None:
        """Run a program in the sandbox. Failed with its last lines, or TooBig when it takes more than `bytes_max`."""
        bounded = ("/bin/sh", "-c", 'ulimit -v "$0" && exec "$@"', str(_MEMORY_KIB), *argv)
        tool = Tool(argv=bounded, folder=folder, shown=shown, uid=self.uid, online=online)
        async with self._process(tool) as process:
            watching = asyncio.create_task(_watch(folder, process, bytes_max))
            try:
                output = await _tail(process)
                code = await process.wait()
            finally:
                watching.cancel()
            if watching.done() and not watching.cancelled() and watching.result():
                raise TooBig
        if code != 0:
            raise Failed("runtime_failed", last_lines(output) or f"the installer ended with code {code}")

    @asynccontextmanager
    async def _process(self, tool: Tool) -> AsyncIterator[asyncio.subprocess.Process]:
        launch = self.driver.tool(tool)
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
        configured = self.source.config is not None
        return {
            **self.source.environment(),
            **({"UV_CONFIG_FILE": str(folder / "uv.toml")} if configured else {"UV_NO_CONFIG": "1"}),
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "UV_CACHE_DIR": str(folder / "cache"),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_NO_PROGRESS": "1",
            "NO_COLOR": "1",
        }


async def _watch(folder: Path, process: asyncio.subprocess.Process, bytes_max: int) -> bool:
    """End it once its folder has more bytes."""
    size = 0
    while size <= bytes_max:
        await asyncio.sleep(_LOOK_S)
        size = await asyncio.to_thread(environments.size_of, folder)
    with suppress(ProcessLookupError):
        process.kill()
    return True


async def _tail(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    kept = b""
    while chunk := await process.stdout.read(_OUTPUT_BYTES):
        kept = (kept + chunk)[-_OUTPUT_BYTES:]
    return kept.decode(errors="replace")


def last_lines(output: str) -> str:
    """What a person needs to see, as one line, without control characters and credentials."""
    shown = _CREDENTIALS.sub(r"\1", _UNPRINTABLE.sub("", output))
    lines = [" ".join(line.split()) for line in shown.splitlines() if line.strip()]
    return "; ".join(lines[-_LINES:])[-_DETAIL_CHARS_MAX:]
