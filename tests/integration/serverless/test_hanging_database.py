"""A database that hangs, stopped or behind a lock, for longer than a command may take and a message may wait."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs
from tests.conftest import Servers, fresh_database
from tests.integration.serverless.sidecars import Listener, listen
from tests.integration.serverless.stage import Stage, staged, until

from penstock.kit import bus, db, pull
from penstock.kit.errors import Unavailable
from penstock.serverless import streams
from penstock.wire import subjects
from penstock.wire.serverless import State, WorkerDispatchMessage

CALLS = 20
COMMAND_S = 0.5
ACK_WAIT_S = 1.0
#: Every message would be delivered as often as it may be, twice over.
HANGS_S = 6.0
DELIVERIES_MAX = 3


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All times in seconds instead of half minutes."""
    consumers = tuple(
        (stream, replace(config, ack_wait=ACK_WAIT_S, max_deliver=DELIVERIES_MAX))
        for stream, config in streams._CONSUMERS  # pyright: ignore[reportPrivateUsage]
    )
    monkeypatch.setattr(streams, "_CONSUMERS", consumers)
    monkeypatch.setattr(streams, "DELIVERIES_MAX", DELIVERIES_MAX)
    monkeypatch.setattr(pull, "IN_PROGRESS_EVERY_S", ACK_WAIT_S / 5)
    monkeypatch.setattr(db, "_ACQUIRE_TIMEOUT_S", COMMAND_S)
    monkeypatch.setattr(db, "_CLEAN_S", COMMAND_S / 2)


@pytest.fixture
async def url(servers: Servers) -> AsyncIterator[str]:
    async with fresh_database(servers) as made:
        yield made


@pytest.fixture
async def stage(servers: Servers, url: str, short: None) -> AsyncIterator[Stage]:
    # Tracebacks for people take a second of the loop each, as long as a message may wait here.
    with capture_logs():
        async with (
            bus.connect(servers.nats_url, name="test") as connected,
            db.connect(url, connected.hint, name="test", command_timeout_s=COMMAND_S) as database,
            staged(database, connected) as made,
        ):
            yield made


def _pids(servers: Servers) -> list[int]:
    postmaster = int((servers.folder / "postgres" / "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return [postmaster, *map(int, children)]


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@asynccontextmanager
async def stopped(servers: Servers, _: str) -> AsyncIterator[None]:
    """All of Postgres stands still: whatever was sent to it is done when it goes on, or not."""
    pids = _pids(servers)
    _send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pids, signal.SIGCONT)


@asynccontextmanager
async def locked(_: Servers, url: str) -> AsyncIterator[None]:
    """Somebody's migration."""
    conn = await asyncpg.connect(url)
    try:
        async with conn.transaction():
            await conn.execute("lock table serverless.invocations in access exclusive mode")
            yield
    finally:
        await conn.close()


FAULTS: dict[str, Callable[[Servers, str], AbstractAsyncContextManager[None]]] = {"stopped": stopped, "locked": locked}


async def _dead_letters(stage: Stage) -> Listener:
    return await listen(stage.bus, subjects.DEAD_LETTERS)


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_database_that_hangs_costs_no_result(servers: Servers, stage: Stage, url: str, fault: str) -> None:
    letters = await _dead_letters(stage)
    go_on = asyncio.Event()

    async def handler(dispatch: WorkerDispatchMessage) -> Any:
        await go_on.wait()
        return dispatch.invocationID

    stage.handler = handler
    await stage.define(concurrency=CALLS, workers_max=1)
    ids = [await stage.spawn(payload=number) for number in range(CALLS)]
    await until(lambda: _is(len(_ran(stage)) == CALLS))
    async with FAULTS[fault](servers, url):
        go_on.set()
        await asyncio.sleep(HANGS_S)
        info = await stage.bus.js.consumer_info(streams.OUT, streams.RESULTS)
        # The fault hit: every result is in the stream, and none was taken.
        assert (info.num_pending or 0) + (info.num_ack_pending or 0) == CALLS
    rows = [await _answered(lambda each=each: stage.ended(each)) for each in ids]
    assert {row.state for row in rows} == {State.SUCCEEDED}
    assert sorted(_ran(stage)) == sorted((each, 1) for each in ids)
    await until(lambda: _taken(stage))
    assert [letter.data for letter in letters.messages] == []
    assert await stage.value("select count(*) from serverless.dead_letters") == 0


def _ran(stage: Stage) -> list[tuple[str, int]]:
    return [each for worker in stage.workers.values() for each in worker.ran]


async def _is(value: object) -> object:
    return value


async def _taken(stage: Stage) -> bool:
    info = await stage.bus.js.consumer_info(streams.OUT, streams.RESULTS)
    return info.num_pending == 0 and info.num_ack_pending == 0


async def _answered(ask: Callable[[], Awaitable[Any]]) -> Any:
    """The answer of a database that has only just come back."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except (Unavailable, TimeoutError):
                await asyncio.sleep(0.1)
