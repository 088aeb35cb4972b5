"""Has nodes resolve requirements: each resolution under way is asked of one node, and of another if that one cannot.

The row is the truth and the loop takes no input: a hint or a timer only wakes it. Any number of workers run it.
Projects take turns, and a node is asked only as much as it does at once, so that nobody's many hold up the others.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Final

from penstock.compute import lockcheck
from penstock.compute.model import Resolution
from penstock.compute.service import resolutions
from penstock.fleet import nodes
from penstock.fleet.model import TaskOutcome, TaskState
from penstock.fleet.tasks import Tasks
from penstock.kit.db import Database, Tx
from penstock.kit.parsing import parse
from penstock.kit.telemetry import correlated, logger
from penstock.wire import locks
from penstock.wire.tasks import RESOLUTIONS_MAX, RUNTIME_RESOLVE, RuntimeResolve, RuntimeResolved

_log = logger(__name__)
_BATCH: Final = 50
_TASK_S: Final = 180.0
#: So long it is waited for a node that answers.
_NODE_S: Final = 30.0
_NODES_MAX: Final = 3
#: The node's own trouble: another node may do better.
_ELSEWHERE: Final = frozenset({"no_installer", "unknown_image", "internal", "expired", "disk_full"})
_NO_NODE: Final = "no node is there to resolve packages; `penstock fleet` shows the nodes"
_NO_OTHER: Final = "no other node is there to try"
_BAD_LOCK: Final = "bad_lock"


@dataclass(frozen=True, slots=True)
class Resolving:
    """Drives what is under way."""

    db: Database
    tasks: Tasks

    async def sweep(self) -> None:
        """One step for each."""
        async with self.db.transaction() as tx:
            for one in await resolutions.take_running(tx, limit=_BATCH):
                with correlated(one.correlation_id):
                    await self._advance(tx, one)
        async with self.db.transaction() as tx:
            room = Counter(dict.fromkeys(await nodes.answering(tx), RESOLUTIONS_MAX))
            room.subtract(await resolutions.loads(tx))
            for one in await resolutions.take_queued(tx, limit=_BATCH):
                with correlated(one.correlation_id):
                    await self._ask(tx, one, room)

    async def _advance(self, tx: Tx, one: Resolution) -> None:
        assert one.task_id is not None
        outcome = await self.tasks.outcome(tx, one.task_id)
        if outcome is None:
            return
        if outcome.succeeded:
            await _take_over(tx, one, outcome.decode(RuntimeResolved))
        elif _is_the_nodes(outcome):
            await _elsewhere(tx, one, outcome.error_code or outcome.state, outcome.detail)
        else:
            await _fail(tx, one, outcome.error_code or outcome.state, outcome.detail)

    async def _ask(self, tx: Tx, one: Resolution, room: Counter[str]) -> None:
        candidates = sorted(room.keys() - set(one.nodes_tried))
        if not candidates:
            await _nowhere(tx, one)
            return
        free = [node_id for node_id in candidates if room[node_id] > 0]
        if not free:
            return
        node_id = random.choice(free)
        room[node_id] -= 1
        task_id = await self.tasks.dispatch(
            tx,
            node_id=node_id,
            type=RUNTIME_RESOLVE,
            allocation_id=None,
            fence=0,
            params=RuntimeResolve(base=one.base, requirements=one.requirements),
            dedupe_key=f"resolve/{one.id}/{len(one.nodes_tried)}",
            expires_s=_TASK_S,
        )
        await resolutions.run(tx, one, node_id=node_id, task_id=task_id)


def _is_the_nodes(outcome: TaskOutcome) -> bool:
    return outcome.state in (TaskState.REFUSED, TaskState.EXPIRED) or outcome.error_code in _ELSEWHERE


async def _take_over(tx: Tx, one: Resolution, answer: RuntimeResolved) -> None:
    """The lock, if it is one of these requirements: a node is not trusted with that."""
    try:
        lock = await parse(len(answer.lock), locks.unpack, answer.lock)
        await parse(len(lock), lockcheck.check, one.requirements, lock, answer.python)
    except (locks.BadLock, lockcheck.Unmet) as error:
        _log.warning("lock_refused", resolution_id=one.id, node_id=one.nodes_tried[-1], reason=str(error))
        await _elsewhere(tx, one, _BAD_LOCK, f"the node's lock is not of these requirements: {error}")
        return
    await resolutions.succeed(tx, one, lock=lock, python=answer.python)


async def _elsewhere(tx: Tx, one: Resolution, code: str, error: str) -> None:
    """Ask another node, unless enough were asked. The reason is kept: there may be no other."""
    if len(one.nodes_tried) < _NODES_MAX:
        await resolutions.queue_again(tx, one, code=code, error=error or code)
    else:
        await _fail(tx, one, code, error)


async def _nowhere(tx: Tx, one: Resolution) -> None:
    if one.nodes_tried:
        await _fail(tx, one, one.error_code, f"{one.error}; {_NO_OTHER}")
    elif await resolutions.is_older(tx, one, _NODE_S):
        await _fail(tx, one, "no_node", _NO_NODE)


async def _fail(tx: Tx, one: Resolution, code: str, error: str) -> None:
    _log.info("resolution_failed", resolution_id=one.id, project_id=one.project_id, code=code)
    await resolutions.fail(tx, one, code=code, error=error or code)
