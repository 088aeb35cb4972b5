"""Postgres: a pool, one way to open a transaction, and hints that leave only after the commit.

A `Tx` is what services and stores receive. Nothing inside a transaction talks to the network; what should happen
next is queued with `tx.hint` and sent when the commit has succeeded. Hints are lossy: sweepers find what they missed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeAlias

import asyncpg
import msgspec

from penstock.kit.errors import Unavailable

Row: TypeAlias = asyncpg.Record


class Reader(Protocol):
    """Runs SQL; both a transaction and a bare connection do."""

    async def fetch(self, query: str, *args: object) -> list[Row]:
        """All rows."""
        ...

    async def fetchrow(self, query: str, *args: object) -> Row | None:
        """The first row, or none."""
        ...

    async def fetchval(self, query: str, *args: object) -> Any:
        """The first column of the first row."""
        ...

    async def execute(self, query: str, *args: object) -> str:
        """The command's status."""
        ...


class Tx:
    """One open transaction."""

    def __init__(self, conn: "asyncpg.Connection[Row]") -> None:
        self.conn = conn
        self.hints: list[tuple[str, bytes]] = []

    def hint(self, subject: str, payload: bytes = b"") -> None:
        """Publish on core NATS once this transaction has committed."""
        self.hints.append((subject, payload))

    async def fetch(self, query: str, *args: object) -> list[Row]:
        """All rows."""
        return await self.conn.fetch(query, *args)

    async def fetchrow(self, query: str, *args: object) -> Row | None:
        """The first row, or none."""
        return await self.conn.fetchrow(query, *args)

    async def fetchval(self, query: str, *args: object) -> Any:
        """The first column of the first row."""
        return await self.conn.fetchval(query, *args)

    async def execute(self, query: str, *args: object) -> str:
        """The command's status."""
        return await self.conn.execute(query, *args)

    async def executemany(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        """The same statement for many rows."""
        await self.conn.executemany(query, rows)


class Database:
    """The pool, shared by everything in a process."""

    def __init__(self, pool: "asyncpg.Pool[Row]", publish_hint: Callable[[str, bytes], None]) -> None:
        self._pool = pool
        self._publish_hint = publish_hint

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """A read-write transaction; its hints go out after the commit."""
        async with self._acquire() as conn, conn.transaction():
            tx = Tx(conn)
            yield tx
        for subject, payload in tx.hints:
            self._publish_hint(subject, payload)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Reader]:
        """A connection in autocommit, for queries."""
        async with self._acquire() as conn:
            yield conn

    @asynccontextmanager
    async def _acquire(self) -> "AsyncIterator[asyncpg.Connection[Row]]":
        try:
            context = self._pool.acquire(timeout=10)
            conn = await context
        except (
            OSError,
            TimeoutError,
            asyncpg.PostgresConnectionError,
            asyncpg.CannotConnectNowError,
        ) as error:
            raise Unavailable("the database cannot be reached; try again", retry_after_s=1) from error
        try:
            yield conn  # pyright: ignore[reportReturnType]
        finally:
            await asyncio.shield(self._pool.release(conn))


@asynccontextmanager
async def connect(
    url: str, publish_hint: Callable[[str, bytes], None], *, connections_max: int = 10, name: str = "penstock"
) -> AsyncIterator[Database]:
    """Open the pool and close it at the end."""
    pool = await asyncpg.create_pool(
        url,
        min_size=1,
        max_size=connections_max,
        command_timeout=30,
        max_inactive_connection_lifetime=300,
        init=_prepare,
        server_settings={"application_name": name, "jit": "off"},
    )
    try:
        yield Database(pool, publish_hint)
    finally:
        await _close(pool)


async def _close(pool: "asyncpg.Pool[Row]") -> None:
    try:
        await asyncio.wait_for(pool.close(), 5)
    except TimeoutError:
        pool.terminate()


async def _prepare(conn: "asyncpg.Connection[Row]") -> None:
    await conn.set_type_codec(
        "jsonb", schema="pg_catalog", format="binary", encoder=_encode_jsonb, decoder=_decode_jsonb
    )


def _encode_jsonb(value: object) -> bytes:
    return b"\x01" + msgspec.json.encode(value)


def _decode_jsonb(data: bytes) -> Any:
    return msgspec.json.decode(data[1:])
