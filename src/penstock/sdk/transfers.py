"""Bodies that stream, without any I/O of their own but on the files that they are given.

An upload is read piece by piece and, where its file can be rewound, sent again after a failure. A download goes on
where its connection broke, as long as the object is still the same, and is checked against its digest at the end.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from penstock.sdk.errors import BadAnswer, InvalidArgument, SdkError, Unreachable
from penstock.sdk.protocol import PREFIX, Answer, Request, backoff_s

CHUNK_BYTES: Final = 256 << 10
#: Connections that break without bringing a byte, in a row.
_FAILURES_MAX: Final = 4
_AWAY: Final = frozenset({502, 503, 504})

Progress = Callable[[int], None]


def silent(_: int) -> None:
    """Tell nobody."""


class Source:
    """The bytes of an upload. `size` is none where only the end will tell."""

    def __init__(self, content: "bytes | Path | BinaryIO", *, on_progress: Progress = silent) -> None:
        self._content = content
        self._on_progress = on_progress
        self.size, self.repeatable = _measured(content)
        self._start = content.tell() if self.repeatable and not isinstance(content, bytes | Path) else 0

    def chunks(self) -> Iterator[bytes]:
        """From the beginning, each time."""
        if isinstance(self._content, bytes):
            yield from self._counted(iter([self._content]))
        elif isinstance(self._content, Path):
            with self._content.open("rb") as file:
                yield from self._counted(_read(file))
        else:
            if self.repeatable:
                self._content.seek(self._start)
            yield from self._counted(_read(self._content))

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """No more than was announced: a file may grow while it is read."""
        sent = 0
        for chunk in chunks:
            rest = chunk if self.size is None else chunk[: self.size - sent]
            if not rest:
                break
            sent += len(rest)
            # Told first: a server that answers early leaves the last piece's generator where it is.
            self._on_progress(sent)
            yield rest
        if self.size is not None and sent < self.size:
            raise InvalidArgument(f"the file became shorter while it was sent: {sent} of {self.size} bytes")


def _measured(content: "bytes | Path | BinaryIO") -> tuple[int | None, bool]:
    if isinstance(content, bytes):
        return len(content), True
    if isinstance(content, Path):
        regular = stat.S_ISREG(content.stat().st_mode)
        return (content.stat().st_size, True) if regular else (None, False)
    if not content.seekable():
        return None, False
    position = content.tell()
    size = content.seek(0, os.SEEK_END) - position
    content.seek(position)
    return size, True


def _read(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk


class Download:
    """One object on its way, across all of its connections."""

    def __init__(self, path: str, *, on_size: Progress = silent) -> None:
        self._path = path
        self._on_size = on_size
        self._etag = ""
        self._size = -1
        self._received = 0
        self._digest = hashlib.sha256()
        self._expected = ""
        self._failures = 0

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self._received == self._size

    def request(self) -> Request:
        """Ask for what is missing."""
        headers = {"Accept": "*/*"}
        if self._received:
            headers |= {"Range": f"bytes={self._received}-", "If-Range": self._etag}
        return Request(method="GET", path=PREFIX + self._path, headers=headers)

    def began(self, answer: Answer) -> None:
        """An answer came; its body follows."""
        if self._received:
            if answer.status != 206:
                raise BadAnswer("the object was changed while it was read", status=answer.status)
            return
        length = answer.headers.get("content-length", "")
        if not length.isdecimal():
            raise BadAnswer("the answer does not say how long the object is", status=answer.status)
        self._size, self._etag = int(length), answer.headers.get("etag", "")
        self._expected = answer.headers.get("content-sha256", "")
        self._on_size(self._size)

    def feed(self, chunk: bytes) -> bytes:
        """The same bytes, counted."""
        self._failures = 0
        self._received += len(chunk)
        self._digest.update(chunk)
        return chunk

    def finish(self) -> None:
        """All is there: it is what the server said, or BadAnswer."""
        if self._expected and self._digest.hexdigest() != self._expected:
            raise BadAnswer("what came is not the object: its SHA-256 is another")

    def lost(self, error: SdkError | None) -> float:
        """Seconds to wait before going on; raises when that is no use, or keeps failing."""
        self._failures += 1
        passing = error is None or (error.passing if isinstance(error, Unreachable) else error.status in _AWAY)
        if self._failures > _FAILURES_MAX or not passing:
            raise error or Unreachable("the download keeps breaking off", sent=True)
        return backoff_s(self._failures)


def upload_headers(source: Source, extra: Mapping[str, str]) -> dict[str, str]:
    """How long the body is. Where nobody knows, it goes in chunks, of which the connection takes care."""
    length = {} if source.size is None else {"Content-Length": str(source.size)}
    return {"Accept": "application/json", **length, **extra}
