"""Functions that run by themselves: whoever finds a time that has come makes the invocation, once.

The invocation and the next time are one transaction, and the invocation's id is made of function and time. After
a while in which nobody looked, all the times that were missed are made up for by one invocation.
"""

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from penstock.kit.db import Database, Tx
from penstock.kit.telemetry import correlation_id, logger
from penstock.serverless.errors import BadSchedule
from penstock.serverless.model import Draft, Mode
from penstock.serverless.service import validate
from penstock.serverless.store import invocations
from penstock.serverless.store import schedules as store
from penstock.serverless.store.schedules import Due
from penstock.wire import subjects
from penstock.wire.rest import ScheduleUse

BATCH: Final = 100
#: An invocation that found no worker for so long is of no use any more; the next time has come.
WAITS_S: Final = 86_400.0
_log = logger(__name__)


async def plan(tx: Tx, function_id: str, schedule: ScheduleUse | None) -> None:
    """Let the function run by this schedule from now on, or only when it is called."""
    if schedule is None:
        await store.drop(tx, function_id)
    else:
        await store.put(tx, function_id, schedule, validate.next_time(schedule, datetime.now(UTC)))


@dataclass(frozen=True, slots=True)
class Schedules:
    """Any number may fire."""

    db: Database

    async def fire(self) -> int:
        """Make the invocations whose time has come; how many there were."""
        async with self.db.transaction() as tx:
            due = await store.take_due(tx, limit=BATCH)
            for each in due:
                await _move(tx, each)
            if due:
                await invocations.add(tx, [_draft(each) for each in due])
            for function_id in {each.function_id for each in due}:
                tx.hint(subjects.FUNCTIONS, function_id.encode())
        return len(due)


async def _move(tx: Tx, due: Due) -> None:
    try:
        schedule = ScheduleUse(cron=due.cron, timezone=due.timezone)
        await store.move(tx, due.function_id, validate.next_time(schedule, due.now))
    except BadSchedule as error:
        # It could be read when it was deployed: it has no more times, or its time zone is gone from this host.
        _log.warning("schedule_dropped", function_id=due.function_id, error=error.detail)
        await store.drop(tx, due.function_id)


def _draft(due: Due) -> Draft:
    payload = msgspec.json.encode(due.payload)
    return Draft(
        project_id=due.project_id,
        id=f"cron-{due.function_id}-{int(due.next_at.timestamp())}",
        function_id=due.function_id,
        function_name=due.name,
        mode=Mode.ASYNC,
        content_type="application/json",
        headers={},
        attributes={"schedule": due.cron, "scheduled_at": due.next_at.astimezone(UTC).isoformat()},
        payload=payload,
        payload_ref=None,
        payload_hash=hashlib.sha256(payload).digest(),
        timeout_s=None,
        delay_s=0.0,
        ttl_s=WAITS_S,
        reply_to="",
        webhook=due.webhook,
        parent_id=None,
        key_id=due.key_id,
        created_by=due.created_by,
        correlation_id=correlation_id(),
    )
