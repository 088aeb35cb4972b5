"""Node tasks: signed when dispatched, leased to the node's link, and finished by one result.

Only the first result of a task under the allocation's current fence counts; every other is told what it is and changes
nothing. A dispatch under a higher fence ends all open tasks of the allocation under lower ones.
"""

import re
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Final

import msgspec

from penstock.fleet import inventory, metrics
from penstock.fleet.errors import StaleFence, TaskTooBig
from penstock.fleet.model import OPEN_TASKS, Config, Task, TaskOutcome, TaskState
from penstock.fleet.pki import TaskSigner
from penstock.fleet.ports import UNHEARD, Handoffs
from penstock.fleet.store import links as link_rows
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.store import tasks as task_rows
from penstock.fleet.store.tasks import Leased, NewTask, Want
from penstock.kit import audit
from penstock.kit.audit import Actor
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id
from penstock.wire import subjects
from penstock.wire.link import ResultVerdict, TaskResult
from penstock.wire.tasks import (
    PARAMS,
    RUNTIME_BUILD,
    TOPOLOGY_DISCOVER,
    UNIT_HANDOFF,
    UNIT_START,
    Inventory,
    Outcome,
    TaskBody,
    UnitStarted,
)
from penstock.wire.unreadable import UNREADABLE

BODY_BYTES_MAX: Final = 192 << 10
#: So many tasks in one frame at most: with the limit above they fit into it.
BATCH_MAX: Final = 16
#: Tasks that run nothing of a tenant's: two nodes may do them for one allocation.
_HARMLESS: Final = (RUNTIME_BUILD,)
_CODE: Final = re.compile(r"[^a-z0-9_.]")
_DETAIL_MAX: Final = 2000


class Tasks:
    """Dispatches tasks and answers how they ended."""

    def __init__(self, signer: TaskSigner) -> None:
        self._signer = signer

    async def dispatch(
        self,
        tx: Tx,
        *,
        node_id: str,
        type: str,  # noqa: A002 (the word on the wire)
        allocation_id: str | None,
        fence: int,
        params: msgspec.Struct,
        dedupe_key: str,
        expires_s: float,
    ) -> str:
        """Queue a task for the node and return its id; once per `dedupe_key`, whatever the other arguments say."""
        if not isinstance(params, PARAMS[type][0]):
            raise Invalid(f"{type} takes {PARAMS[type][0].__name__}", field="params")
        ready = await task_rows.prepare(tx, dedupe_key, allocation_id, fence)
        if ready.repeated is not None:
            return ready.repeated
        if ready.fence > fence:
            raise StaleFence(f"the fence is {ready.fence}, the task has {fence}", allocation_id=allocation_id)
        if allocation_id is not None and not ready.first:
            for ended in await task_rows.fence_off(tx, allocation_id, fence):
                tx.hint(subjects.task_done(ended))
        body = TaskBody(
            task_id=new_id("tsk"),
            node_id=node_id,
            type=type,
            allocation_id=allocation_id,
            fence=fence,
            expires_at=ready.at + timedelta(seconds=expires_s),
            correlation_id=correlation_id(),
            params=msgspec.Raw(msgspec.msgpack.encode(params)),
        )
        tx.hint(subjects.node(node_id))
        return await task_rows.insert(tx, self._signed(body, dedupe_key))

    def _signed(self, body: TaskBody, dedupe_key: str) -> NewTask:
        encoded = msgspec.msgpack.encode(body)
        if len(encoded) > BODY_BYTES_MAX:
            raise TaskTooBig(f"the task has {len(encoded)} bytes, max {BODY_BYTES_MAX}", field="params")
        return NewTask(
            id=body.task_id,
            node_id=body.node_id,
            type=body.type,
            allocation_id=body.allocation_id,
            fence=body.fence,
            dedupe_key=dedupe_key,
            signed=self._signer.sign(encoded),
            correlation_id=body.correlation_id,
            expires_at=body.expires_at,
        )

    async def withdraw(self, tx: Tx, task_id: str, *, older_than_s: float, silent_for_s: float) -> bool:
        """Take back a task that its node has not been sent within this time, or whose second execution elsewhere harms
        nobody and whose node is silent; whether that was so. From then on it cannot be sent."""
        return await task_rows.withdraw(
            tx, task_id, older_than_s=older_than_s, harmless=_HARMLESS, silent_for_s=silent_for_s
        )

    async def outcome(self, conn: Reader, task_id: str) -> TaskOutcome | None:
        """How the task ended, or none while it has not."""
        return await task_rows.outcome(conn, task_id)


