"""Tenants' environments on this node: one folder each, named by the digest of base and lock, complete or not there.

An environment is built elsewhere in the same folder and renamed when it is whole; what was only begun is cleared away
at the agent's start. When they get too big in all, those that have not been used for the longest time go; never one
that a unit uses, and none that was asked for a moment ago.
"""

import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from penstock.node.errors import Failed, Refused
from penstock.node.runtimes import Runtime
from penstock.wire import locks
from penstock.wire.unreadable import UNREADABLE

_MARKER: Final = "penstock.json"
#: Whoever asked for an environment needs it within this time, and then has a unit on it.
FRESH_S: Final = 900.0


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a whole environment. `interpreter` is what it was made for: another one cannot run it."""

    bytes: int
    interpreter: str


@dataclass(frozen=True, slots=True)
class _Built:
    folder: Path
    bytes: int
    used_at: float


class Environments:
    """All environments of this node, below a folder that everyone may pass through but not list."""

    def __init__(self, folder: Path, *, bytes_max: int, in_use: Callable[[], Collection[str]] = frozenset) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o711)
        self.folder = folder
        self._bytes_max = bytes_max
        #: The digests that units use.
        self.in_use = in_use

    def clear(self) -> None:
        """Delete what a dead agent had begun or was deleting."""
        for entry in self.folder.glob(".*"):
            shutil.rmtree(entry, ignore_errors=True)

    def find(self, base: Runtime, digest: str) -> Marker | None:
        """What is known of an environment that can be used; it counts as used from now on."""
        if not locks.is_digest(digest):
            raise Refused("malformed", "a runtime is named by 64 hexadecimal digits")
        path = self.folder / digest / _MARKER
        try:
            marker = msgspec.json.decode(path.read_bytes(), type=Marker)
            os.utime(path)
        except (OSError, *UNREADABLE):
            return None
        return marker if marker.interpreter == _interpreter(base) else None

    def over(self, base: Runtime, digest: str) -> Runtime:
        """The environment on its base; Failed `no_runtime` when it has not been built here."""
        if self.find(base, digest) is None:
            raise Failed("no_runtime", f"this node has not built the runtime {digest}")
        folder = self.folder / digest
        return replace(base, python=folder / "bin" / "python", folders=(*base.folders, folder))

    def begin(self, digest: str, uid: int | None) -> Path:
        """A folder to build in, of this user."""
        folder = self.folder / f".{digest[:12]}-{secrets.token_hex(4)}"
        folder.mkdir(mode=0o700)
        if uid is not None:
            os.chown(folder, uid, uid)
        return folder

    def keep(self, built: Path, base: Runtime, digest: str, size: int) -> list[Path]:
        """Take a whole environment over. What had to make room for it is left to be deleted, under other names."""
        gone = self._make_room(size, but=digest)
        marker = Marker(bytes=size, interpreter=_interpreter(base))
        (built / _MARKER).write_bytes(msgspec.json.encode(marker))
        (built / _MARKER).chmod(0o644)
        target = self.folder / digest
        if target.exists():
            gone.append(self._set_aside(target))
        built.rename(target)
        return gone

    def _make_room(self, needed: int, *, but: str) -> list[Path]:
        others = [each for each in self._built() if each.folder.name != but]
        total = needed + sum(each.bytes for each in others)
        used, now = set(self.in_use()), time.time()
        going: list[Path] = []
        for each in sorted(others, key=lambda each: each.used_at):
            if total <= self._bytes_max:
                break
            if each.folder.name not in used and now - each.used_at > FRESH_S:
                going.append(each.folder)
                total -= each.bytes
        if total > self._bytes_max:
            raise Failed("no_room", f"runtimes may have {self._bytes_max} bytes in all on this node, and all are used")
        return [self._set_aside(folder) for folder in going]

    def _built(self) -> list[_Built]:
        return [_look(entry) for entry in self.folder.iterdir() if locks.is_digest(entry.name)]

    def _set_aside(self, folder: Path) -> Path:
        return folder.rename(self.folder / f".gone-{secrets.token_hex(8)}")


def _look(folder: Path) -> _Built:
    path = folder / _MARKER
    try:
        marker = msgspec.json.decode(path.read_bytes(), type=Marker)
        return _Built(folder, marker.bytes, path.stat().st_mtime)
    except (OSError, *UNREADABLE):
        return _Built(folder, 0, 0.0)


def _interpreter(base: Runtime) -> str:
    return f"{base.version} {base.python.resolve()}"


def size_of(folder: Path) -> int:
    """The bytes below a folder, each file once however many names it has."""
    seen: set[int] = set()
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                found = Path(parent, name).lstat()
            except FileNotFoundError:
                continue
            if found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_blocks * 512
    return total


def settle(folder: Path) -> int:
    """Let everyone read and nobody gain anything by it: the user of a unit is not the one that built. Its size."""
    for parent, names, files in os.walk(folder):
        for name in (*names, *files):
            path = Path(parent, name)
            mode = path.lstat().st_mode
            if stat.S_ISDIR(mode):
                path.chmod(0o755)
            elif stat.S_ISREG(mode):
                path.chmod(0o755 if mode & 0o100 else 0o644)
    folder.chmod(0o755)
    return size_of(folder)
