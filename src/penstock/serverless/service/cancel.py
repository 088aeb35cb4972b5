"""Cancel invocations: in a queue they never run, on a worker they are stopped, what comes late counts for nothing."""

from dataclasses import dataclass
from typing import Final

from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.serverless.errors import NoInvocation
from penstock.serverless.model import Invocation
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import cancels, ends, keeping, reads
from penstock.serverless.store.cancels import Cancelled
from penstock.wire.serverless import VERSION, ControlMessage, FailureClass

BATCH: Final = 1000
_BATCHES_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Cancel:
    """What ends invocations on people's behalf. Workers and callers are told after the commit."""

    db: Database
    teller: Teller

    async def __call__(self, caller: Caller, invocation_id: str) -> Invocation:
        """The invocation after it; one that has ended stays as it is."""
        caller.require("functions.invoke")
        async with self.db.transaction() as tx:
            # First of all: one that is found only afterwards may have been made since, and would go on.
            if await reads.find(tx, caller.project_id, invocation_id) is None:
                raise NoInvocation.named(invocation_id)
            done = await cancels.cancel(tx, caller.project_id, [invocation_id], f"cancelled by {caller.display_name}")
            found = await reads.find(tx, caller.project_id, invocation_id)
            if done:
                await audit.record(tx, caller.actor, "functions.cancel", invocation_id)
        await self._tell(done)
        assert found is not None
        return found

    async def _tell(self, done: list[Cancelled]) -> None:
        for each in done:
            if each.request is not None and each.mac_key is not None:
                order = ControlMessage(
                    version=VERSION, workerName=each.row.worker_id, cancel=[(each.row.id, each.row.attempt)]
                )
                await self.teller.order(
                    request=each.request, worker=each.row.worker_id, mac_key=each.mac_key, message=order
                )
        await self.teller.ended([each.row for each in done])

    async def drop_queue(self, function_id: str) -> None:
        """End what waits for a function that was deleted; what runs may finish. `sweep` ends what is left."""
        for _ in range(_BATCHES_MAX):
            async with self.db.transaction() as tx:
                ended = await ends.condemn(
                    tx, function_id, FailureClass.NO_WORKER_TEMPLATE, "the function was deleted", limit=BATCH
                )
            await self.teller.ended(ended)
            if len(ended) < BATCH:
                return

    async def sweep(self) -> None:
        """End what waits for functions that are no more, whatever happened to who deleted them."""
        async with self.db.read() as conn:
            gone = await keeping.waited_for_in_vain(conn, limit=BATCH)
        for function_id in gone:
            await self.drop_queue(function_id)