async def lease(conn: Reader, wants: Sequence[Want], config: Config) -> dict[str, list[Leased]]:
    """What is wanted and there, by link: one statement for many nodes. None for a link that another superseded."""
    leased = await task_rows.lease(conn, wants, lease_s=config.task_lease_s)
    for task in chain.from_iterable(leased.values()):
        metrics.DISPATCH_S.observe(task.waited_s)
    return leased


async def commit_result(tx: Tx, node_id: str, result: TaskResult, handoffs: Handoffs = UNHEARD) -> ResultVerdict:
    """Take a node's result over, or say why not. `handoffs` hears of those in the same transaction."""
    verdict = await _commit(tx, node_id, result, handoffs)
    metrics.RESULTS.labels(verdict.value).inc()
    return verdict


async def _commit(tx: Tx, node_id: str, result: TaskResult, handoffs: Handoffs) -> ResultVerdict:
    sent = await task_rows.lock_sent(tx, result.task_id, node_id)
    if sent is None:
        return ResultVerdict.UNKNOWN_TASK
    if result.fence != sent.fence or sent.fence < sent.fence_now or sent.state is TaskState.EXPIRED:
        return ResultVerdict.STALE_GENERATION
    if sent.state not in OPEN_TASKS:
        return ResultVerdict.DUPLICATE
    state, error_code, detail = _judge(sent.type, result)
    await task_rows.finish(tx, result.task_id, state, answer=bytes(result.answer), error_code=error_code, detail=detail)
    if state is TaskState.REFUSED:
        actor = Actor(id=node_id, kind="node")
        await audit.record(tx, actor, "tasks.refuse", result.task_id, detail={"code": error_code, "detail": detail})
    if state is TaskState.SUCCEEDED and sent.type == TOPOLOGY_DISCOVER:
        await _take_inventory(tx, node_id, msgspec.msgpack.decode(result.answer, type=Inventory))
    if state is TaskState.SUCCEEDED and sent.type in (UNIT_START, UNIT_HANDOFF):
        # Should the node be gone before its next list, it is known what ran there.
        await link_rows.add_unit(tx, node_id, msgspec.msgpack.decode(result.answer, type=UnitStarted).unit_id)
    if sent.type == UNIT_HANDOFF and sent.allocation_id is not None:
        succeeded = state is TaskState.SUCCEEDED
        await handoffs.ended(tx, allocation_id=sent.allocation_id, fence=sent.fence, succeeded=succeeded)
    tx.hint(subjects.task_done(result.task_id))
    return ResultVerdict.APPLIED


async def _take_inventory(tx: Tx, node_id: str, found: Inventory) -> None:
    node = await node_rows.lock(tx, node_id)
    if node is not None:
        await inventory.apply(tx, node, found)


def _judge(task_type: str, result: TaskResult) -> tuple[TaskState, str, str]:
    """A success whose answer is not what the catalogue promises is a failure."""
    code = _CODE.sub("_", result.error_code.lower())[:64]
    detail = result.detail.replace("\x00", "")[:_DETAIL_MAX]
    if result.outcome is not Outcome.SUCCEEDED:
        return TaskState(result.outcome.value), code, detail
    wrong = _answer_problem(task_type, result.answer)
    return (TaskState.FAILED, "malformed_answer", wrong) if wrong else (TaskState.SUCCEEDED, "", detail)


def _answer_problem(task_type: str, answer: msgspec.Raw) -> str:
    expected = PARAMS.get(task_type)
    try:
        decoded = msgspec.msgpack.decode(answer, type=expected[1]) if expected else None
    except (OverflowError, *UNREADABLE) as error:
        return str(error)[:_DETAIL_MAX]
    return (inventory.problem(decoded) or "") if isinstance(decoded, Inventory) else ""


async def page(conn: Reader, caller: Caller, node_id: str, *, before: int, limit: int) -> list[Task]:
    """The node's tasks for an operator, the newest first."""
    caller.require("tasks.read")
    if await node_rows.find(conn, node_id) is None:
        raise missing("node", node_id)
    return await task_rows.page(conn, node_id, before=before, limit=limit)


async def of_request(conn: Reader, correlation_id: str, *, limit: int) -> list[Task]:
    """What nodes were asked on behalf of one request, oldest first. The caller checks who may see it."""
    return await task_rows.of_request(conn, correlation_id, limit=limit)
