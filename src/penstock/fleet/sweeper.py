"""The fleet's timers, for the worker process: any number of them may run at once. Database time decides."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.fleet import metrics
from penstock.fleet.model import ANSWERING, RETURNS, Config, Node, NodeEvent, NodeState, TaskState
from penstock.fleet.store import certificates
from penstock.fleet.store import gpus as gpu_rows
from penstock.fleet.store import links as link_rows
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.store import tasks as task_rows
from penstock.kit.db import Database, Tx
from penstock.kit.process import every
from penstock.wire import subjects

BATCH: Final = 200
_PRUNE_S: Final = 60.0


class Sweeper:
    """Notices silence and returns, ends tasks whose time is over, and forgets what is old."""

    def __init__(self, db: Database, config: Config) -> None:
        self._db = db
        self._config = config

    async def run(self) -> None:
        """Sweep for ever."""
        pace_s = min(2.0, self._config.heartbeat_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(every(pace_s, self.sweep_nodes, name="fleet_nodes"))
            group.create_task(every(1.0, self.sweep_tasks, name="fleet_tasks"))
            group.create_task(every(_PRUNE_S, self.prune, name="fleet_prune"))

    async def sweep_nodes(self) -> None:
        """Silent nodes become unreachable and then lost; those that answer again are what they were wished to be."""
        await self._in_batches(self._silent)
        await self._in_batches(self._given_up)
        await self._in_batches(self._returned)

    async def _in_batches(self, batch: Callable[[Tx], Awaitable[list[Node]]]) -> None:
        while True:
            async with self._db.transaction() as tx:
                moved = await batch(tx)
                for node in moved:
                    tx.hint(subjects.node(node.id))
            if len(moved) < BATCH:
                return

    async def _silent(self, tx: Tx) -> list[Node]:
        silence_s = self._config.unreachable_after_s
        silent = await node_rows.lock_silent(tx, list(ANSWERING), after_s=silence_s, limit=BATCH)
        reason = f"no heartbeat for {silence_s:g} s"
        return [await node_rows.move(tx, node, NodeEvent.FALL_SILENT, reason) for node in silent]

    async def _given_up(self, tx: Tx) -> list[Node]:
        """Only those that could have been heard: after an outage of all gateways nodes get their time anew."""
        silence_s = self._config.lost_after_s
        if not await link_rows.listened(tx, for_s=silence_s):
            return []
        silent = await node_rows.lock_silent(tx, [NodeState.UNREACHABLE], after_s=silence_s, limit=BATCH)
        reason = f"no heartbeat for {silence_s:g} s"
        return [await node_rows.move(tx, node, NodeEvent.GIVE_UP, reason) for node in silent]

    async def _returned(self, tx: Tx) -> list[Node]:
        back = await node_rows.lock_back(tx, within_s=self._config.unreachable_after_s, limit=BATCH)
        if back:
            tx.hint(subjects.CAPACITY)
        return [await node_rows.move(tx, node, RETURNS[node.desired], "") for node in back]

    async def sweep_tasks(self) -> None:
        """End what was not done in time, and count what is open."""
        while True:
            async with self._db.transaction() as tx:
                expired = await task_rows.expire(tx, limit=BATCH)
                for task_id in expired:
                    tx.hint(subjects.task_done(task_id))
            if len(expired) < BATCH:
                break
        async with self._db.read() as conn:
            counts = await task_rows.count_open(conn)
        for state in (TaskState.QUEUED, TaskState.LEASED):
            metrics.TASKS.labels(state.value).set(counts.get(state.value, 0))

    async def prune(self) -> None:
        """Forget unused tokens, and tasks and certificates that ended long ago."""
        async with self._db.transaction() as tx:
            await certificates.delete_expired_tokens(tx)
            await certificates.delete_old(tx, older_than_s=self._config.history_s)
            await task_rows.delete_old(tx, older_than_s=self._config.history_s, limit=10_000)
            await gpu_rows.delete_old(tx, older_than_s=self._config.history_s)
        async with self._db.read() as conn:
            counts = await node_rows.count_states(conn)
        for state in NodeState:
            metrics.NODES.labels(state.value).set(counts.get(state.value, 0))
