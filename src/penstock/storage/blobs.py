"""Where bytes are: one folder or one bucket, by the same calls. Nothing here knows projects or keys.

Errors of the store become StoreAway, or StorageFull where there is no space; what the store says goes to the log only.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, ObjectStore, S3Store

from penstock.kit.errors import Invalid, StorageFull
from penstock.kit.full import FULL, is_full
from penstock.kit.telemetry import logger
from penstock.storage.errors import StoreAway

PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 2
_READ_BYTES: Final = 256 << 10
_CONNECT_S: Final = 5
_REQUEST_S: Final = 60
_RETRIES: Final = 4
_RETRY_S: Final = 20
_LIST_CHUNK: Final = 500
_OWNER: Final = "penstock-install"
_BLOB: Final = re.compile(r"[0-9a-z]{2}/(blb_[0-9a-z]{26})")
_FAILURES: Final = (BaseError, OSError)

_log = logger(__name__)

Write = Callable[[bytes], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach the store; what is empty is left to the environment of the process, such as a host's own role."""

    url: str
    endpoint: str = ""
    region: str = ""
    access_key_id: str = ""
    secret_access_key: str = ""

    def __repr__(self) -> str:
        """Without what must not be shown."""
        return f"Access(url={self.url!r})"


@dataclass(frozen=True, slots=True)
class Listed:
    """A blob that is there."""

    id: str
    written_at: datetime


class Blobs:
    """The blobs of one store. `folder` is where they are when they are files."""

    def __init__(self, store: ObjectStore, *, folder: Path | None = None) -> None:
        self._store = store
        self._folder = folder

    @asynccontextmanager
    async def writer(self, blob_id: str) -> AsyncIterator[Write]:
        """Write a new blob piece by piece. It is there, for good, when the context ends well, and not at all else."""
        with _translated("write"):
            async with obstore.open_writer_async(
                self._store, _path(blob_id), buffer_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE
            ) as opened:
                yield opened.write
            if self._folder is not None:
                await asyncio.to_thread(_settle, self._folder / _path(blob_id))

    async def read(self, blob_id: str, first: int, end: int) -> AsyncIterator[bytes]:
        """The bytes from `first` up to `end`; FileNotFoundError when the blob is gone."""
        if first == end:
            return _nothing()
        with _translated("read", but=FileNotFoundError):
            found = await obstore.get_async(self._store, _path(blob_id), options={"range": (first, end)})
        return _pieces(found)

    async def delete(self, blob_id: str) -> None:
        """Make sure that it is gone."""
        with _translated("delete"), suppress(FileNotFoundError):
            await obstore.delete_async(self._store, _path(blob_id))
        if self._folder is not None:
            await asyncio.to_thread(_delete_drafts, self._folder / _path(blob_id))

    async def owned_by(self, install_id: str) -> bool:
        """Whether this place belongs to the install: the first that asks has it."""
        with _translated("claim"):
            with suppress(FileExistsError, AlreadyExistsError):
                await obstore.put_async(self._store, _OWNER, install_id.encode(), mode="create")
            found = await obstore.get_async(self._store, _OWNER)
            return bytes(await found.bytes_async()) == install_id.encode()

    async def all(self) -> AsyncIterator[list[Listed]]:
        """All blobs that are there, some at a time; what else is there is not ours to look at."""
        with _translated("list"):
            async for chunk in obstore.list(self._store, chunk_size=_LIST_CHUNK):
                named = [(_BLOB.fullmatch(each["path"]), each["last_modified"]) for each in chunk]
                yield [Listed(match[1], written_at) for match, written_at in named if match]


def connect(access: Access) -> Blobs:
    """The store that a URL names: file:///folder or s3://bucket/prefix."""
    parts = urlsplit(access.url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        folder = Path(unquote(parts.path))
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise Invalid(f"cannot use {folder} for objects: {error.strerror}", field="objects_url") from error
        return Blobs(LocalStore(folder), folder=folder)
    if parts.scheme == "s3" and parts.netloc:
        return Blobs(_bucket(parts.netloc, parts.path.strip("/"), access))
    raise Invalid("objects_url must look like file:///folder or s3://bucket/prefix", field="objects_url")


def _bucket(name: str, prefix: str, access: Access) -> S3Store:
    given: Any = {
        "endpoint": access.endpoint,
        "region": access.region,
        "access_key_id": access.access_key_id,
        "secret_access_key": access.secret_access_key,
    }
    return S3Store(
        name,
        prefix=prefix or None,
        client_options={
            "allow_http": access.endpoint.startswith("http://"),
            "connect_timeout": f"{_CONNECT_S}s",
            "timeout": f"{_REQUEST_S}s",
        },
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
        **{key: value for key, value in given.items() if value},
    )


def _path(blob_id: str) -> str:
    """Spread over folders, none of which gets too full."""
    return f"{blob_id[-2:]}/{blob_id}"


def _settle(file: Path) -> None:
    """Bring a file to disk, and the folders that name it: a row is about to say that it is there."""
    for path in (file, file.parent, file.parent.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _delete_drafts(file: Path) -> None:
    """What a process that was killed left of a file that it wrote: the store keeps it beside, with a number."""
    with _translated("delete"):
        for draft in file.parent.glob(f"{file.name}#*"):
            draft.unlink(missing_ok=True)


async def _pieces(found: "obstore.GetResult") -> AsyncIterator[bytes]:
    with _translated("read"):
        async for piece in found.stream(min_chunk_size=_READ_BYTES):
            yield bytes(piece)


async def _nothing() -> AsyncIterator[bytes]:
    for piece in ():
        yield piece


@contextmanager
def _translated(doing: str, *, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    try:
        yield
    except but:
        raise
    except _FAILURES as error:
        _log.warning("object_store_failed", doing=doing, error=str(error).partition("\n")[0][:500])
        if is_full(error):
            FULL.labels("objects").inc()
            raise StorageFull("the object store has no space left; try again later") from error
        raise StoreAway("the object store cannot answer now; try again") from error
