"""What happens to deliveries and secrets without anybody's asking: they end, they go, they move to a new key."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import Gauge

from penstock.kit.db import Database, Reader
from penstock.kit.telemetry import logger
from penstock.notices.model import Patience, Sealed
from penstock.notices.ports import Vault
from penstock.notices.service import pause, secret_name
from penstock.notices.store import deliveries, webhooks

BATCH: Final = 1000
_BATCHES_MAX: Final = 1000

_log = logger(__name__)
_pending = Gauge("penstock_webhook_deliveries_pending", "Deliveries that wait to be sent.")


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Any number may sweep."""

    db: Database
    patience: Patience

    async def sweep(self) -> None:
        """End what has waited too long, pause what too much waits for, delete what has been kept long enough."""
        await self._until_done(lambda conn: deliveries.give_up(conn, limit=BATCH))
        async with self.db.transaction() as tx:
            for webhook in await webhooks.lock_overfull(tx, pending_max=self.patience.pending_max):
                await pause(tx, webhook, f"more than {self.patience.pending_max} events wait for it")
                _log.warning("webhook_overfull", webhook_id=webhook.id, project_id=webhook.project_id)
        await self._until_done(lambda conn: deliveries.prune(conn, older_than_s=self.patience.keep_s, limit=BATCH))
        async with self.db.read() as conn:
            await deliveries.forget_deleted(conn)
            _pending.set(await deliveries.count_pending(conn))

    async def _until_done(self, work: Callable[[Reader], Awaitable[int]]) -> None:
        for _ in range(_BATCHES_MAX):
            async with self.db.read() as conn:
                if await work(conn) < BATCH:
                    return


@dataclass(frozen=True, slots=True)
class Rewrapped:
    """How far it came; `used` are the other keys that still open something."""

    secrets: int
    left: int
    used: frozenset[str]


async def rewrap(db: Database, vault: Vault, *, progress: Callable[[int], None]) -> Rewrapped:
    """Put all secrets of webhooks under the current master key, batch by batch, while everything runs."""
    current, done = vault.current_key_id(), 0
    for _ in range(_BATCHES_MAX):
        async with db.transaction() as tx:
            batch = await webhooks.secrets_under_others(tx, current, limit=BATCH)
            await webhooks.replace_secrets(tx, [(each[1], _sealed_again(vault, *each)) for each in batch])
        done += len(batch)
        progress(done)
        if not batch:
            break
    async with db.read() as conn:
        counts = await webhooks.count_secrets_by_key(conn)
    others = {key_id: count for key_id, count in counts.items() if key_id != current}
    return Rewrapped(done, sum(others.values()), frozenset(others))


def _sealed_again(vault: Vault, project_id: str, webhook_id: str, secret: Sealed) -> Sealed:
    name = secret_name(webhook_id, secret.version)
    value = vault.unseal(project_id=project_id, name=name, key_id=secret.key_id, sealed=secret.content)
    return Sealed(secret.version, *vault.seal(project_id=project_id, name=name, value=value))
