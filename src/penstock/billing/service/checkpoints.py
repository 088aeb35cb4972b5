"""Keeps balances quick to read, however long an account's history."""

from typing import Final

from penstock.billing.store import ledger
from penstock.kit.db import Database

#: So many entries are summed up faster than a checkpoint is written.
ENTRIES_MIN: Final = 100


async def take(db: Database) -> int:
    """Sum up the accounts that have grown; how many."""
    async with db.transaction() as tx:
        return await ledger.take_checkpoints(tx, entries_min=ENTRIES_MIN)


async def arrive(db: Database) -> None:
    """At the start of every process that reads balances: the data may have been loaded into another cluster."""
    async with db.transaction() as tx:
        await ledger.arrive(tx)
