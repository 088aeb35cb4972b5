"""Code archives: tar.gz files that a tenant made, unpacked by us. Nothing in one is believed.

Only plain files and folders below the target are made, each once, up to `FILES_MAX` of them and `BYTES_MAX` in all;
anything else (links, devices, names that lead elsewhere) refuses the whole archive. The target must be a folder that
nobody but us can reach while this runs.
"""

import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Final

from penstock.node.errors import Failed

FILES_MAX: Final = 10_000
BYTES_MAX: Final = 512 << 20
_NAME_BYTES_MAX: Final = 255
_DEPTH_MAX: Final = 64
#: What headers may take beside the content: names, and what padding there is.
_HEADERS_BYTES_MAX: Final = 64 << 20
#: A long name or its like is read whole, so it has a limit of its own.
_READ_BYTES_MAX: Final = 1 << 20
_PIECE_BYTES: Final = 256 << 10
_IN_MEMORY_BYTES_MAX: Final = 4 << 20
_PLAIN: Final = (tarfile.REGTYPE, tarfile.AREGTYPE)
#: With a header of gzip's.
_WINDOW: Final = zlib.MAX_WBITS | 16


class _Bounded:
    """The archive without its compression. No read is larger than a header may be."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        """As a file's."""
        if not 0 <= size <= _READ_BYTES_MAX:
            raise _bad(f"a header has {size} bytes, the most is {_READ_BYTES_MAX}")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """As a file's."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As a file's."""
        return self._file.tell()


def unpack(archive: Path, target: Path, *, uid: int | None) -> None:
    """Unpack into the new folder `target`, which becomes `uid`'s with all that is in it. Failed `bad_code` says why
    not; `target` is then for the caller to delete."""
    target.mkdir(mode=0o755)
    try:
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES_MAX, dir=str(target.parent)) as plain:
            _decompress(archive, plain)
            plain.seek(0)
            with tarfile.open(fileobj=_Bounded(plain), mode="r:") as opened:  # pyright: ignore[reportArgumentType, reportCallIssue]
                _Unpacking(opened, target).run()
        _give(target, uid)
    except (tarfile.TarError, zlib.error, EOFError, ValueError, RecursionError) as error:
        raise _bad(f"it is no whole tar.gz archive: {error}") from error
    except OSError as error:
        raise _bad(f"{error.strerror}") from error


def _decompress(archive: Path, plain: IO[bytes]) -> None:
    """All of the archive's gzip members, one behind the other."""
    stream, written, ended = zlib.decompressobj(_WINDOW), 0, False
    with archive.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            while piece:
                if ended:
                    stream, ended = zlib.decompressobj(_WINDOW), False
                content = stream.decompress(piece, _PIECE_BYTES)
                written += len(content)
                if written > BYTES_MAX + _HEADERS_BYTES_MAX:
                    raise _bad(f"it has more than {BYTES_MAX} bytes unpacked")
                plain.write(content)
                ended = stream.eof
                piece = stream.unused_data if ended else stream.unconsumed_tail
    if not ended:
        raise EOFError("it ends too early")


class _Unpacking:
    """One archive on its way into a folder."""

    def __init__(self, archive: tarfile.TarFile, target: Path) -> None:
        self._archive = archive
        self._target = target
        self._bytes = 0

    def run(self) -> None:
        """Member by member, and none is kept in memory."""
        for number, member in enumerate(self._members()):
            if number >= FILES_MAX:
                raise _bad(f"it has more than {FILES_MAX} files and folders")
            path = self._path(member.name)
            try:
                self._make(member, path)
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise _bad(f"{_shown(member.name)} is in it twice") from error

    def _make(self, member: tarfile.TarInfo, path: Path) -> None:
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
        elif member.type in _PLAIN and member.sparse is None:
            self._write(member, path)
        else:
            raise _bad(f"{_shown(member.name)} is neither a file nor a folder")

    def _members(self) -> Iterator[tarfile.TarInfo]:
        while (member := self._archive.next()) is not None:
            yield member
            self._archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]

    def _path(self, name: str) -> Path:
        parts = PurePosixPath(name).parts
        too_long = len(parts) > _DEPTH_MAX or any(len(os.fsencode(part)) > _NAME_BYTES_MAX for part in parts)
        if name.startswith("/") or ".." in parts or "\0" in name or too_long:
            raise _bad(f"{_shown(name)} is not a name below the folder")
        return self._target.joinpath(*parts)

    def _write(self, member: tarfile.TarInfo, path: Path) -> None:
        content = self._archive.extractfile(member)
        if content is None or path == self._target:
            raise _bad(f"{_shown(member.name)} is neither a file nor a folder")
        self._bytes += member.size
        if member.size < 0 or self._bytes > BYTES_MAX:
            raise _bad(f"it has more than {BYTES_MAX} bytes unpacked")
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            while piece := content.read(_PIECE_BYTES):
                file.write(piece)
            os.fchmod(file.fileno(), 0o755 if member.mode & stat.S_IXUSR else 0o644)


def _give(target: Path, uid: int | None) -> None:
    for parent, folders, files in os.walk(target):
        for name in folders:
            Path(parent, name).chmod(0o755)
        for name in (*folders, *files) if uid is not None else ():
            os.chown(Path(parent, name), uid, uid, follow_symlinks=False)  # pyright: ignore[reportArgumentType]
    target.chmod(0o755)
    if uid is not None:
        os.chown(target, uid, uid)


def _shown(name: str) -> str:
    return ascii(name[:100])


def _bad(detail: str) -> Failed:
    return Failed("bad_code", f"the function's code archive cannot be used: {detail}")
