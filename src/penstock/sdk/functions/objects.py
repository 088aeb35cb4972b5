"""The project's objects, from a handler or from a program: `penstock.objects`.

Inside a unit they are reached through the sidecar, with no key and no network; elsewhere by the client. Every verb has
a twin to be awaited: `await penstock.objects.get.aio(key)`.
"""

import hashlib
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, cast

from penstock.sdk.functions import transport
from penstock.sdk.functions.errors import ObjectError
from penstock.sdk.functions.function import Series, Verb, threaded

#: `get` brings a whole object into memory; larger ones are opened.
GET_BYTES_MAX = 256 << 20
_PIECE_BYTES = 1 << 20
_SPOOLED_BYTES = 8 << 20
_TYPE = "application/octet-stream"


@dataclass(eq=False)
class ObjectInfo:
    """An object without its bytes."""

    key: str
    size: int
    sha256: str
    content_type: str


class Way(Protocol):
    """A way to the objects of a project."""

    def open(self, key: str) -> "tuple[ObjectInfo, BinaryIO]":
        """The object, and a file that reads it."""
        ...

    def put(self, key: str, content: BinaryIO, *, content_type: str, only_new: bool) -> ObjectInfo:
        """Store what the file has from its position on, whole or not at all."""
        ...

    def list(self, prefix: str) -> "Iterator[ObjectInfo]":
        """Objects by key."""
        ...

    def delete(self, key: str) -> None:
        """Delete an object."""
        ...


class Writer(tempfile.SpooledTemporaryFile):  # type: ignore[type-arg]
    """A file that becomes an object when it is closed; an exception within its `with` block drops it."""

    def __init__(self, key: str, content_type: str) -> None:
        super().__init__(_SPOOLED_BYTES)
        self._key = key
        self._content_type = content_type

    def close(self) -> None:
        """Store what was written."""
        if self.closed:
            return
        try:
            self.seek(0)
            _way().put(self._key, cast("BinaryIO", self), content_type=self._content_type, only_new=False)
        finally:
            super().close()

    def __exit__(self, kind: Any, error: Any, frames: Any) -> None:
        """Store it, unless the block failed."""
        if kind is None:
            self.close()
        else:
            super().close()


class Objects:
    """The objects of the project."""

    @property
    def get(self) -> Verb:
        """`get(key)`: all bytes of an object, up to 256 MiB."""
        return Verb(_get, threaded(_get))

    @property
    def put(self) -> Verb:
        """`put(key, content, content_type=…, only_new=False)`: store bytes, a path or an open file."""
        return Verb(_put, threaded(_put))

    @property
    def delete(self) -> Verb:
        """`delete(key)`."""
        return Verb(_delete, threaded(_delete))

    @property
    def list(self) -> Series:
        """`list(prefix="")`: `ObjectInfo` of each object by key."""
        return Series(_list)

    @property
    def stream(self) -> Series:
        """`stream(key)`: the bytes piece by piece, of an object of any size."""
        return Series(_stream)

    def open(self, key: str, mode: str = "rb", *, content_type: str = _TYPE) -> BinaryIO:
        """A file: `rb` reads and can seek, `wb` stores the object when it is closed."""
        if mode not in ("rb", "wb"):
            raise ValueError(f"mode must be rb or wb, not {mode!r}")
        return _way().open(key)[1] if mode == "rb" else cast("BinaryIO", Writer(key, content_type))


objects = Objects()


def _way() -> Way:
    return transport.transport().objects()


def _get(key: str) -> bytes:
    info, file = _way().open(key)
    with file:
        if info.size > GET_BYTES_MAX:
            raise ObjectError(f"{key} has {info.size} bytes: read it with objects.open or objects.stream")
        content = file.read()
    if hashlib.sha256(content).hexdigest() != info.sha256:
        raise ObjectError(f"what came is not {key}: its SHA-256 is another")
    return content


def _put(key: str, content: Any, *, content_type: str = _TYPE, only_new: bool = False) -> ObjectInfo:
    if isinstance(content, (bytes, bytearray, memoryview)):
        return _way().put(key, io.BytesIO(content), content_type=content_type, only_new=only_new)
    if isinstance(content, (str, os.PathLike)):
        with open(cast("str", content), "rb") as file:  # noqa: PTH123
            return _way().put(key, file, content_type=content_type, only_new=only_new)
    return _way().put(key, content, content_type=content_type, only_new=only_new)


def _delete(key: str) -> None:
    _way().delete(key)


def _list(prefix: str = "") -> "Iterator[ObjectInfo]":
    return _way().list(prefix)


def _stream(key: str) -> "Iterator[bytes]":
    _, file = _way().open(key)
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
