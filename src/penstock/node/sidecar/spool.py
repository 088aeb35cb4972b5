"""Bytes that come piece by piece and may be many: a few are kept in memory, more go to a file without a name."""

import mmap
import tempfile
from typing import IO, Final

from penstock.node.sidecar.errors import TooLarge

_MEMORY_BYTES_MAX: Final = 1 << 20


class Spool:
    """Collects one answer, or one line of it."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._memory = bytearray()
        self._file: IO[bytes] | None = None
        self._bytes = 0

    def __len__(self) -> int:
        """How many bytes have come."""
        return self._bytes

    def add(self, piece: bytes | memoryview) -> None:
        """Take a piece; TooLarge when it is one too many."""
        self._bytes += len(piece)
        if self._bytes > self._bytes_max:
            self.close()
            raise TooLarge(self._bytes_max)
        if self._file is None and self._bytes > _MEMORY_BYTES_MAX:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by `take` or `close`)
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += piece
        else:
            self._file.write(piece)

    def take(self) -> bytes | mmap.mmap:
        """All of it; what was in a file is mapped, and gone with the mapping. The spool is empty again."""
        taken: bytes | mmap.mmap = bytes(self._memory)
        if self._file is not None:
            taken = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self.close()
        return taken

    def close(self) -> None:
        """Drop what came."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._memory = bytearray()
        self._bytes = 0
