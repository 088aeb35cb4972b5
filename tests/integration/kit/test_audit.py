"""The audit log cannot be changed, not even by us."""

import asyncpg
import pytest

from penstock.kit import audit
from penstock.kit.db import Database


@pytest.mark.parametrize(
    "statement", ["update kit.audit set action = 'x'", "delete from kit.audit", "truncate kit.audit"]
)
async def test_rows_are_only_ever_inserted(database: Database, statement: str) -> None:
    async with database.transaction() as tx:
        await audit.record(tx, audit.system("test"), "tests.run", "target")
    with pytest.raises(asyncpg.RaiseError, match="append-only"):
        async with database.transaction() as tx:
            await tx.execute(statement)
