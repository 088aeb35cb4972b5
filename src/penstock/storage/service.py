"""Put, read, list and delete objects. The bytes stream through, and are counted before they come.

An upload reserves its length, or step by step as it grows, so that no number of them together passes the project's
limit. Its blob has a row before its first byte: whatever happens after that, the row says what to clean up.
"""

import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import asyncpg

from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.db import Database, Tx
from penstock.kit.errors import PenstockError, Unavailable
from penstock.kit.ids import new_id
from penstock.storage import store
from penstock.storage.blobs import Blobs, Write
from penstock.storage.errors import (
    Busy,
    DigestMismatch,
    Incomplete,
    NoObject,
    ObjectExists,
    QuotaExceeded,
    TooLarge,
    UploadExpired,
)
from penstock.storage.model import (
    CONTENT_TYPE_DEFAULT,
    Limits,
    Listed,
    Object,
    check_key,
    check_prefix,
)

_AWAY: Final = (Unavailable, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)
#: A lease is renewed after so much of it.
_RENEW_AT: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the sender says of an upload. `size` is none where the length is not known yet; `only_new` refuses to
    replace an object."""

    size: int | None = None
    sha256: bytes | None = None
    content_type: str = CONTENT_TYPE_DEFAULT
    only_new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """An object and its bytes from `first` up to `end`."""

    object: Object
    first: int
    end: int
    chunks: AsyncIterator[bytes]


@dataclass(slots=True, kw_only=True)
class _Upload:
    """One upload under way: what is reserved for it, and when its lease was renewed."""

    project_id: str
    key: str
    blob_id: str
    reserved: int
    renewed_at: float
    size: int = 0


class Objects:
    """The objects of all projects. Whoever calls has checked that the actor may act in the project."""

    def __init__(self, db: Database, blobs: Blobs, limits: Limits) -> None:
        self._db = db
        self._blobs = blobs
        self._limits = limits
        self._uploads = 0

    async def put(
        self, project_id: str, key: str, chunks: AsyncIterator[bytes], *, actor: Actor, wanted: Wanted
    ) -> Object:
        """The object with these bytes, whole; or an error, and nothing is changed."""
        check_key(key)
        if wanted.size is not None and wanted.size > self._limits.object_bytes_max:
            raise self._too_large()
        if self._uploads >= self._limits.uploads_max:
            raise Busy("too many uploads at once; try again", retry_after_s=2)
        self._uploads += 1
        try:
            upload = await self._begin(project_id, key, wanted)
            return await self._transfer(upload, chunks, actor, wanted)
        finally:
            self._uploads -= 1

    async def _begin(self, project_id: str, key: str, wanted: Wanted) -> _Upload:
        needed, wished = (0, self._limits.step_bytes) if wanted.size is None else (wanted.size, wanted.size)
        blob_id = new_id("blb")
        async with self._db.transaction() as tx:
            if wanted.only_new and await store.find(tx, project_id, key) is not None:
                raise _exists(key)
            reserved = await self._reserve(tx, project_id, needed=needed, wished=wished)
            await store.add_blob(tx, blob_id, project_id, reserve=reserved, lease_s=self._limits.lease_s)
        return _Upload(project_id=project_id, key=key, blob_id=blob_id, reserved=reserved, renewed_at=time.monotonic())

    async def _transfer(self, upload: _Upload, chunks: AsyncIterator[bytes], actor: Actor, wanted: Wanted) -> Object:
        try:
            async with self._blobs.writer(upload.blob_id) as write:
                digest = await self._write(upload, chunks, write, wanted)
            return await self._commit(upload, digest, actor, wanted)
        except BaseException:
            await self._abandon(upload)
            raise

    async def _write(self, upload: _Upload, chunks: AsyncIterator[bytes], write: Write, wanted: Wanted) -> bytes:
        """All bytes to the blob; their digest, which is what the sender said."""
        digest = hashlib.sha256()
        async for chunk in chunks:
            upload.size += len(chunk)
            await self._make_room(upload)
            digest.update(chunk)
            await write(chunk)
        if wanted.size is not None and upload.size != wanted.size:
            raise Incomplete(f"{upload.size} bytes came instead of {wanted.size}")
        if wanted.sha256 is not None and digest.digest() != wanted.sha256:
            raise DigestMismatch(f"the SHA-256 of what came is {digest.hexdigest()}", field="Content-SHA256")
        return digest.digest()

    async def _make_room(self, upload: _Upload) -> None:
        if upload.size > self._limits.object_bytes_max:
            raise self._too_large()
        needed = max(0, upload.size - upload.reserved)
        if not needed and time.monotonic() - upload.renewed_at < self._limits.lease_s * _RENEW_AT:
            return
        async with self._db.transaction() as tx:
            # The blob's row is locked before the project's, as everywhere.
            await self._grow(tx, upload, 0)
            wished = max(needed, self._limits.step_bytes) if needed else 0
            more = await self._reserve(tx, upload.project_id, needed=needed, wished=wished)
            await self._grow(tx, upload, more)
        upload.reserved += more
        upload.renewed_at = time.monotonic()

    async def _grow(self, tx: Tx, upload: _Upload, more: int) -> None:
        if not await store.grow_blob(tx, upload.blob_id, more=more, lease_s=self._limits.lease_s):
            raise UploadExpired("the upload stood still for too long")

    async def _reserve(self, tx: Tx, project_id: str, *, needed: int, wished: int) -> int:
        """Count bytes to the project: as many as wished if there is room, else only those that are needed now."""
        bytes_max = self._limits.project_bytes_max
        for more in (wished, needed):
            if not more or await store.reserve(tx, project_id, more, bytes_max=bytes_max):
                return more
        raise QuotaExceeded(f"quota exceeded: the objects of a project have at most {bytes_max} bytes in all")

    async def _commit(self, upload: _Upload, digest: bytes, actor: Actor, wanted: Wanted) -> Object:
        async with self._db.transaction() as tx:
            reserved = await store.complete_blob(tx, upload.blob_id, upload.size)
            if reserved is None:
                raise UploadExpired("the upload stood still for too long")
            old = await store.lock_key(tx, upload.project_id, upload.key)
            if old is not None and wanted.only_new:
                raise _exists(upload.key)
            made = await store.put(
                tx,
                {
                    "project_id": upload.project_id,
                    "key": upload.key,
                    "blob_id": upload.blob_id,
                    "size": upload.size,
                    "sha256": digest,
                    "content_type": wanted.content_type,
                    "created_by": actor.id,
                },
            )
            freed = await self._doom(tx, old) if old else 0
            await store.free(tx, upload.project_id, reserved - upload.size + freed)
            detail = {"bytes": upload.size}
            await audit.record(tx, actor, "objects.write", upload.key, project_id=upload.project_id, detail=detail)
        return made

    async def _doom(self, tx: Tx, old: Object) -> int:
        return await store.doom_blob(tx, old.blob_id, only="live", grace_s=self._limits.grace_s) or 0

    async def _abandon(self, upload: _Upload) -> None:
        """Leave nothing behind. Where that does not work now, the sweeper finds it when the lease is over; and should
        the commit have happened after all, though its answer was lost, the blob is live and stays."""
        with suppress(*_AWAY):
            async with self._db.transaction() as tx:
                freed = await store.doom_blob(tx, upload.blob_id, only="writing", grace_s=0)
                await store.free(tx, upload.project_id, freed or 0)
            async with self._db.read() as conn:
                live = await store.is_live(conn, upload.blob_id)
            if not live:
                await self._blobs.delete(upload.blob_id)
                async with self._db.transaction() as tx:
                    await store.forget_blob(tx, upload.blob_id)

    async def find(self, project_id: str, key: str) -> Object:
        """One object without its bytes."""
        check_key(key)
        async with self._db.read() as conn:
            found = await store.find(conn, project_id, key)
        if found is None:
            raise NoObject.of(key)
        return found

    async def get(self, project_id: str, key: str) -> Download:
        """One object and all its bytes."""
        found = await self.find(project_id, key)
        return await self.read(found, 0, found.size)

    async def read(self, found: Object, first: int, end: int) -> Download:
        """A part of an object's bytes. One that was replaced some time ago may be gone."""
        try:
            chunks = await self._blobs.read(found.blob_id, first, end)
        except FileNotFoundError as error:
            raise NoObject.of(found.key) from error
        return Download(object=found, first=first, end=end, chunks=chunks)

    async def page(self, project_id: str, *, prefix: str, after: str, limit: int, grouped: bool) -> Listed:
        """Objects by key, with what stands below a slash as one entry if `grouped`."""
        listing = store.grouped_page if grouped else store.page
        async with self._db.read() as conn:
            return await listing(conn, project_id, prefix=check_prefix(prefix), after=after, limit=limit)

    async def delete(self, project_id: str, key: str, *, actor: Actor) -> None:
        """Delete an object; its bytes go a while later, for those who still read them."""
        check_key(key)
        async with self._db.transaction() as tx:
            old = await store.lock_key(tx, project_id, key)
            if old is None:
                raise NoObject.of(key)
            await store.delete(tx, project_id, key)
            await store.free(tx, project_id, await self._doom(tx, old))
            await audit.record(tx, actor, "objects.delete", key, project_id=project_id)

    def _too_large(self) -> PenstockError:
        return TooLarge(f"an object has at most {self._limits.object_bytes_max} bytes")


def _exists(key: str) -> ObjectExists:
    return ObjectExists("there is an object with this key already", field="key", key=key)
