"""Ends of workers: idle, of no use, lost with their node, or silent for too long. What they had in hand is made again.

A worker goes by one transaction: its row, its attempts, its allocation. Leases are only believed by an activator that
could have heard: while the queue is away, nobody is silent.
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.telemetry import logger
from penstock.serverless.model import Limits, Worker
from penstock.serverless.ports import Pool
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.scaling import Scaler
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import ends, workers
from penstock.wire.serverless import VERSION, ControlMessage, WorkerMetricMessage

_log = logger(__name__)
_NEVER_ARRIVED_S: Final = 5.0
_EXPIRED_MAX: Final = 1000


class Warden:
    """One activator's watch. `farewell` is told of each worker that went, after the commit."""

    def __init__(
        self,
        db: Database,
        bus: Bus,
        pool: Pool,
        teller: Teller,
        dispatcher: Dispatcher,
        scaler: Scaler,
        keys: Keys,
        limits: Limits,
        *,
        farewell: Callable[[Worker], Awaitable[None]],
    ) -> None:
        self._db = db
        self._bus = bus
        self._pool = pool
        self._teller = teller
        self._dispatcher = dispatcher
        self._scaler = scaler
        self._keys = keys
        self._limits = limits
        self._farewell = farewell
        self._connected_since = time.monotonic()

    async def end(self, worker_id: str, reason: str, *, only_idle: bool = False) -> None:
        """The worker goes, with its allocation; whatever it had is made again elsewhere."""
        async with self._db.transaction() as tx:
            gone = await workers.remove(tx, worker_id, reason, only_idle=only_idle)
            if gone is None:
                return
            lost = await workers.lose(tx, worker_id, reason)
            if gone.ready_at is None:
                await self._scaler.failed(tx, gone, reason)
            await self._pool.release(tx, gone.allocation_id, reason)
        _log.info("worker_gone", worker=worker_id, reason=reason, attempts_lost=len(lost), project_id=gone.project_id)
        self._keys.forget(worker_id)
        await self._teller.ended(lost)
        self._dispatcher.point([gone.function_id])
        self._scaler.look(gone.function_id)
        if gone.ready_at is None:
            await self._scaler.condemn(gone.function_id)
        await self._farewell(gone)

    async def unhealthy(self, worker_id: str, error: str) -> None:
        """Its framework never answered."""
        await self.end(worker_id, f"framework_unhealthy: {error}")

    async def compare(self, heartbeat: WorkerMetricMessage) -> None:
        """What the rows say that a worker has, and what it has: attempts that never came are made again, those that
        nobody wants any more are called off."""
        async with self._db.transaction() as tx:
            lost = await workers.never_arrived(
                tx, heartbeat.workerName, heartbeat.attempts, older_than_s=_NEVER_ARRIVED_S
            )
            unwanted = await workers.unwanted(tx, heartbeat.workerName, heartbeat.attempts)
        if lost:
            _log.warning("attempts_never_arrived", worker=heartbeat.workerName, attempts=len(lost))
            await self._teller.ended(lost)
            self._dispatcher.point({row.function_id for row in lost})
        if unwanted:
            await self._call_off(heartbeat.workerName, unwanted)

    async def _call_off(self, worker_id: str, unwanted: workers.Unwanted) -> None:
        message = ControlMessage(version=VERSION, workerName=worker_id, cancel=list(unwanted.attempts))
        await self._teller.order(request=unwanted.request, worker=worker_id, mac_key=unwanted.mac_key, message=message)

    async def sweep(self) -> None:
        """Everything that ends by itself."""
        await self._retire()
        async with self._db.read() as conn:
            idle, silent = await workers.drained(conn), await workers.expired(conn)
        for worker_id in idle:
            await self.end(worker_id, "drained", only_idle=True)
        if self._could_hear():
            for worker_id in silent:
                await self.end(worker_id, "not heard of for too long")
        await self._expire()

    async def look_at(self, allocation_ids: list[str]) -> None:
        """Allocations changed: workers whose own is over are gone."""
        async with self._db.read() as conn:
            found = await workers.of_allocations(conn, allocation_ids)
            living = await self._pool.living(conn, list(found))
        for allocation_id, worker_id in found.items():
            if allocation_id not in living:
                await self.end(worker_id, "its allocation ended")

    async def look_at_all(self) -> None:
        """The same for all, in case a hint was lost."""
        async with self._db.read() as conn:
            await_these = list(await workers.living(conn))
        if await_these:
            await self.look_at(await_these)

    async def _retire(self) -> None:
        async with self._db.read() as conn:
            functions = await workers.unsettled(conn)
            await workers.switch(conn, functions)
        for function_id in functions:
            async with self._db.transaction() as tx:
                leaving = await workers.retire(tx, function_id)
            for worker in leaving:
                _log.info("worker_drains", worker=worker.id, reason=worker.reason)

    async def _expire(self) -> None:
        async with self._db.transaction() as tx:
            late = await ends.expire(tx, limit=_EXPIRED_MAX)
        await self._teller.ended(late)

    def _could_hear(self) -> bool:
        if not self._bus.client.is_connected:
            self._connected_since = time.monotonic()
        return time.monotonic() - self._connected_since > self._limits.lease_s
