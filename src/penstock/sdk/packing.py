"""Packs a folder of code into an archive: the same files always make the same bytes, and so the same digest.

Left out is what `ignoring` says. A link is packed as what it leads to, if that lies in the folder and is not left out
itself; any other link is left out, and told. What lies below a link is subject to the rules of its own place, as in
git, and to those of its name in the archive.
"""

import gzip
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.sdk.errors import InvalidArgument
from penstock.sdk.ignoring import Ignored
from penstock.wire.archives import BYTES_MAX, FILES_MAX

#: The same on every node, whatever the caller's own.
_PLAIN, _RUNNABLE = 0o644, 0o755
_LEVEL: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar.gz in memory. `bytes` is the size of its files; `skipped` says which links were left out, and why."""

    content: bytes
    sha256: str
    names: frozenset[str]
    bytes: int
    skipped: tuple[str, ...] = ()

    @property
    def files(self) -> int:
        """How many files are in it."""
        return len(self.names)


class Walk:
    """The files of a folder that are packed, in order. `skipped` grows while it is iterated."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.skipped: list[str] = []
        self._ignored = Ignored(self.root)

    def __iter__(self) -> Iterator[tuple[str, Path]]:
        """Each path below the root, and the file that has its content."""
        return self._walk(self.root, "", (self.root,))

    def _walk(self, folder: Path, below: str, chain: tuple[Path, ...]) -> Iterator[tuple[str, Path]]:
        """`folder` is real; `below` is how paths in it are called; `chain` are the folders on the way to it."""
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            path, name = folder / entry.name, below + entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if self._ignored(path, is_folder=is_folder):
                continue
            if len(chain) > 1 and self._ignored(self.root / name, is_folder=is_folder):
                continue
            real = self._followed(path, name, chain) if entry.is_symlink() else path
            if real is None or (entry.is_symlink() and self._ignored(self.root / name, is_folder=real.is_dir())):
                continue
            if real.is_dir():
                yield from self._walk(real, f"{name}/", (*chain, real))
            elif real.is_file():
                yield name, real
            else:
                self.skipped.append(f"{name} is not a file")

    def _followed(self, link: Path, name: str, chain: tuple[Path, ...]) -> Path | None:
        """What a link leads to; None if it stays out."""
        real = link.resolve()
        why = ""
        if not real.exists():
            why = "leads to nothing"
        elif not real.is_relative_to(self.root):
            why = "leads out of the folder"
        elif real in chain:
            why = "leads back to a folder that it is in"
        elif self._hidden(real):
            why = "leads to a file that is left out"
        if why:
            self.skipped.append(f"{name} is a link that {why}")
        return None if why else real

    def _hidden(self, real: Path) -> bool:
        """Whether the path or a folder above it is left out."""
        parts = [real, *(each for each in real.parents if each.is_relative_to(self.root) and each != self.root)]
        return any(self._ignored(each, is_folder=each.is_dir()) for each in parts)


def pack(root: Path) -> Archive:
    """The folder's code. InvalidArgument when it is too much."""
    plain = io.BytesIO()
    names: set[str] = set()
    size = 0
    walk = Walk(root)
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in walk:
            names.add(name)
            size += file.stat().st_size
            if size > BYTES_MAX or len(names) > FILES_MAX:
                raise _too_much(root)
            _add(tar, name, file)
    content = gzip.compress(plain.getvalue(), _LEVEL, mtime=0)
    digest = hashlib.sha256(content).hexdigest()
    return Archive(
        content=content, sha256=digest, names=frozenset(names), bytes=size, skipped=tuple(sorted(set(walk.skipped)))
    )


def _add(tar: tarfile.TarFile, name: str, file: Path) -> None:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read: {error.strerror}", field="file") from error
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = _RUNNABLE if file.stat().st_mode & 0o100 else _PLAIN
    tar.addfile(info, io.BytesIO(content))


def _too_much(root: Path) -> InvalidArgument:
    largest = sorted(((file.stat().st_size, name) for name, file in Walk(root)), reverse=True)[:3]
    named = ", ".join(f"{name} ({size >> 10} KiB)" for size, name in largest)
    return InvalidArgument(
        f"the code in {root} is more than {BYTES_MAX >> 20} MB or {FILES_MAX} files; the largest: {named}. "
        "Name what is not needed in .penstockignore, and keep data as objects",
        field="file",
    )
