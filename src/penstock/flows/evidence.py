"""Everything that belongs to one request, from every part that kept something of it; for operators.

Postgres is asked for audit rows, events, node tasks and ledger entries, the workers for the sagas of the allocations
concerned. Logs are where the processes write them: the command line adds those that it can read.
"""

import asyncio
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from litestar import Router, get
from litestar.params import PathParameter

from penstock.billing.service import evidence as billing
from penstock.fleet import schemas, tasks
from penstock.kit import feed, ids
from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader
from penstock.kit.errors import NotFound
from penstock.wire import rest, subjects

ITEMS_MAX: Final = 1000
ALLOCATIONS_MAX: Final = 20
_ASK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Collector:
    """Gathers it."""

    db: Database
    bus: Bus

    async def gather(self, caller: Caller, correlation_id: str) -> rest.Evidence:
        """All of it, oldest first; NotFound when nobody knows the request."""
        caller.require("evidence.read")
        async with self.db.read() as conn:
            audit = await feed.audit_of_request(conn, correlation_id, limit=ITEMS_MAX)
            events = await feed.events_of_request(conn, correlation_id, limit=ITEMS_MAX)
            done = [schemas.task(task) for task in await tasks.of_request(conn, correlation_id, limit=ITEMS_MAX)]
            ledger = await _ledger(conn, correlation_id, audit)
        if not (audit or events or done):
            raise NotFound("nothing is known of a request with this correlation id")
        concerned = {event.aggregate_id for event in events} | {entry.target_id for entry in audit}
        allocations = sorted(name for name in concerned if ids.is_id("alc", name))
        sagas, missing = await self._sagas(allocations)
        async with self.db.read() as conn:
            charges = await billing.charges(conn, allocations[:ALLOCATIONS_MAX], limit=ITEMS_MAX)
        gathered = {"audit rows": audit, "events": events, "node tasks": done, "entries": ledger, "charges": charges}
        for what, found in gathered.items():
            if len(found) == ITEMS_MAX:
                missing.append(f"{what} after the first {ITEMS_MAX}")
        return rest.Evidence(
            correlation_id=correlation_id,
            audit=audit,
            events=events,
            tasks=done,
            sagas=sagas,
            ledger=ledger,
            charges=charges,
            missing=missing,
        )

    async def _sagas(self, allocation_ids: list[str]) -> tuple[list[rest.SagaStep], list[str]]:
        """Of the first so many, all asked at once: where nobody answers, each would take its whole time."""
        asked, unasked = allocation_ids[:ALLOCATIONS_MAX], allocation_ids[ALLOCATIONS_MAX:]
        questions = (self.bus.ask(subjects.SAGA_HISTORY, one.encode(), timeout_s=_ASK_S) for one in asked)
        answers = await asyncio.gather(*questions)
        steps: list[rest.SagaStep] = []
        missing = [f"the sagas of {len(unasked)} more allocations, from {unasked[0]} on"] if unasked else []
        for allocation_id, answer in zip(asked, answers, strict=True):
            if answer is None:
                missing.append(f"the saga of {allocation_id}: no worker answered")
                continue
            steps += msgspec.json.decode(answer, type=list[rest.SagaStep])
        return sorted(steps, key=lambda step: step.at), missing


async def _ledger(conn: Reader, correlation_id: str, audit: list[rest.AuditEntry]) -> list[rest.LedgerRow]:
    """Whoever moves money writes an audit row with it, which says whose and when."""
    concerned = sorted({entry.organisation_id for entry in audit if entry.organisation_id})
    if not concerned:
        return []
    return await billing.transfers_of_request(conn, correlation_id, concerned, audit[0].at, limit=ITEMS_MAX)


def router(collector: Collector) -> Router:
    """The one route, below /api/v1."""

    @get("/evidence/{correlation_id:str}", operation_id="getEvidence")
    async def get_evidence(
        caller: Caller, correlation_id: Annotated[str, PathParameter(max_length=128)]
    ) -> rest.Evidence:
        """Everything that belongs to one request: audit, events, node tasks, saga history, ledger; operators only."""
        return await collector.gather(caller, correlation_id)

    return Router(path="/", route_handlers=[get_evidence], tags=["audit"])
