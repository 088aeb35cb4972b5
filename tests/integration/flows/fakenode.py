"""A node for tests: it plays the agent on the fleet's own functions, in this process, with units that are only names.

Like the real agent it remembers what it did for a task and answers the same again, and refuses lower fences.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from penstock.fleet import tasks
from penstock.fleet.model import Config
from penstock.fleet.ports import UNHEARD, Handoffs
from penstock.fleet.store import tasks as task_rows
from penstock.fleet.store.tasks import Want
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.ids import new_id
from penstock.wire import subjects
from penstock.wire.link import TaskResult
from penstock.wire.tasks import (
    GPU_PROBE,
    RUNTIME_BUILD,
    UNIT_HANDOFF,
    UNIT_START,
    UNIT_STOP,
    CleanupProof,
    GpuProbe,
    GpuProbed,
    Outcome,
    RuntimeBuild,
    RuntimeBuilt,
    TaskBody,
    UnitHandoff,
    UnitStart,
    UnitStarted,
    UnitStop,
)

Answer = tuple[Outcome, msgspec.Struct | None, str]


@dataclass
class FakeNode:
    """`units` is what runs, `tenants` who was given which stock; `effects` is what was done, in order. `before` may
    hold a task up or spoil it."""

    db: Database
    node_id: str
    units: set[str] = field(default_factory=set)
    tenants: dict[str, str] = field(default_factory=dict)
    effects: list[tuple[str, str]] = field(default_factory=list)
    before: Callable[[TaskBody], Awaitable[Answer | None]] | None = None
    #: Of what fails.
    error_code: str = "broken"
    dirty: bool = False
    deaf: bool = False
    handoffs: Handoffs = UNHEARD
    _journal: dict[str, TaskResult] = field(default_factory=dict)
    _fences: dict[str, int] = field(default_factory=dict)
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _link_id: str = field(default_factory=lambda: new_id("lnk"))

    @asynccontextmanager
    async def running(self, bus: Bus) -> AsyncIterator["FakeNode"]:
        """Take tasks until the end."""
        async with self.db.transaction() as tx:
            await tx.execute(
                "insert into fleet.certificates (serial, node_id, not_after) values ($1, $2, now() + interval '1 day')"
                " on conflict do nothing",
                self._link_id,
                self.node_id,
            )
            await tx.execute(
                "insert into fleet.links (node_id, link_id, gateway_id, address, serial) values ($1, $2, 'g', 'a', $2)"
                " on conflict do nothing",
                self.node_id,
                self._link_id,
            )
            await task_rows.free_leases(tx, self.node_id)
        await bus.on_hint(subjects.node(self.node_id), self._wake)
        loop = asyncio.create_task(self._serve())
        try:
            yield self
        finally:
            loop.cancel()
            with suppress(asyncio.CancelledError):
                await loop

    async def _wake(self, _: str, __: bytes) -> None:
        self._woken.set()

    async def _serve(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                self._woken.clear()
                if not self.deaf:
                    async with self.db.transaction() as tx:
                        leased = await tasks.lease(tx, [Want(self.node_id, self._link_id, 16)], Config())
                    for task in leased.get(self._link_id, []):
                        group.create_task(self._run(task.signed.body))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), 0.05)

    async def _run(self, raw: bytes) -> None:
        body = msgspec.msgpack.decode(raw, type=TaskBody)
        if body.task_id not in self._journal:
            self._journal[body.task_id] = await self._perform(body)
        async with self.db.transaction() as tx:
            await tasks.commit_result(tx, self.node_id, self._journal[body.task_id], self.handoffs)

    async def _perform(self, body: TaskBody) -> TaskResult:
        outcome, answer, detail = (await self.before(body) if self.before else None) or self._effect(body)
        return TaskResult(
            task_id=body.task_id,
            fence=body.fence,
            outcome=outcome,
            answer=msgspec.Raw(msgspec.msgpack.encode(answer)),
            error_code="" if outcome is Outcome.SUCCEEDED else self.error_code,
            detail=detail,
        )

    def _effect(self, body: TaskBody) -> Answer:
        if body.type == GPU_PROBE:
            gpu_uuid = msgspec.msgpack.decode(body.params, type=GpuProbe).gpu_uuid
            return Outcome.SUCCEEDED, GpuProbed(gpu_uuid=gpu_uuid, passed=True), ""
        owner = body.allocation_id or ""
        if body.fence < self._fences.get(owner, 0):
            return Outcome.REFUSED, None, "stale fence"
        self._fences[owner] = body.fence
        if body.type == RUNTIME_BUILD:
            wanted = msgspec.msgpack.decode(body.params, type=RuntimeBuild).runtime
            self.effects.append(("build", wanted.digest))
            return Outcome.SUCCEEDED, RuntimeBuilt(digest=wanted.digest, bytes=1, seconds=0.0), ""
        if body.type == UNIT_START:
            return self._start(msgspec.msgpack.decode(body.params, type=UnitStart))
        if body.type == UNIT_HANDOFF:
            return self._hand_over(msgspec.msgpack.decode(body.params, type=UnitHandoff))
        assert body.type == UNIT_STOP
        return self._stop(msgspec.msgpack.decode(body.params, type=UnitStop))

    def _start(self, params: UnitStart) -> Answer:
        self.effects.append(("start", params.unit_id))
        self.units.add(params.unit_id)
        return Outcome.SUCCEEDED, UnitStarted(unit_id=params.unit_id, pid=1), ""

    def _hand_over(self, params: UnitHandoff) -> Answer:
        if params.unit_id not in self.units:
            return Outcome.FAILED, None, "no such unit"
        if self.tenants.setdefault(params.unit_id, params.allocation_id) != params.allocation_id:
            return Outcome.FAILED, None, "taken"
        self.effects.append(("handoff", params.unit_id))
        return Outcome.SUCCEEDED, UnitStarted(unit_id=params.unit_id, pid=1), ""

    def _stop(self, params: UnitStop) -> Answer:
        self.effects.append(("stop", params.unit_id))
        self.units.discard(params.unit_id)
        proof = CleanupProof(
            unit_id=params.unit_id,
            processes_gone=True,
            cgroup_empty=True,
            scratch_deleted=True,
            gpu_idle=not self.dirty,
            memory_scrubbed=True,
            simulated=True,
        )
        return Outcome.SUCCEEDED, proof, ""
