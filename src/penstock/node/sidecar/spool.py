"""Bytes that come piece by piece and may be many: a few are kept in memory, more go to a file without a name."""

import mmap
import tempfile
from contextlib import suppress
from typing import IO, Final

from penstock.node.sidecar.errors import NotSpooled, TooLarge

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
        """Take a piece; TooLarge when it is one too many, NotSpooled when there is no room for it."""
        self._bytes += len(piece)
        if self._bytes > self._bytes_max:
            self.close()
            raise TooLarge(self._bytes_max)
        try:
            self._keep(piece)
        except OSError as error:
            self.close()
            raise NotSpooled(error) from error

    def _keep(self, piece: bytes | memoryview) -> None:
        if self._file is None and self._bytes > _MEMORY_BYTES_MAX:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `take` or `close`)
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += piece
        else:
            self._file.write(piece)

    def take(self) -> bytes | mmap.mmap:
        """All of it; what was in a file is mapped, and gone with the mapping. The spool is empty again."""
        taken: bytes | mmap.mmap = bytes(self._memory)
        try:
            if self._file is not None:
                self._file.flush()
                taken = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise NotSpooled(error) from error
        finally:
            self.close()
        return taken

    def close(self) -> None:
        """Drop what came."""
        if self._file is not None:
            # What is still buffered may not fit either.
            with suppress(OSError):
                self._file.close()
        self._file = None
        self._memory = bytearray()
        self._bytes = 0
