"""What happens to functions without anybody's asking: what was kept long enough goes, and time used is told to billing.

Any number of processes may do it. Objects go before the rows that name them, so that none is left behind.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC
from typing import Final

from penstock.kit import outbox
from penstock.kit.db import Database, Reader
from penstock.kit.outbox import Event
from penstock.serverless.model import Limits
from penstock.serverless.ports import Bytes, Vault
from penstock.serverless.service.callbacks import sealed_again
from penstock.serverless.store import callbacks, keeping
from penstock.serverless.store.keeping import Spent

BATCH: Final = 1000
_BATCHES_MAX: Final = 1000
USAGE: Final = "billing.usage_recorded"
#: The meters of functions; what has no price is free.
MILLISECONDS: Final = "function.invocation_ms"
INVOCATIONS: Final = "function.invocations"


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Deletes what has been kept long enough."""

    db: Database
    bytes_: Bytes
    limits: Limits

    async def sweep(self) -> None:
        """In batches until nothing old is left, or for a good while."""
        results_s, outputs_s = self.limits.keep_results_s, self.limits.keep_outputs_s
        for _ in range(_BATCHES_MAX):
            if await self._drop_invocations(results_s) < BATCH:
                break
        await self._until_done(lambda conn: keeping.delete_outputs(conn, older_than_s=outputs_s, limit=BATCH))
        await self._until_done(lambda conn: keeping.delete_letters(conn, older_than_s=results_s, limit=BATCH))
        await self._until_done(lambda conn: keeping.delete_callbacks(conn, older_than_s=results_s, limit=BATCH))
        await self._until_done(lambda conn: keeping.delete_workers(conn, older_than_s=outputs_s, limit=BATCH))
        await self._until_done(lambda conn: keeping.delete_versions(conn, older_than_s=results_s, limit=BATCH))
        await self._until_done(lambda conn: keeping.delete_functions(conn, older_than_s=results_s, limit=BATCH))

    async def _drop_invocations(self, older_than_s: float) -> int:
        async with self.db.read() as conn:
            old = await keeping.old_invocations(conn, older_than_s=older_than_s, limit=BATCH)
        for each in old:
            for key in each.objects:
                await self.bytes_.drop(each.project_id, key)
        if old:
            async with self.db.transaction() as tx:
                await keeping.delete_invocations(tx, old)
        return len(old)

    async def _until_done(self, work: Callable[[Reader], Awaitable[int]]) -> None:
        for _ in range(_BATCHES_MAX):
            async with self.db.read() as conn:
                if await work(conn) < BATCH:
                    return


@dataclass(frozen=True, slots=True)
class Metering:
    """Tells billing what handlers took."""

    db: Database

    async def meter(self) -> int:
        """Facts for the minutes that are over; how many minutes. The rows go in the transaction of the facts."""
        for round_ in range(_BATCHES_MAX):
            async with self.db.transaction() as tx:
                taken = await keeping.take_spent(tx, limit=BATCH)
                if facts := [fact for each in taken for fact in _facts(each)]:
                    await outbox.append(tx, *facts)
            if len(taken) < BATCH:
                return round_ * BATCH + len(taken)
        return _BATCHES_MAX * BATCH


def _facts(spent: Spent) -> list[Event]:
    used = {MILLISECONDS: spent.duration_ms, INVOCATIONS: spent.invocations}
    return [_fact(spent, meter, quantity) for meter, quantity in used.items() if quantity]


def _fact(spent: Spent, meter: str, quantity: int) -> Event:
    minute = spent.minute.astimezone(UTC)
    key = f"fn/{spent.function_id}/{spent.key_id}/{minute:%Y-%m-%dT%H:%M}/{meter.partition('.')[2]}"
    return Event(
        type=USAGE,
        aggregate_id=f"use/{spent.project_id}/{key}",
        version=1,
        organisation_id=spent.organisation_id,
        project_id=spent.project_id,
        payload={
            "key": key,
            "meter": meter,
            "quantity": quantity,
            "resource_kind": "function",
            "resource_id": spent.function_id,
            "occurred_at": minute,
            "key_id": spent.key_id or None,
            "labels": {"function": spent.name, **spent.labels},
        },
    )


@dataclass(frozen=True, slots=True)
class Rewrapped:
    """How far it came; `used` are the other keys that still open something."""

    keys: int
    left: int
    used: frozenset[str]


async def rewrap(db: Database, vault: Vault, *, progress: Callable[[int], None]) -> Rewrapped:
    """Put all signing keys under the current master key, batch by batch, while everything runs."""
    current, done = vault.current_key_id(), 0
    for _ in range(_BATCHES_MAX):
        async with db.transaction() as tx:
            batch = await callbacks.keys_under_others(tx, current, limit=BATCH)
            await callbacks.replace_keys(tx, [sealed_again(vault, *each) for each in batch])
        done += len(batch)
        progress(done)
        if not batch:
            break
    async with db.read() as conn:
        counts = await callbacks.count_keys(conn)
    others = {key_id: count for key_id, count in counts.items() if key_id != current}
    return Rewrapped(done, sum(others.values()), frozenset(others))
