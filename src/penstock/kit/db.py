"""Postgres: a pool, one way to open a transaction, and hints that leave only after the commit.

A `Tx` is what services and stores receive. Nothing inside a transaction talks to the network; what should happen
next is queued with `tx.hint` and sent when the commit has succeeded. Hints are lossy: sweepers find what they missed.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Final, Protocol, TypeAlias

import asyncpg
import msgspec

from penstock.kit.errors import PenstockError, StorageFull, Unavailable
from penstock.kit.full import FULL, is_full

Row: TypeAlias = asyncpg.Record
Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[Row]"
_ACQUIRE_TIMEOUT_S: Final = 10.0
#: A server that is gone without a word is not waited for.
_CLEAN_S: Final = 5.0
_FULL_RETRY_S: Final = 5
#: The server is gone, silent, going, not there yet, out of something, or gave this transaction up in favour of another:
#: SQLSTATE classes 08, 40, 53, 57 and 58. A command whose time is over may have been done or not.
_AWAY: Final = (
    TimeoutError,
    ConnectionError,
    asyncpg.PostgresConnectionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.PostgresSystemError,
    # Its last words came while nobody asked: the library sees the end of the connection only after them.
    asyncpg.InternalClientError,
)
#: Of these, the ones of a server that can be reached.
_BUSY: Final = (
    TimeoutError,
    asyncpg.InsufficientResourcesError,
    asyncpg.QueryCanceledError,
    asyncpg.TransactionRollbackError,
    asyncpg.LockNotAvailableError,
    asyncpg.PostgresSystemError,
)


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

    def __init__(self, conn: Connection) -> None:
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
    """The connections of a process. Whoever gives one back hands it to the next in line: the library's own pool, which
    opens and closes them, would cost as much as a small query at each use."""

    def __init__(self, pool: "asyncpg.Pool[Row]", publish_hint: Callable[[str, bytes], None]) -> None:
        self._pool = pool
        self._publish_hint = publish_hint
        self._idle: list[Connection] = []
        self._waiting: deque[asyncio.Future[Connection | None]] = deque()
        self._room = pool.get_max_size()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Tx]:
        """A read-write transaction; its hints go out after the commit."""
        async with _Lease(self) as conn, _begun(conn):
            tx = Tx(conn)
            yield tx
        for subject, payload in tx.hints:
            self._publish_hint(subject, payload)

    def read(self) -> "AbstractAsyncContextManager[Reader]":
        """A connection in autocommit, for queries."""
        return _Lease(self)

    async def take(self) -> Connection:
        """A connection for one use: an idle one, a new one, or the next that is given back."""
        while self._idle:
            if not _gone(conn := self._idle.pop()):
                return conn
            await self.give_back(conn, clean=False)
        try:
            async with asyncio.timeout(_ACQUIRE_TIMEOUT_S):
                while (conn := await (self._open() if self._room else self._next_in_line())) is None or _gone(conn):
                    if conn is not None:
                        await self.give_back(conn, clean=False)
                return conn
        except (OSError, *_AWAY) as error:  # a TimeoutError is an OSError
            raise _away(error) from error

    async def _open(self) -> Connection:
        self._room -= 1
        try:
            return await self._pool.acquire()
        except BaseException:
            self._make_room()
            raise

    async def _next_in_line(self) -> "Connection | None":
        """None means that there is room for a new one."""
        turn: asyncio.Future[Connection | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._pass_on(turn.result())
            raise

    async def give_back(self, conn: Connection, *, clean: bool) -> None:
        """To the next in line; a connection that was not used well is cleaned or closed first."""
        if clean and not _gone(conn):
            self._pass_on(conn)
            return
        try:
            await self._release(conn)
        finally:
            self._make_room()

    async def _release(self, conn: Connection) -> None:
        """To the pool, which closes what it cannot clean; the failure that brought it there is told already."""
        with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
            await self._pool.release(conn, timeout=_CLEAN_S)

    def _make_room(self) -> None:
        self._room += 1
        self._hand_over(None)

    def _pass_on(self, conn: "Connection | None") -> None:
        """Nothing that was taken or offered is lost: to the next in line, or to the idle ones."""
        if not self._hand_over(conn) and conn is not None:
            self._idle.append(conn)

    def _hand_over(self, conn: "Connection | None") -> bool:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(conn)
                return True
        return False

    async def close(self) -> None:
        """Give all connections up."""
        while self._idle:
            await self._release(self._idle.pop())
        try:
            await asyncio.wait_for(self._pool.close(), 5)
        except TimeoutError:
            self._pool.terminate()


class _Lease:
    """One use of a connection. Failures of the server become `Unavailable`."""

    __slots__ = ("_conn", "_db")

    def __init__(self, db: Database) -> None:
        self._db = db

    async def __aenter__(self) -> Connection:
        self._conn = await self._db.take()
        return self._conn

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # Only what went wrong in Postgres can have left the session unclean; our own refusals cannot.
        await self._db.give_back(self._conn, clean=kind is None or issubclass(kind, PenstockError))
        if isinstance(error, _AWAY) or (isinstance(error, asyncpg.InterfaceError) and _gone(self._conn)):
            raise _away(error) from error


@asynccontextmanager
async def _begun(conn: Connection) -> AsyncIterator[None]:
    """A transaction. A silent server is not waited for again with the rollback: the connection is closed instead."""
    transaction = conn.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        try:
            async with asyncio.timeout(_CLEAN_S):
                await transaction.rollback()
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError):
            # What went wrong first is raised.
            conn.terminate()
        raise
    await transaction.commit()


def _gone(conn: Connection) -> bool:
    """Whether the server has dropped it. The library detaches what it lost, and then refuses even the question."""
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:
        return True


def _away(error: BaseException) -> Unavailable:
    """Why there is no answer, in words for callers."""
    if isinstance(error, asyncpg.DiskFullError) or is_full(error):
        FULL.labels("database").inc()
        return StorageFull("the database has no space left; try again later", retry_after_s=_FULL_RETRY_S)
    if isinstance(error, _BUSY):
        return Unavailable("the database cannot answer now; try again", retry_after_s=1, error=repr(error))
    return Unavailable("the database cannot be reached; try again", retry_after_s=1)


@asynccontextmanager
async def connect(
    url: str,
    publish_hint: Callable[[str, bytes], None],
    *,
    connections_max: int = 10,
    name: str = "penstock",
    command_timeout_s: float = 30,
    plan_once: bool = False,
) -> AsyncIterator[Database]:
    """Open the pool and close it at the end. `plan_once` is for who asks the same few questions over and over, written
    so that one plan does for all values."""
    settings = {"application_name": name, "jit": "off"} | (
        {"plan_cache_mode": "force_generic_plan"} if plan_once else {}
    )
    pool = await asyncpg.create_pool(
        url,
        min_size=1,
        max_size=connections_max,
        command_timeout=command_timeout_s,
        max_inactive_connection_lifetime=300,
        init=_prepare,
        reset=_clean,
        server_settings=settings,
    )
    database = Database(pool, publish_hint)
    try:
        yield database
    finally:
        await database.close()


async def _prepare(conn: "asyncpg.Connection[Row]") -> None:
    await conn.set_type_codec(
        "jsonb", schema="pg_catalog", format="binary", encoder=_encode_jsonb, decoder=_decode_jsonb
    )


async def _clean(conn: "asyncpg.Connection[Row]") -> None:
    """Connections come here only when their use ended badly: advisory locks are all that a session can still hold."""
    await conn.execute("select pg_advisory_unlock_all()")


def _encode_jsonb(value: object) -> bytes:
    return b"\x01" + msgspec.json.encode(value)


def _decode_jsonb(data: bytes) -> Any:
    return msgspec.json.decode(data[1:])
