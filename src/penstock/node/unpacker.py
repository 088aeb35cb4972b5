"""The process that unpacks one code archive: standard input into the working folder.

It has limits of its own and belongs to nobody but the unit's user, so that no archive can take more of the node than
they allow. The folder must be one that nobody else can reach. `node.archives` starts it, and reads how it ended.
"""

import errno
import os
import resource
import signal
import sys
from typing import Final

from penstock.wire.archives import BadArchive, Entry, Reader

#: How it ends when the archive is bad (the reason is on standard output), and when the system failed (the number is).
BAD: Final = 3
FAILED: Final = 4
_FOLDERS_MAX: Final = 20_000
_MEMORY_BYTES: Final = 512 << 20
_DESCRIPTORS: Final = 32
_PIECE_BYTES: Final = 256 << 10
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_THERE: Final = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)


class Writer:
    """Makes the entries of one archive below the working folder."""

    def __init__(self) -> None:
        self._file = -1
        self._folders = 0
        self._last: tuple[bytes, ...] = ()

    def begin(self, entry: Entry) -> None:
        """Make a folder, or a file whose content follows."""
        self.close()
        try:
            if entry.folder:
                self._make_folders(entry.parts)
            else:
                self._make_folders(entry.parts[:-1])
                self._file = os.open(b"/".join(entry.parts), _NEW, 0o600)
                os.fchmod(self._file, 0o755 if entry.runnable else 0o644)
        except OSError as error:
            if error.errno in _THERE:
                raise BadArchive(f"{entry.shown} is in it twice") from None
            raise

    def write(self, piece: bytes) -> None:
        """More content of the last file."""
        while piece:
            piece = piece[os.write(self._file, piece) :]

    def close(self) -> None:
        """The last file is complete."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _make_folders(self, parts: tuple[bytes, ...]) -> None:
        if parts == self._last:
            return
        for depth in range(1, len(parts) + 1):
            try:
                os.mkdir(b"/".join(parts[:depth]), 0o755)  # noqa: PTH102 (pathlib would be half of the start)
            except FileExistsError:
                continue
            self._folders += 1
            if self._folders > _FOLDERS_MAX:
                raise BadArchive(f"it has more than {_FOLDERS_MAX} folders")
        self._last = parts


def restrict(*, uid: int | None, cpu_s: int, wall_s: int, bytes_max: int) -> None:
    """From here on: bounded in time, memory and files, and the unit's user."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(wall_s)
    # Above the first there is a signal that tells, above the second one that only ends.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    for limit, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, bytes_max),
        (resource.RLIMIT_NOFILE, _DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.umask(0)


def unpack(*, files_max: int, bytes_max: int) -> None:
    """Standard input into the working folder."""
    writer = Writer()
    reader = Reader(begin=writer.begin, write=writer.write, files_max=files_max, bytes_max=bytes_max)
    while piece := os.read(0, _PIECE_BYTES):
        reader.feed(piece)
    reader.end()
    writer.close()


def main() -> None:
    """The arguments are numbers; a user of -1 stays whoever started it."""
    uid, files_max, bytes_max, cpu_s, wall_s = (int(each) for each in sys.argv[-5:])
    restrict(uid=None if uid < 0 else uid, cpu_s=cpu_s, wall_s=wall_s, bytes_max=bytes_max)
    try:
        unpack(files_max=files_max, bytes_max=bytes_max)
    except BadArchive as error:
        _end(BAD, str(error))
    except MemoryError:
        # The reader's own memory is bounded, whatever the archive holds.
        _end(FAILED, str(errno.ENOMEM))
    except OSError as error:
        _end(FAILED, str(error.errno))


def _end(code: int, said: str) -> None:
    os.write(1, said.encode("ascii", "replace"))
    os._exit(code)
