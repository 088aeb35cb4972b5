"""The format of code archives: gzip around a tar of plain files and folders, as `penstock` packs it.

The reader takes what that packer writes and little else: ustar headers, and before one a pax header with a path. Links,
devices, sparse files, GNU's long names and all other extensions are refused. Time and memory are linear in what comes,
and everything has a limit, so that the format can be checked wherever an archive passes. Only the standard library is
imported, and little of it: a process that unpacks one archive starts with this module.
"""

import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

#: Of compressed bytes.
BYTES_MAX: Final = 64 << 20
UNPACKED_BYTES_MAX: Final = 512 << 20
#: Entries of an archive: files, and folders that it names.
FILES_MAX: Final = 10_000
MEMBERS_MAX: Final = 64
DEPTH_MAX: Final = 64
NAME_BYTES_MAX: Final = 255
PATH_BYTES_MAX: Final = 2048
_BLOCK: Final = 512
_PAX_BYTES_MAX: Final = 4096
#: Zeros behind the last entry: writers fill their last record up.
_PADDING_BYTES_MAX: Final = 1 << 20
_PIECE_BYTES: Final = 256 << 10
#: With a header of gzip's.
_WINDOW: Final = zlib.MAX_WBITS | 16
_ZEROS: Final = bytes(_BLOCK)
_FILES: Final = (b"0", b"\0")
_FOLDER: Final = b"5"
_PAX: Final = b"x"
#: What the packer writes into a pax header: a path that does not fit elsewhere, and that it is no UTF-8.
_PAX_NAMES: Final = (b"path", b"hdrcharset")
_RUNNABLE: Final = 0o100


class BadArchive(ValueError):
    """Not an archive of code; the sentence says why, in printable ASCII."""


class Entry(NamedTuple):
    """A file or folder. `parts` are the names of its path, none for the archive's own folder."""

    parts: tuple[bytes, ...]
    size: int
    folder: bool
    runnable: bool

    @property
    def shown(self) -> str:
        """Its path for people."""
        return shown(b"/".join(self.parts))


