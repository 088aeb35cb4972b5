"""Resolves requirements to a lock, for the base's interpreter and from the operator's index, in the installer's
sandbox.

Only wheels are considered, so that no code of any package runs. The lock is in its normal form, with the hashes of all
files of each version that was chosen.
"""

import asyncio
import re
import time
from pathlib import Path
from typing import Final

from penstock.node import cleanup
from penstock.node.environments import Environments
from penstock.node.errors import Failed, Refused
from penstock.node.installer import NO_INDEX, Installer
from penstock.node.runtimes import Runtime, Runtimes
from penstock.wire import locks, requirements
from penstock.wire.tasks import RESOLUTIONS_MAX, RuntimeResolve, RuntimeResolved

_SECONDS: Final = 120.0
#: Of the folder: metadata of packages, and wheels that do not offer theirs apart.
_BYTES_MAX: Final = 8 << 30
_OPTIONS: Final = (
    *("--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate"),
    *("--no-emit-index-url", "--no-emit-find-links", "--quiet"),
)
_AWAY: Final = re.compile(
    r"failed to fetch|error sending request|request failed after|dns error|connect|timed out|timeout", re.IGNORECASE
)
_UNSOLVED: Final = re.compile(
    r"no solution found|not found in the (?:package registry|provided)|no wheels", re.IGNORECASE
)


class Resolver:
    """A few resolutions at once, each in a folder of its own that does not outlive it."""

    def __init__(
        self, *, images: Runtimes, environments: Environments, installer: Installer, seconds: float = _SECONDS
    ) -> None:
        self._images = images
        self._environments = environments
        self._installer = installer
        self._seconds = seconds
        self._room = asyncio.Semaphore(RESOLUTIONS_MAX)

    async def resolve(self, request: RuntimeResolve) -> RuntimeResolved:
        """The lock. Failed `unresolvable` names what cannot be had, `index_away` says that nobody could be asked."""
        try:
            wanted = requirements.normal(request.requirements)
        except requirements.BadRequirements as error:
            raise Refused("malformed", f"the requirements are malformed: {error}") from error
        base = self._images.find(request.base)
        async with self._room:
            started = time.monotonic()
            folder = self._environments.begin("resolve", self._installer.uid)
            try:
                async with asyncio.timeout(self._seconds):
                    lock = await self._compile(folder, base, wanted)
            except TimeoutError as error:
                raise Failed("resolve_timeout", f"it was not resolved within {self._seconds:g} s") from error
            except OSError as error:
                raise Failed("resolve_failed", str(error)) from error
            finally:
                await cleanup.delete(folder)
        seconds = time.monotonic() - started
        return RuntimeResolved(lock=locks.pack(lock), python=base.version, seconds=seconds)

    async def _compile(self, folder: Path, base: Runtime, wanted: str) -> str:
        uv = self._installer.program()
        self._installer.prepare(folder, "requirements.in", wanted)
        options = [*_OPTIONS, "--python", str(base.python)]
        if self._installer.source.index_url == NO_INDEX:
            options.append("--no-index")
        files = (str(folder / "requirements.in"), "--output-file", str(folder / "lock.txt"))
        shown = (uv, *base.folders, *self._installer.source.folders)
        try:
            await self._installer.run(
                folder, shown, str(uv), "pip", "compile", *options, *files, bytes_max=_BYTES_MAX, online=True
            )
        except Failed as error:
            raise _judged(error) from error
        return _read(folder / "lock.txt")


def _read(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(locks.LOCK_BYTES_MAX + 1)
    try:
        return locks.normal(content.decode())
    except (locks.BadLock, UnicodeDecodeError) as error:
        raise Failed("resolve_failed", f"the lock that came of it cannot be used: {error}") from error


def _judged(error: Failed) -> Failed:
    """The installer's words, with what they mean."""
    if error.code != "runtime_failed":
        return error
    if _UNSOLVED.search(error.detail):
        return Failed("unresolvable", error.detail)
    if _AWAY.search(error.detail):
        return Failed("index_away", f"the package index does not answer: {error.detail}")
    return Failed("resolve_failed", error.detail)
