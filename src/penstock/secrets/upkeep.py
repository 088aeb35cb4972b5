"""What happens to secrets without anybody's asking for it: old versions go, data keys move to a new master key."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.kit.db import Database
from penstock.secrets import model, store
from penstock.secrets.keyring import Keyring
from penstock.secrets.ports import References

#: Longer than any transaction that refers to a version as it ends.
KEEP_S: Final = 3600.0
BATCH: Final = 200
_BATCHES_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Pruning:
    """Deletes versions that ended a while ago and that nothing living refers to."""

    db: Database
    references: References
    keep_s: float = KEEP_S

    async def sweep(self) -> int:
        """How many were deleted."""
        deleted, after = 0, ("", "", 0)
        for _ in range(_BATCHES_MAX):
            async with self.db.transaction() as tx:
                batch = await store.superseded(tx, after, older_than_s=self.keep_s, limit=BATCH)
                places = [ended.place for ended in batch]
                referred = await self.references.referred(tx, {place.project_id for place in places})
                unused = [place for place in places if (place.project_id, place.name, place.version) not in referred]
                await store.prune(tx, unused)
            deleted += len(unused)
            if len(batch) < BATCH:
                break
            after = (places[-1].project_id, places[-1].name, places[-1].version)
        return deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrapped:
    """How far it came. `unused` are the keys that open nothing any more."""

    versions: int
    left: int
    unused: list[str]


async def rewrap(db: Database, keyring: Keyring, *, progress: Callable[[int], None]) -> Rewrapped:
    """Put all data keys under the current master key, batch by batch; readers and writers go on meanwhile."""
    current, done = keyring.current(), 0
    for _ in range(_BATCHES_MAX):
        async with db.transaction() as tx:
            batch = await store.lock_under_others(tx, current.id, limit=BATCH)
            rewrapped = [
                (place, model.rewrap(place, envelope, keyring.key(envelope.key_id), current))
                for place, envelope in batch
            ]
            await store.put_wrapped_keys(tx, rewrapped)
        done += len(batch)
        progress(done)
        if not batch:
            break
    async with db.read() as conn:
        counts = await store.count_by_key(conn)
    left = sum(count for key_id, count in counts.items() if key_id != current.id)
    unused = [key_id for key_id in keyring.ids() if key_id != current.id and key_id not in counts]
    return Rewrapped(versions=done, left=left, unused=unused)