class Reader:
    """Takes an archive piece by piece. `begin` is told of each entry, `write` gets the content of the last one."""

    def __init__(
        self,
        *,
        begin: Callable[[Entry], None] = lambda _: None,
        write: Callable[[bytes], None] = lambda _: None,
        files_max: int = FILES_MAX,
        bytes_max: int = UNPACKED_BYTES_MAX,
    ) -> None:
        self._begin = begin
        self._write = write
        self._files_max = files_max
        self._bytes_max = bytes_max
        self._stream = zlib.decompressobj(_WINDOW)
        self._whole = False
        self._members = 1
        #: Content and padding of the entry that are still to come.
        self._content = self._filling = 0
        self._block = bytearray()
        self._pax: bytearray | None = None
        self._pax_left = 0
        self._path: bytes | None = None
        self._zero_blocks = self._padding = self._files = self._bytes = 0

    @property
    def unpacked_bytes(self) -> int:
        """Content of all entries so far."""
        return self._bytes

    def feed(self, piece: bytes) -> None:
        """Take the next compressed bytes; BadArchive when they do not belong to an archive of code."""
        try:
            while piece:
                if self._stream.eof:
                    self._next_member()
                self._take(memoryview(self._stream.decompress(piece, _PIECE_BYTES)))
                self._whole = self._stream.eof
                piece = self._stream.unused_data if self._whole else self._stream.unconsumed_tail
        except zlib.error as error:
            raise BadArchive(f"it is no whole tar.gz archive: {error}") from None

    def _next_member(self) -> None:
        """Each costs a copy of what is left of the piece: many of them would cost its square."""
        self._members += 1
        if self._members > MEMBERS_MAX:
            raise BadArchive(f"it has more than {MEMBERS_MAX} gzip members")
        self._stream = zlib.decompressobj(_WINDOW)

    def end(self) -> None:
        """All has come; BadArchive when something is missing."""
        if not self._whole or self._zero_blocks < 2 or self._block:
            raise BadArchive("it is no whole tar.gz archive: it ends too early")

    def _take(self, plain: memoryview) -> None:
        while plain:
            if self._pax_left:
                taken = self._take_pax(plain)
            elif self._content:
                taken = min(self._content, len(plain))
                self._content -= taken
                self._write(bytes(plain[:taken]))
            elif self._filling:
                taken = min(self._filling, len(plain))
                self._filling -= taken
            else:
                taken = min(_BLOCK - len(self._block), len(plain))
                self._block += plain[:taken]
                if len(self._block) == _BLOCK:
                    block, self._block = bytes(self._block), bytearray()
                    self._take_block(block)
            plain = plain[taken:]

    def _take_pax(self, plain: memoryview) -> int:
        assert self._pax is not None
        taken = min(self._pax_left, len(plain))
        self._pax += plain[:taken]
        self._pax_left -= taken
        if not self._pax_left:
            self._path = _pax_path(bytes(self._pax))
        return taken

    def _take_block(self, block: bytes) -> None:
        if block == _ZEROS:
            self._zero_blocks += 1
            self._padding += _BLOCK
            if self._padding > _PADDING_BYTES_MAX:
                raise BadArchive("it goes on behind its end")
            return
        if self._zero_blocks:
            raise BadArchive("it goes on behind its end")
        size, kind = _checked(block)
        if kind == _PAX:
            self._begin_pax(size)
        elif kind in _FILES or kind == _FOLDER:
            self._begin_entry(block, size, folder=kind == _FOLDER)
        else:
            raise BadArchive(f"{shown(_name(block))} is neither a file nor a folder")

    def _begin_pax(self, size: int) -> None:
        if self._pax is not None or not 0 < size <= _PAX_BYTES_MAX:
            raise BadArchive(f"a header of an entry has {size} bytes, the most is {_PAX_BYTES_MAX}, once")
        self._pax, self._pax_left, self._filling = bytearray(), size, -size % _BLOCK

    def _begin_entry(self, block: bytes, size: int, *, folder: bool) -> None:
        path = self._path if self._path is not None else _name(block)
        self._pax = self._path = None
        entry = Entry(_parts(path), size, folder, bool(_number(block[100:108]) & _RUNNABLE))
        self._files += 1
        self._bytes += size
        if self._files > self._files_max:
            raise BadArchive(f"it has more than {self._files_max} files and folders")
        if self._bytes > self._bytes_max:
            raise BadArchive(f"it has more than {self._bytes_max} bytes unpacked")
        if size if folder else not entry.parts:
            raise BadArchive(f"{shown(path)} is neither a file nor a folder")
        self._begin(entry)
        self._content, self._filling = size, -size % _BLOCK


def shown(path: bytes) -> str:
    """A path of an archive as people may see it."""
    return ascii(path[:100].decode(errors="replace"))


def _checked(block: bytes) -> tuple[int, bytes]:
    """Size and kind of an entry, of a header that is whole."""
    if block[257:262] != b"ustar" or _number(block[148:156]) != sum(block[:148]) + 8 * 32 + sum(block[156:]):
        raise BadArchive("it is no whole tar.gz archive: a header is broken")
    return _number(block[124:136]), block[156:157]


def _number(field: bytes) -> int:
    digits = field.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        raise BadArchive("it is no whole tar.gz archive: a header has a bad number")
    return int(digits, 8)


def _name(block: bytes) -> bytes:
    """The path in a header. Only POSIX's own form has the beginning of a long one elsewhere."""
    name = block[:100].partition(b"\0")[0]
    prefix = block[345:500].partition(b"\0")[0] if block[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _pax_path(header: bytes) -> bytes | None:
    """The path in a pax header, whose records are `<length> <name>=<value>\\n`."""
    path: bytes | None = None
    while header:
        digits, space, _ = header[:8].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record, header = header[:length], header[length:]
        name, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(record) != length or record[-1:] != b"\n":
            raise BadArchive("the header of an entry is malformed")
        if name not in _PAX_NAMES:
            raise BadArchive(f"the header of an entry has {shown(name)}, which no archive of code has")
        path = value if name == b"path" else path
    return path


def _parts(path: bytes) -> tuple[bytes, ...]:
    parts = tuple(part for part in path.split(b"/") if part not in (b"", b"."))
    too_long = len(path) > PATH_BYTES_MAX or len(parts) > DEPTH_MAX or any(len(part) > NAME_BYTES_MAX for part in parts)
    if path.startswith(b"/") or b".." in parts or b"\0" in path or too_long or not path:
        raise BadArchive(f"{shown(path)} is not a name below the folder")
    return parts
