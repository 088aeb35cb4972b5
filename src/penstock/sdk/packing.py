"""Packs a folder of code into an archive: the same files always make the same bytes, and so the same digest.

What is left out: folders of tools and caches, and whatever `.gitignore` and `.penstockignore` in the folder itself
name. A link is packed as the file that it leads to, which must lie in the folder too.
"""

import gzip
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.sdk.errors import InvalidArgument
from penstock.wire.archives import BYTES_MAX, FILES_MAX

#: The same on every node, whatever the caller's own.
_PLAIN, _RUNNABLE = 0o644, 0o755
_LEVEL: Final = 6
_ALWAYS: Final = (
    *(".git/", ".hg/", ".svn/", ".venv/", "venv/", "__pycache__/", "*.pyc", ".DS_Store", "node_modules/"),
    *(".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".tox/", ".nox/", ".idea/", ".vscode/", "*.egg-info/"),
)
_IGNORES: Final = (".gitignore", ".penstockignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A tar.gz in memory."""

    content: bytes
    sha256: str
    files: int


@dataclass(frozen=True, slots=True)
class _Rule:
    pattern: re.Pattern[str]
    excludes: bool
    folders_only: bool


class Ignored:
    """The rules of a folder; as in git, the last one that matches counts."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._rules = [rule for line in lines if (rule := _rule(line)) is not None]

    def __call__(self, path: str, *, folder: bool) -> bool:
        """Whether the path below the root is left out."""
        found = False
        for rule in self._rules:
            if (folder or not rule.folders_only) and rule.pattern.fullmatch(path):
                found = rule.excludes
        return found


def _rule(line: str) -> _Rule | None:
    text = line.rstrip()
    if not text or text.startswith("#"):
        return None
    excludes = not text.startswith("!")
    text = text.removeprefix("!")
    folders_only, text = text.endswith("/"), text.rstrip("/")
    anchored, text = "/" in text, text.lstrip("/")
    return _Rule(re.compile(("" if anchored else "(?:.*/)?") + _translated(text)), excludes, folders_only)


def _translated(glob: str) -> str:
    """A pattern of git's as a regular expression."""
    parts: list[str] = []
    for token in re.findall(r"\*\*/|/\*\*$|\*\*|\*|\?|\[[^]]{1,255}\]|\\.|.", glob):
        known = {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        if token in known:
            parts.append(known[token])
        elif token.startswith("[") and len(token) > 1:
            parts.append("[" + token[1:-1].replace("!", "^", 1).replace("\\", "\\\\") + "]")
        else:
            parts.append(re.escape(token.removeprefix("\\") or token))
    return "".join(parts)


def ignored(root: Path) -> Ignored:
    """The rules for this folder."""
    lines = [*_ALWAYS]
    for name in _IGNORES:
        file = root / name
        if file.is_file():
            lines += file.read_text(errors="replace").splitlines()
    return Ignored(lines)


def files(root: Path) -> Iterator[tuple[str, Path]]:
    """What is packed: each path below the root and the file, in order."""
    rules = ignored(root)
    for folder, names, leaves in os.walk(root):
        base = Path(folder).relative_to(root).as_posix()
        below = "" if base == "." else f"{base}/"
        names[:] = sorted(name for name in names if not rules(below + name, folder=True))
        for name in names:
            if (Path(folder) / name).is_symlink():
                raise InvalidArgument(
                    f"{below}{name} is a link to a folder; leave it out by .penstockignore", field="file"
                )
        for name in sorted(leaves):
            if not rules(below + name, folder=False):
                yield below + name, _real(root, Path(folder) / name)


def _real(root: Path, file: Path) -> Path:
    real = file.resolve()
    if not real.is_file() or not real.is_relative_to(root.resolve()):
        name = file.relative_to(root)
        raise InvalidArgument(f"{name} is no file in the folder; leave it out by .penstockignore", field="file")
    return real


def pack(root: Path) -> Archive:
    """The folder's code. InvalidArgument when it is too much."""
    plain = io.BytesIO()
    count = size = 0
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in sorted(files(root)):
            count, size = count + 1, size + file.stat().st_size
            if size > BYTES_MAX or count > FILES_MAX:
                raise _too_much(root)
            _add(tar, name, file)
    content = gzip.compress(plain.getvalue(), _LEVEL, mtime=0)
    return Archive(content=content, sha256=hashlib.sha256(content).hexdigest(), files=count)


def _add(tar: tarfile.TarFile, name: str, file: Path) -> None:
    content = file.read_bytes()
    info = tarfile.TarInfo(name)
    info.size = len(content)
    info.mode = _RUNNABLE if file.stat().st_mode & 0o100 else _PLAIN
    tar.addfile(info, io.BytesIO(content))


def _too_much(root: Path) -> InvalidArgument:
    largest = sorted(((file.stat().st_size, name) for name, file in files(root)), reverse=True)[:3]
    named = ", ".join(f"{name} ({size >> 10} KiB)" for size, name in largest)
    return InvalidArgument(
        f"the code in {root} is more than {BYTES_MAX >> 20} MB or {FILES_MAX} files; the largest: {named}. "
        "Name what is not needed in .penstockignore, and keep data as objects",
        field="file",
    )
