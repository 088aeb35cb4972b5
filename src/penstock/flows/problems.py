"""What does not get on by itself, in all domains, with the reason and the command that repairs it.

The system repairs most of this without anybody: only what has lasted longer than that takes is listed.
"""

from collections.abc import Iterator
from typing import Final

from penstock.billing.paymentmodel import Received
from penstock.billing.service import inbox
from penstock.compute import overview as compute
from penstock.compute.overview import Stuck
from penstock.fleet import overview as fleet
from penstock.fleet.overview import SickNode, SickSlot
from penstock.kit import conditions, deadletters
from penstock.kit.db import Reader
from penstock.kit.outbox import oldest_waiting
from penstock.wire.rest import Problem

LIMIT: Final = 200
_PATIENCE_S: Final = 60.0
_REPORT_S: Final = 60.0
_SKEW_S: Final = 60.0


async def find(conn: Reader) -> list[Problem]:
    """All of them, by kind; at most `LIMIT` of each."""
    return [
        *map(_stuck, await compute.stuck(conn, after_s=_PATIENCE_S, limit=LIMIT)),
        *await _orphans(conn),
        *map(_node, await fleet.sick_nodes(conn, skew_max_s=_SKEW_S, limit=LIMIT)),
        *map(_slot, await fleet.sick_slots(conn, limit=LIMIT)),
        *await _tasks(conn),
        *await _events(conn),
        *await _conditions(conn),
        *map(_payment, await inbox.held(conn, limit=LIMIT)),
    ]


def _stuck(found: Stuck) -> Problem:
    kind, repair = {
        "requested": ("waiting", "add capacity, raise the SKU's supply, or `penstock alloc release {id}`"),
        "release_failed": ("release_failed", "penstock alloc release {id}"),
    }.get(found.state, (f"late_{found.state}", "penstock alloc release {id}"))
    return Problem(
        kind=kind,
        id=found.id,
        since=found.since,
        reason=found.reason or f"it has been {found.state} past its deadline; is a worker running?",
        repair=repair.format(id=found.id),
    )


async def _orphans(conn: Reader) -> list[Problem]:
    units = await compute.without_allocation(conn, after_s=_REPORT_S, limit=LIMIT)
    lonely = await compute.without_unit(conn, after_s=_REPORT_S, limit=LIMIT)
    return [
        *(
            Problem(
                kind="orphan_unit",
                id=orphan.unit_id,
                since=None,
                reason=f"it runs on {orphan.node_id} and no allocation owns it; the worker has asked for its stop",
                repair=f"penstock node tasks {orphan.node_id}",
            )
            for orphan in units
        ),
        *(
            Problem(
                kind="orphan_allocation",
                id=found.id,
                since=found.since,
                reason=f"it is active and {found.node_id} reports no unit for it",
                repair=f"penstock alloc release {found.id}",
            )
            for found in lonely
        ),
    ]


def _node(found: SickNode) -> Problem:
    if found.trouble:
        return Problem(
            kind="node_troubled",
            id=found.id,
            since=None,
            reason=f"{found.name} begins nothing new: {found.trouble}",
            repair="free space on the host's disk; the runbook full-disk.md says what goes on by itself",
        )
    reason = found.reason or f"{found.name} is {found.state}"
    repair = {
        "unreachable": f"start its agent or mend its network; or `penstock node recover {found.id}`",
        "lost": f"penstock node recover {found.id}, or penstock node retire {found.id}",
        "pending": f"run the command of `penstock node enroll {found.name}` on the host",
        "enrolled": "start its agent: it has enrolled and never connected",
    }.get(found.state)
    if repair is None:
        reason = f"the clock of {found.name} is off by {found.skew_s or 0:.0f} s"
        repair = "set the host's clock; nothing is counted by it, its logs are dated by it"
    return Problem(kind=f"node_{found.state}", id=found.id, since=found.since, reason=reason, repair=repair)


def _slot(found: SickSlot) -> Problem:
    repair = {
        "cleanup_blocked": f"penstock node force-cleanup {found.node_id} {found.id} --verified",
        "quarantined": f"penstock node gpu return {found.node_id} {found.gpu_uuid}",
        "missing": f"look at the host; penstock node show {found.node_id}",
    }.get(found.health, f"penstock node show {found.node_id}")
    return Problem(
        kind=f"slot_{found.health}",
        id=found.id,
        since=found.since,
        reason=found.reason or f"GPU {found.gpu_uuid} is {found.health}",
        repair=repair,
    )


async def _tasks(conn: Reader) -> Iterator[Problem]:
    found = await fleet.old_tasks(conn, older_than_s=_PATIENCE_S, limit=LIMIT)
    return (
        Problem(
            kind="task_unanswered",
            id=task.id,
            since=task.since,
            reason=f"{task.node_id} has not answered {task.type} ({task.state}, tried {task.attempts} times)",
            repair=f"penstock node tasks {task.node_id}; restart the node's agent: its units go on",
        )
        for task in found
    )


def _payment(found: Received) -> Problem:
    return Problem(
        kind="provider_event_held",
        id=found.event_id,
        since=found.received_at,
        reason=f"{found.type} of {found.provider}: {found.reason}",
        repair=f"penstock billing provider-events show {found.event_id}; then accept or discard it",
    )


async def _events(conn: Reader) -> list[Problem]:
    problems = [
        Problem(
            kind="dead_letter",
            id=letter.event_id,
            since=letter.occurred_at,
            reason=f"{letter.type}: {letter.last_error}",
            repair=f"penstock dead-letters requeue {letter.event_id}",
        )
        for letter in await deadletters.list_dead(conn, limit=LIMIT)
    ]
    since = await oldest_waiting(conn, older_than_s=_PATIENCE_S)
    if since is not None:
        reason = "events wait to be published; is a relay running, and does it reach NATS?"
        problems.append(
            Problem(kind="relay_behind", id="relay", since=since, reason=reason, repair="penstock serve relay")
        )
    return problems


async def _conditions(conn: Reader) -> Iterator[Problem]:
    found = await conditions.standing(conn, limit=LIMIT)
    return (
        Problem(kind=each.kind, id=each.id, since=each.since, reason=each.reason, repair=each.repair) for each in found
    )
