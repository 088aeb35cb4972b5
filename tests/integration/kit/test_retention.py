"""Old published events and idempotency keys go; everything else stays."""

from datetime import timedelta

import pytest

from penstock.kit import outbox, retention
from penstock.kit.db import Database
from penstock.kit.outbox import Event


async def _events(database: Database, count: int) -> None:
    async with database.transaction() as tx:
        await outbox.append(
            tx,
            *(
                Event(
                    type="test.happened",
                    aggregate_id=f"agg_{number}",
                    version=1,
                    organisation_id=None,
                    project_id=None,
                    payload={},
                )
                for number in range(count)
            ),
        )


async def _left(database: Database) -> set[str]:
    async with database.read() as conn:
        return {row["aggregate_id"] for row in await conn.fetch("select aggregate_id from kit.outbox")}


async def _sweep(database: Database) -> retention.Swept:
    return await retention.sweep(database, events=timedelta(days=30), idempotency_keys=timedelta(hours=24))


async def test_only_published_events_that_are_old_enough_go(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    await _events(database, 6)
    async with database.transaction() as tx:
        await tx.execute("update kit.outbox set occurred_at = now() - interval '40 days' where aggregate_id <> 'agg_5'")
        # 3 is dead, 4 waits, 5 is recent; the others are old and published.
        await tx.execute("delete from kit.waiting where aggregate_id not in ('agg_3', 'agg_4')")
        await tx.execute("update kit.waiting set dead = true where aggregate_id = 'agg_3'")
    assert (await _sweep(database)).events == 3
    assert await _left(database) == {"agg_3", "agg_4", "agg_5"}


async def test_the_walk_ends_at_the_first_batch_that_is_recent(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    await _events(database, 6)
    async with database.transaction() as tx:
        await tx.execute("delete from kit.waiting")
    assert (await _sweep(database)).events == 0
    assert len(await _left(database)) == 6


async def test_idempotency_keys_go_after_a_day(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    async with database.transaction() as tx:
        await tx.executemany(
            "insert into kit.idempotency (scope, key, digest, response, created_at)"
            " values ('s', $1, '\\x00', '\\x00', now() - $2::interval)",
            [(f"k{hours}", timedelta(hours=hours)) for hours in (0, 23, 25, 26, 27, 28, 29)],
        )
    assert (await _sweep(database)).idempotency_keys == 5
    async with database.read() as conn:
        assert {row["key"] for row in await conn.fetch("select key from kit.idempotency")} == {"k0", "k23"}
