"""A database is brought to this schema, or it is said that it has another one."""

import asyncio

import asyncpg
import pytest

from penstock.kit.migrate import OtherSchema, migrate


async def test_what_is_there_stays(database_url: str) -> None:
    await asyncio.to_thread(migrate, database_url)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "update migrations_applied set digest = 'other' where revision = '0004'",
            "migration 0004 is not the one here",
        ),
        ("delete from migrations_applied where revision = '0010'", "migration 0010 is not the one here"),
        ("drop table migrations_applied", "migration 0010 is not the one here"),
        ("update migrations set version_num = '9999'", "migration 9999 is not the one here"),
    ],
)
async def test_another_schema_is_refused_in_words(database_url: str, change: str, said: str) -> None:
    conn = await asyncpg.connect(database_url)
    await conn.execute(change)
    with pytest.raises(OtherSchema) as refused:
        await asyncio.to_thread(migrate, database_url)
    assert said in refused.value.detail
    await conn.close()
