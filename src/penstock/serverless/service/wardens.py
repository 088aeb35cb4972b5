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
from penstock.serverless.store import ends, losses, workers
from penstock.wire.serverless import ERROR_BYTES_MAX, VERSION, ControlMessage, WorkerMetricMessage

_log = logger(__name__)
_NEVER_ARRIVED_S: Final = 5.0
#: And so long an attempt is missed in what its worker says, before it is made again.
_MISSING_S: Final = 2.5
_EXPIRED_MAX: Final = 1000
_REASON_CHARACTERS_MAX: Final = 500


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
        self._heard_since = self._looked_at = time.monotonic()
        #: Attempts that workers did not have when they last said, and since when.
        self._missing: dict[str, dict[tuple[str, int], float]] = {}

    async def end(self, worker_id: str, reason: str, *, only_idle: bool = False) -> None:
        """The worker goes, with its allocation; whatever it had is made again elsewhere."""
        if not only_idle:
            # From here on it gets nothing more, so that what it has can be locked before its own row.
            async with self._db.read() as conn:
                await workers.stop(conn, worker_id, reason)
        async with self._db.transaction() as tx:
            await losses.hold_attempts(tx, worker_id)
            gone = await workers.remove(tx, worker_id, reason, only_idle=only_idle)
            if gone is None:
                return
            lost = await losses.lose(tx, worker_id, reason)
            if gone.ready_at is None:
                await self._scaler.failed(tx, gone, reason)
            await self._pool.release(tx, gone.allocation_id, _first_line(reason))
        _log.info("worker_gone", worker=worker_id, reason=reason, attempts_lost=len(lost), project_id=gone.project_id)
        self._keys.forget(worker_id)
        self._missing.pop(worker_id, None)
        await self._teller.ended(lost)
        self._dispatcher.point([gone.function_id])
        self._scaler.look(gone.function_id)
        if gone.ready_at is None:
            await self._scaler.condemn(gone.function_id)
        await self._farewell(gone)

    async def unhealthy(self, worker_id: str, error: str) -> None:
        """Its framework never answered, or cannot be trusted with more. The error is a tenant's word."""
        await self.end(worker_id, f"framework_unhealthy: {error[:ERROR_BYTES_MAX]}".replace("\0", "�"))

    async def compare(self, heartbeat: WorkerMetricMessage, *, age_s: float) -> None:
        """What the rows say that a worker has, and what it had `age_s` ago: attempts that never came are made again,
        those that nobody wants any more are called off. One that is old says nothing about now."""
        if age_s > _NEVER_ARRIVED_S:
            return
        worker_id = heartbeat.workerName
        async with self._db.read() as conn:
            missing = await losses.missing(
                conn, worker_id, heartbeat.attempts, older_than_s=_NEVER_ARRIVED_S + max(age_s, 0.0)
            )
            unwanted = await losses.unwanted(conn, worker_id, heartbeat.attempts) if heartbeat.attempts else None
        if never_came := self._missed(worker_id, missing):
            await self._take_back(worker_id, never_came)
        if unwanted:
            await self._call_off(worker_id, unwanted)

    def _missed(self, worker_id: str, missing: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those that have been missing for a while: an attempt that ended is so too until its result is committed."""
        now, before = time.monotonic(), self._missing.pop(worker_id, {})
        if not missing:
            return []
        since = self._missing[worker_id] = {each: before.get(each, now) for each in missing}
        return [each for each, first in since.items() if now - first >= _MISSING_S]

    async def _take_back(self, worker_id: str, attempts: list[tuple[str, int]]) -> None:
        async with self._db.transaction() as tx:
            lost = await losses.take_back(tx, worker_id, attempts)
        _log.warning("attempts_never_arrived", worker=worker_id, attempts=len(lost))
        await self._teller.ended(lost)
        self._dispatcher.point({row.function_id for row in lost})

    async def _call_off(self, worker_id: str, unwanted: losses.Unwanted) -> None:
        message = ControlMessage(version=VERSION, workerName=worker_id, cancel=list(unwanted.attempts))
        await self._teller.order(request=unwanted.request, worker=worker_id, mac_key=unwanted.mac_key, message=message)

    async def sweep(self) -> None:
        """Everything that ends by itself."""
        await self._retire()
        async with self._db.read() as conn:
            idle, silent = await workers.drained(conn), await workers.expired(conn)
        for worker_id, reason in idle.items():
            await self.end(worker_id, reason, only_idle=True)
        if self._could_hear():
            for worker_id in silent:
                await self.end(worker_id, "not heard of for too long")
        await self._expire()

    async def look_at(self, allocation_ids: list[str]) -> None:
        """Allocations changed: workers whose own is over are gone."""
        async with self._db.read() as conn:
            found = await workers.of_allocations(conn, allocation_ids)
            over = await self._pool.over(conn, list(found))
        for allocation_id, why in over.items():
            await self.end(found[allocation_id], f"its allocation ended: {why}" if why else "its allocation ended")

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
        """Whether this process was connected and awake for as long as a lease lasts."""
        now = time.monotonic()
        if not self._bus.client.is_connected or now - self._looked_at > self._limits.lease_s / 2:
            self._heard_since = now
        self._looked_at = now
        return now - self._heard_since > self._limits.lease_s


def _first_line(reason: str) -> str:
    """Without a traceback, which is the function's business and not its allocation's."""
    return reason.partition("\n")[0][:_REASON_CHARACTERS_MAX]
