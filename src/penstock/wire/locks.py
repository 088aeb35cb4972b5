"""Lock files: which packages a tenant's environment consists of, each by version and hash. Pure.

A lock is a requirements file in which every package is pinned (`name==version`) and has at least one SHA-256. Nothing
in it may lead an installer elsewhere: no URL, no path, no option but `--hash`. `normal` reads one and writes it in its
one normal form, so that a comment or a line break changes no digest.
"""

import hashlib
import re
import zlib
from collections.abc import Iterator
from typing import Final

#: What people may send, with comments.
LOCK_BYTES_MAX: Final = 512 << 10
#: What may travel in a task: room is left for the rest of it.
PACKED_BYTES_MAX: Final = 160 << 10
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*")
_HASH: Final = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_EXTRAS: Final = re.compile(r"\[[A-Za-z0-9._, -]{0,255}\]")
_VERSION: Final = re.compile(r"[0-9][A-Za-z0-9.!+_-]{0,126}")
_MARKER: Final = re.compile(r"[A-Za-z0-9_.,'\"<>=!~() +*-]{1,1000}")


class BadLock(ValueError):
    """Not a lock; the text says which line and why."""


def is_digest(text: str) -> bool:
    """Whether this can name an environment."""
    return _DIGEST.fullmatch(text) is not None


def digest(base: str, lock: str) -> str:
    """What names the environment of this base and (normal) lock."""
    return hashlib.sha256(f"{base}\n{lock}".encode()).hexdigest()


def normal(text: str) -> str:
    """The same lock, one package per line and without comments; BadLock when it is none."""
    if len(text.encode(errors="replace")) > LOCK_BYTES_MAX:
        raise BadLock(f"it has more than {LOCK_BYTES_MAX} bytes")
    packages = [_package(number, line) for number, line in _logical_lines(text)]
    if not packages:
        raise BadLock("it names no package")
    lock = "\n".join(packages) + "\n"
    if len(pack(lock)) > PACKED_BYTES_MAX:
        raise BadLock(f"it has more than {PACKED_BYTES_MAX} bytes when compressed")
    return lock


def packages(lock: str) -> int:
    """How many packages a normal lock names."""
    return lock.count("\n")


def pack(lock: str) -> bytes:
    """A lock for a task."""
    return zlib.compress(lock.encode())


def unpack(packed: bytes) -> str:
    """The lock in a task, in its normal form; BadLock for anything else."""
    reader = zlib.decompressobj()
    try:
        lock = reader.decompress(packed, LOCK_BYTES_MAX).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise BadLock(f"it cannot be unpacked: {error}") from error
    if not reader.eof or normal(lock) != lock:
        raise BadLock("it is not in its normal form")
    return lock


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, content) with continued lines joined and without comments and blanks."""
    pieces: list[str] = []
    first = 1
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        first = first if pieces else number
        if line.endswith("\\") and not line.lstrip().startswith("#"):
            pieces.append(line[:-1])
            continue
        if content := _content([*pieces, line]):
            yield first, content
        pieces = []
    if content := _content(pieces):
        yield first, content


def _content(pieces: list[str]) -> str:
    return _COMMENT.sub("", " ".join(pieces)).strip()


def _package(number: int, line: str) -> str:
    requirement, options = _split(line)
    pinned = _pinned(number, requirement)
    if not options:
        raise BadLock(f"line {number}: {_excerpt(requirement)} has no --hash=sha256:…")
    hashes: set[str] = set()
    for option in options:
        found = _HASH.fullmatch(option)
        if found is None:
            raise BadLock(f"line {number}: only --hash=sha256:… with 64 digits may follow a package")
        hashes.add(found[1])
    return " ".join([pinned, *(f"--hash=sha256:{each}" for each in sorted(hashes))])


def _split(line: str) -> tuple[str, list[str]]:
    """The requirement, and all words from the first option on."""
    words = line.split()
    start = next((index for index, word in enumerate(words) if index and word.startswith("--")), len(words))
    return " ".join(words[:start]), words[start:]


def _pinned(number: int, requirement: str) -> str:
    if requirement.startswith("-"):
        raise BadLock(f"line {number}: options such as {_excerpt(requirement)} are not allowed")
    what, semicolon, marker = requirement.partition(";")
    name, equals, version = what.strip().partition("==")
    extras = _extras(name)
    good = equals and _NAME.fullmatch(name.removesuffix(extras).strip()) and _VERSION.fullmatch(version.strip())
    if not good:
        raise BadLock(f"line {number}: {_excerpt(requirement)} must be name==version; no URL, path or range")
    if semicolon and not _MARKER.fullmatch(marker.strip()):
        raise BadLock(f"line {number}: the marker of {_excerpt(what)} is malformed")
    pinned = f"{name.removesuffix(extras).strip()}{extras.replace(' ', '')}=={version.strip()}"
    return f"{pinned} ; {' '.join(marker.split())}" if semicolon else pinned


def _extras(name: str) -> str:
    found = _EXTRAS.search(name)
    return found[0] if found and name.endswith(found[0]) else ""


def _excerpt(text: str) -> str:
    return repr(text.strip()[:60])
