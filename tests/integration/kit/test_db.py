"""Connections are never lost: whatever happens to them, to Postgres or to their users."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from penstock.kit import db
from penstock.kit.db import Database
from penstock.kit.errors import Conflict, StorageFull, Unavailable

MAX = 3


@pytest.fixture
async def few(database_url: str) -> AsyncIterator[Database]:
    async with db.connect(database_url, lambda _subject, _payload: None, connections_max=MAX) as connected:
        yield connected


async def use(database: Database, seconds: float = 0.0) -> int:
    async with database.read() as conn:
        return await conn.fetchval("select 1 from pg_sleep($1)", seconds)


async def warm(database: Database) -> None:
    await asyncio.gather(*(use(database, 0.05) for _ in range(MAX)))


async def terminate_all(database_url: str) -> None:
    conn = await asyncpg.connect(database_url)
    await conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid()"
    )
    await conn.close()


async def all_work(database: Database) -> None:
    """As many uses at once as there are connections, and no more wait than must."""
    async with asyncio.timeout(30):
        assert await asyncio.gather(*(use(database, 0.01) for _ in range(MAX * 4))) == [1] * (MAX * 4)
    assert len(database._idle) + database._room == MAX


async def test_idle_connections_that_the_server_dropped_are_replaced(few: Database, database_url: str) -> None:
    await warm(few)
    await terminate_all(database_url)
    await asyncio.sleep(0.1)
    await all_work(few)


async def test_a_connection_dropped_in_use_is_unavailable_and_replaced(few: Database, database_url: str) -> None:
    uses = [asyncio.create_task(use(few, 5)) for _ in range(MAX)]
    await asyncio.sleep(0.3)
    await terminate_all(database_url)
    outcomes = await asyncio.gather(*uses, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable] * MAX
    await all_work(few)


async def test_a_connection_whose_last_words_came_unasked_is_unavailable_and_replaced(few: Database) -> None:
    for _ in range(3):
        with pytest.raises(Unavailable):
            async with few.read():
                raise asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    async with few.read() as conn:
        assert await conn.fetchval("select 1") == 1


async def test_cancelled_users_and_waiters_lose_nothing(few: Database) -> None:
    for round_number in range(20):
        tasks = [asyncio.create_task(use(few, 0.2)) for _ in range(MAX * 3)]
        await asyncio.sleep(0.005 * (round_number % 5))
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await all_work(few)


async def test_our_own_refusals_keep_the_connection(few: Database) -> None:
    await warm(few)
    with pytest.raises(Conflict):
        async with few.transaction():
            raise Conflict("no")
    assert len(few._idle) == MAX
    await all_work(few)


async def test_session_locks_do_not_outlive_a_use_that_failed(few: Database) -> None:
    with pytest.raises(asyncpg.PostgresError):
        async with few.read() as conn:
            await conn.execute("select pg_advisory_lock(1, 2); select 1 / 0")
    async with few.read() as conn:
        assert await conn.fetchval("select count(*) from pg_locks where locktype = 'advisory'") == 0


async def test_a_server_that_fell_silent_is_not_waited_for(
    few: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, as a machine that is gone: its connections stand, and nothing comes over them."""
    monkeypatch.setattr(db, "_CLEAN_S", 0.2)
    async with few.read() as conn:
        pid = await conn.fetchval("select pg_backend_pid()")
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), few.read() as conn:
                    await conn.fetchval("select 1")
            await all_work(few)
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def hasty(database_url: str) -> AsyncIterator[Database]:
    """Commands have a moment."""
    async with db.connect(
        database_url, lambda _subject, _payload: None, connections_max=MAX, command_timeout_s=0.3
    ) as connected:
        yield connected


async def test_a_command_whose_time_is_over_is_unavailable_and_its_connection_serves_again(database_url: str) -> None:
    async with hasty(database_url) as few:
        for _ in range(MAX + 1):
            with pytest.raises(Unavailable):
                await use(few, 5)
            with pytest.raises(Unavailable):
                async with few.transaction() as tx:
                    await tx.execute("select pg_sleep(5)")
        await all_work(few)


@pytest.mark.parametrize("when", ["command", "commit"])
async def test_a_transaction_whose_server_falls_silent_is_soon_unavailable(
    database_url: str, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(db, "_CLEAN_S", 0.2)
    pids: list[int] = []

    async def change(few: Database) -> None:
        async with few.transaction() as tx:
            pids.append(await tx.fetchval("select pg_backend_pid()"))
            os.kill(pids[0], signal.SIGSTOP)
            if when == "command":
                await tx.execute("select 1")

    async with hasty(database_url) as few:
        try:
            async with asyncio.timeout(10):
                with pytest.raises(Unavailable):
                    await change(few)
                await all_work(few)
        finally:
            os.kill(pids[0], signal.SIGCONT)


@pytest.mark.parametrize(
    "state",
    [
        *("40001", "40P01", "53100", "53000", "53200", "53300", "55P03"),
        *("57014", "57P01", "57P02", "57P03", "57P05", "58030"),
    ],
)
async def test_a_server_in_trouble_is_a_typed_refusal(few: Database, state: str) -> None:
    statement = f"do $$ begin raise exception 'could not do it' using errcode = '{state}'; end $$"
    with pytest.raises(Unavailable) as raised:
        async with few.transaction() as tx:
            await tx.execute(statement)
    assert isinstance(raised.value, StorageFull) is (state == "53100")
    assert raised.value.retry_after_s
    await all_work(few)


async def test_a_message_of_no_space_counts_whatever_its_number(few: Database) -> None:
    text = "could not write to file: No space left on device"
    with pytest.raises(StorageFull):
        async with few.read() as conn:
            await conn.execute(f"do $$ begin raise exception '{text}' using errcode = '58030'; end $$")
