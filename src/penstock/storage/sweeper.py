"""Deletes bytes that no object names: replaced and deleted ones after a grace time, uploads that were given up, and
strays that no row knows, such as those of a database that was restored to an earlier time. Any number may sweep."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from penstock.kit.clock import utc_now
from penstock.kit.db import Database
from penstock.kit.telemetry import logger
from penstock.storage import store
from penstock.storage.blobs import Blobs

BATCH: Final = 100
_BATCHES_MAX: Final = 1000
#: Blobs have their row before their first byte, so a stray is nobody's upload; the time is for whoever restores.
STRAY_AFTER: Final = timedelta(days=1)

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class Sweeper:
    """Cleans up one store."""

    db: Database
    blobs: Blobs
    stray_after: timedelta = STRAY_AFTER

    async def sweep(self) -> int:
        """Delete what is past its time; how many blobs that were."""
        deleted = 0
        for _ in range(_BATCHES_MAX):
            async with self.db.read() as conn:
                expired = await store.expired_blobs(conn, limit=BATCH)
            for blob_id in expired:
                await self._delete(blob_id)
            deleted += len(expired)
            if len(expired) < BATCH:
                break
        return deleted

    async def _delete(self, blob_id: str) -> None:
        async with self.db.transaction() as tx:
            found = await store.find_blob(tx, blob_id)
            if found is None:
                return
            project_id, state = found
            if state == "writing":
                freed = await store.doom_blob(tx, blob_id, only="writing", grace_s=0)
                await store.free(tx, project_id, freed or 0)
        await self.blobs.delete(blob_id)
        async with self.db.transaction() as tx:
            await store.forget_blob(tx, blob_id)

    async def sweep_strays(self) -> int:
        """Delete old blobs that have no row; how many that were. Another install's place is left alone."""
        async with self.db.read() as conn:
            install_id = await store.install_id(conn)
        if not await self.blobs.owned_by(install_id):
            _log.warning("objects_shared", hint="the object store holds another install's objects: strays stay")
            return 0
        deleted, newest = 0, utc_now() - self.stray_after
        async for listed in self.blobs.all():
            old = [blob.id for blob in listed if blob.written_at < newest]
            async with self.db.read() as conn:
                known = await store.known_blobs(conn, old)
            for blob_id in set(old) - known:
                await self.blobs.delete(blob_id)
                deleted += 1
        return deleted
