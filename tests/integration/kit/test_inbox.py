"""Repeats, regressions and gaps never reach an effect."""

from penstock.kit import inbox
from penstock.kit.db import Database
from penstock.kit.inbox import Verdict


async def judge(database: Database, version: int, event_id: str) -> Verdict:
    async with database.transaction() as tx:
        return await inbox.accept(tx, consumer="c", aggregate_id="a", version=version, event_id=event_id)


async def test_each_version_is_applied_once_and_in_order(database: Database) -> None:
    assert await judge(database, 5, "e5") is Verdict.APPLY
    assert await judge(database, 5, "e5") is Verdict.DUPLICATE
    assert await judge(database, 7, "e7") is Verdict.GAP
    assert await judge(database, 6, "e6") is Verdict.APPLY
    assert await judge(database, 7, "e7") is Verdict.APPLY
    assert await judge(database, 6, "e6") is Verdict.STALE
