"""How many workers a function has: as many as its backlog needs, never more than it may, none when nobody calls.

A look is one transaction that holds the function's row, so that any number of activators count alike. Workers are made
from the definition alone; one that cannot be made is tried again after a pause, and the function says why.
"""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit.db import Database, Tx
from penstock.kit.errors import Kind, PenstockError
from penstock.kit.ids import new_id
from penstock.kit.process import guarded
from penstock.kit.telemetry import correlated, logger
from penstock.serverless.model import Limits, Order, Worker
from penstock.serverless.ports import Pool
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import ends, workers
from penstock.serverless.store.workers import Demand
from penstock.wire import subjects
from penstock.wire.rest import FunctionPut
from penstock.wire.serverless import FailureClass
from penstock.wire.tasks import is_bad_code

_log = logger(__name__)
#: So many are made by one look; the next one goes on.
_AT_ONCE: Final = 16
#: Provisioning has deadlines of its own; a worker that was not heard of long after them never will be.
_PROVISIONING_S: Final = 180.0
_BUILDING_S: Final = 600.0
_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
#: Workers of a version that failed to start so often in a row condemn what waits for it.
_HOPELESS: Final = 3
_CONDEMNED_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Made:
    """A new worker."""

    worker: str
    request: str
    slots: int


class Scaler:
    """One activator's looks. `welcome` is told of each new worker, after the commit."""

    def __init__(
        self, db: Database, pool: Pool, teller: Teller, limits: Limits, *, welcome: Callable[[Made], Awaitable[None]]
    ) -> None:
        self._db = db
        self._pool = pool
        self._teller = teller
        self._limits = limits
        self._welcome = welcome
        self._asked: dict[str, None] = {}
        self._wake = asyncio.Event()

    def look(self, function_id: str) -> None:
        """Look at a function soon."""
        self._asked[function_id] = None
        self._wake.set()

    async def run(self) -> None:
        """Look for ever at what was asked for, one function after the other."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            asked, self._asked = self._asked, {}
            for function_id in asked:
                await guarded(self.settle(function_id), name="scaling", function_id=function_id)

    async def sweep(self) -> None:
        """Look at all functions that have workers, or must have some."""
        async with self._db.read() as conn:
            for function_id in await workers.unsettled(conn):
                self.look(function_id)

    async def settle(self, function_id: str) -> None:
        """Bring one function to what it needs."""
        with correlated(new_id("cor")):
            for _ in range(_AT_ONCE):
                made = await self._step(function_id)
                if made is None:
                    break
                await self._welcome(made)

    async def _step(self, function_id: str) -> Made | None:
        """Make one worker if one is missing."""
        try:
            async with self._db.transaction() as tx:
                demand = await workers.demand(tx, function_id)
                if demand is None or not _missing(demand):
                    return None
                made = await self._make(tx, demand)
                if demand.wait_reason and not demand.failures:
                    await workers.explain(tx, function_id, "", failures=0, pause_s=0)
                return made
        except PenstockError as error:
            await self._refused(function_id, error)
            return None

    async def _make(self, tx: Tx, demand: Demand) -> Made:
        definition = msgspec.convert(demand.definition, FunctionPut)
        request = subjects.request_token(demand.project_id, demand.name)
        worker_id = worker_name(request)
        order = Order(
            worker=worker_id,
            function_id=demand.id,
            function=demand.name,
            project_id=demand.project_id,
            organisation_id=demand.organisation_id,
            created_by=demand.created_by,
            created_kind=demand.created_kind,
            key_id=demand.key_id,
            request=request,
            definition=definition,
        )
        allocation_id = await self._pool.create(tx, order)
        await workers.add(
            tx,
            worker_id=worker_id,
            demand=demand,
            request=request,
            allocation_id=allocation_id,
            start_s=definition.start_timeout_s + (_BUILDING_S if definition.runtime else 0) + _PROVISIONING_S,
            unknown=secrets.token_bytes(32),
        )
        _log.info("worker_made", worker=worker_id, function_id=demand.id, allocation_id=allocation_id)
        return Made(worker=worker_id, request=request, slots=demand.slots)

    async def _refused(self, function_id: str, error: PenstockError) -> None:
        """Nothing was made: say why, and come back. Where room is all that is missing, an idle worker of another
        function of the project makes some."""
        async with self._db.transaction() as tx:
            await workers.explain(tx, function_id, error.detail, failures=0, pause_s=self._limits.create_again_s)
            leaves = await workers.make_room(tx, function_id) if error.kind is Kind.EXHAUSTED else None
        if leaves is not None:
            _log.info("worker_makes_room", worker=leaves, function_id=function_id)

    async def failed(self, tx: Tx, worker: Worker, reason: str) -> None:
        """A worker did not start. After a few in a row, what waits is not kept waiting for ever; code that no node can
        use is not tried again for what waits."""
        demand = await workers.demand(tx, worker.function_id)
        if demand is None or worker.version != demand.version:
            return
        if demand.create_after is not None and worker.created_at < demand.create_after:
            # It was made before the last failure: what ended several at once is one failure.
            return
        failures = max(_HOPELESS if is_bad_code(reason) else 0, demand.failures + 1)
        pause_s = min(self._limits.create_again_s * 2**failures, self._limits.create_again_max_s)
        await workers.explain(
            tx, worker.function_id, f"its workers do not start: {reason}", failures=failures, pause_s=pause_s
        )

    async def condemn(self, function_id: str) -> None:
        """End what waits for a function that cannot start; the pause lets a new version take over first."""
        async with self._db.transaction() as tx:
            demand = await workers.demand(tx, function_id)
            if (
                demand is None
                or not (demand.deleted or demand.failures >= _HOPELESS)
                or demand.ready
                or demand.starting
            ):
                return
            why = FailureClass.NO_WORKER_TEMPLATE if demand.deleted else FailureClass.FRAMEWORK_UNHEALTHY
            error = "the function was deleted" if demand.deleted else demand.wait_reason
            rows = await ends.condemn(tx, function_id, why, error, limit=_CONDEMNED_MAX)
        await self._teller.ended(rows)


def _missing(demand: Demand) -> bool:
    """Whether one more worker is needed and may be made now."""
    if demand.deleted or demand.pause_s > 0:
        return False
    has = demand.starting + demand.ready
    return has < wanted(demand)


def wanted(demand: Demand) -> int:
    """How many workers the current version should have. One that is to take over from another needs at least one."""
    needed = math.ceil((demand.due + demand.inflight) / demand.tasks_per_worker)
    takes_over = int(demand.serving_version != demand.version and demand.serving_ready > 0)
    return max(demand.workers_min, min(max(needed, takes_over), demand.workers_max))


def worker_name(request: str) -> str:
    """As the source names them."""
    return f"unit-{request[:47]}-worker-" + "".join(secrets.choice(_ALPHABET) for _ in range(8))
