"""An activator on real Postgres and NATS, with allocations that are only names and sidecars that are played."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec

from conftest import Servers, fresh_database
from integration.serverless.sidecars import fresh_streams
from penstock.kit import bus, db
from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.clock import utc_now
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Kind, PenstockError, Unavailable
from penstock.kit.ids import new_id
from penstock.kit.process import every
from penstock.kit.pull import Pull
from penstock.processes import activator
from penstock.processes.activator import Parts, compose
from penstock.serverless import streams
from penstock.serverless.model import Invocation, Limits, Order
from penstock.serverless.service.calls import Calls
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.service.proofs import Keys, proof
from penstock.serverless.service.telling import Teller
from penstock.wire import subjects
from penstock.wire.rest import FunctionPut, InvocationAck, InvocationRequest
from penstock.wire.serverless import (
    MAC_HEADER,
    FailureClass,
    InvocationResultMessage,
    MetricType,
    Mode,
    Reference,
    Result,
    State,
    WorkerDispatchMessage,
    WorkerMetricMessage,
)

LIMITS = Limits(lease_s=3, create_again_s=0.05, create_again_max_s=0.2, sync_wait_s=10)


class Full(PenstockError):
    """Others would have to leave."""

    kind = Kind.EXHAUSTED
    code = "full"


class Names:
    """Allocations as names (the Protocol `Pool`)."""

    def __init__(self) -> None:
        self.orders: dict[str, Order] = {}
        self.released: dict[str, str] = {}
        self.refusal: PenstockError | None = None
        #: How many there can be at a time.
        self.room = 1000

    async def create(self, tx: Tx, order: Order) -> str:
        if self.refusal is not None:
            raise self.refusal
        if len(self.orders) - len(self.released) >= self.room:
            raise Full("out of capacity: all GPUs are taken")
        allocation_id = new_id("alc")
        self.orders[allocation_id] = order
        return allocation_id

    async def release(self, tx: Tx, allocation_id: str, reason: str) -> None:
        self.released.setdefault(allocation_id, reason)

    async def over(self, conn: Reader, allocation_ids: Sequence[str]) -> dict[str, str]:
        return {each: self.released[each] for each in allocation_ids if each in self.released}


class Shelf:
    """Bytes in memory (the Protocol `Bytes`)."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], bytes] = {}

    async def keep(self, project_id: str, key: str, chunks: AsyncIterator[bytes], *, bytes_max: int) -> Reference:
        body = b"".join([chunk async for chunk in chunks])
        self.kept[project_id, key] = body
        return Reference(key=key, bytes=len(body), sha256=hashlib.sha256(body).hexdigest())

    async def open(self, project_id: str, key: str) -> tuple[int, AsyncIterator[bytes]]:
        body = self.kept[project_id, key]

        async def once() -> AsyncIterator[bytes]:
            yield body

        return len(body), once()

    async def drop(self, project_id: str, key: str) -> None:
        self.kept.pop((project_id, key), None)


Handler = Callable[[WorkerDispatchMessage], Awaitable[Any]]


async def echo(dispatch: WorkerDispatchMessage) -> Any:
    """Answers with what it was given."""
    return msgspec.json.decode(dispatch.payload)


@dataclass
class Played:
    """A worker whose sidecar is played through our own connection."""

    stage: "Stage"
    name: str
    allocation_id: str
    key: bytes
    request: str
    function: str
    project_id: str
    slots: int
    handler: Handler = echo
    ran: list[tuple[str, int]] = field(default_factory=list)
    has: list[tuple[str, int]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    beating: bool = True
    token: str = ""

    async def run(self) -> None:
        await self.report(MetricType.REGISTERED)
        self._begin(self._beat())
        async with Pull(self.stage.bus, stream=streams.WORK, consumer=self.name, batch=max(2, self.slots)) as pull:
            while True:
                for message in await pull.take(16):
                    subject, body = message.subject, message.data
                    expected = "sha256=" + hmac.digest(self.key, subject.encode() + b"\0" + body, "sha256").hex()
                    assert (message.headers or {})[MAC_HEADER] == expected
                    self._begin(self._attempt(msgspec.json.decode(body, type=WorkerDispatchMessage)))
                    await message.ack()

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _beat(self) -> None:
        while self.beating:
            await asyncio.sleep(0.5)
            if self.beating:
                await self.report(MetricType.HEARTBEAT, attempts=list(self.has))

    async def _attempt(self, dispatch: WorkerDispatchMessage) -> None:
        attempt = (dispatch.invocationID, dispatch.attempt)
        self.ran.append(attempt)
        self.has.append(attempt)
        try:
            body = await self.handler(dispatch)
            await self.result(dispatch, body=body)
        except Exception as error:
            await self.result(
                dispatch,
                state=State.FAILED,
                statusCode=500,
                failureClass=FailureClass.HANDLER_ERROR,
                error=str(error),
                errorType=type(error).__name__,
            )
        finally:
            self.has.remove(attempt)

    async def report(self, kind: MetricType, **more: Any) -> None:
        message = WorkerMetricMessage(
            version="v1",
            serverlessRequestID=self.function,
            workerName=self.name,
            workerNamespace=self.project_id,
            eventType=kind,
            reportedAt=utc_now(),
            projectID=self.project_id,
            **more,
        )
        message = msgspec.structs.replace(message, proof=proof(self.key, message))
        await self.stage.publish(subjects.metrics(self.request), message)

    async def result(self, dispatch: WorkerDispatchMessage, *, body: Any = None, **more: Any) -> None:
        await self.stage.publish(subjects.result(self.request), result_of(dispatch, body=body, **more))


def result_of(dispatch: WorkerDispatchMessage, *, body: Any = None, **more: Any) -> InvocationResultMessage:
    """What a sidecar says of an attempt."""
    given = {
        "version": "v1",
        "invocationID": dispatch.invocationID,
        "serverlessRequestID": dispatch.serverlessRequestID,
        "mode": dispatch.mode,
        "state": State.SUCCEEDED,
        "workerName": dispatch.workerName,
        "workerNamespace": dispatch.workerNamespace,
        "statusCode": 200,
        "startedAt": utc_now(),
        "completedAt": utc_now(),
        "projectID": dispatch.projectID,
        "attempt": dispatch.attempt,
        "token": dispatch.token,
        "body": msgspec.Raw(msgspec.json.encode(body)),
        "durationMs": 5,
        **more,
    }
    return InvocationResultMessage(**given)


class Stage:
    """Everything of one test."""

    def __init__(self, database: Database, connected: Bus) -> None:
        self.db = database
        self.bus = connected
        self.pool = Names()
        self.shelf = Shelf()
        self.keys = Keys(database)
        self.teller = Teller(connected, self.keys)
        self.parts: Parts = compose(database, database, connected, self.keys, self.teller, self.pool, LIMITS)  # pyright: ignore[reportArgumentType]
        self.invoker = Invoker(database, connected, self.shelf, LIMITS)
        self.workers: dict[str, Played] = {}
        self.handler: Handler = echo
        self.plays = True
        self._tasks: asyncio.TaskGroup | None = None
        self._playing: list[asyncio.Task[None]] = []

    def playing(self) -> "set[asyncio.Task[None]]":
        """What played sidecars do."""
        return {*self._playing, *(task for played in self.workers.values() for task in played.tasks)}

    async def reset(self) -> None:
        """Everything as at the beginning, for the next test of a module that shares a stage."""
        self.handler, self.plays = echo, False
        await _end(self.playing())
        for _ in range(20):
            # Loops that run may be in the way, or be told that we are.
            with suppress(Unavailable):
                await self.value(
                    "truncate serverless.functions, serverless.invocations, serverless.dead_letters,"
                    " serverless.outputs cascade"
                )
                break
        self._playing.clear()
        self.workers.clear()
        self.pool.__init__()
        self.parts.ingress.forget()
        self.invoker._functions.clear()  # pyright: ignore[reportPrivateUsage]
        self.plays = True

    async def publish(self, subject: str, message: msgspec.Struct) -> None:
        """As a sidecar does."""
        headers = {"Nats-Msg-Id": secrets.token_hex(8)}
        await self.bus.js.publish(subject, msgspec.json.encode(message), headers=headers)

    async def run(self, tasks: asyncio.TaskGroup, parts: Parts | None = None) -> None:
        """An activator's loops; another one with `parts` of its own."""
        await activator._consume(tasks, self.bus, parts or self.parts)  # pyright: ignore[reportPrivateUsage]
        await activator._watch(tasks, self.bus, self.db, parts or self.parts)  # pyright: ignore[reportPrivateUsage]
        if parts is None:
            self._tasks = tasks
            tasks.create_task(every(0.01, self._play, name="play"))

    async def _play(self) -> None:
        """Start a played sidecar for each worker that was made."""
        if not self.plays or self._tasks is None:
            return
        for allocation_id, order in list(self.pool.orders.items()):
            if order.worker in self.workers or allocation_id in self.pool.released:
                continue
            async with self.db.transaction() as tx:
                from penstock.serverless.service import workers

                if not await tx.fetchval("select 1 from serverless.workers where id = $1", order.worker):
                    continue
                keys = await workers.new_keys(tx, allocation_id)
            played = Played(
                self,
                order.worker,
                allocation_id,
                keys.mac_key,
                order.request,
                order.function,
                order.project_id,
                order.definition.concurrency,
                handler=self.handler,
                token=keys.token,
            )
            self.workers[order.worker] = played
            self._playing.append(self._tasks.create_task(_quietly(played.run())))

    async def define(self, name: str = "f", *, project_id: str = "prj_default", **definition: Any) -> str:
        """A function, as a deployment makes it; its id."""
        body = FunctionPut(sku="sim", **definition)
        function_id = new_id("fun")
        async with self.db.transaction() as tx:
            await tx.execute(
                "insert into serverless.functions (id, project_id, organisation_id, name, current_version,"
                " serving_version, created_by, created_kind)"
                " values ($1, $2, 'org_default', $3, 1, 1, 'usr_default', 'user')",
                function_id,
                project_id,
                name,
            )
            await self.add_version(tx, function_id, 1, body)
            tx.hint(subjects.FUNCTIONS, function_id.encode())
        return function_id

    async def add_version(self, tx: Tx, function_id: str, number: int, body: FunctionPut) -> None:
        """A version's row."""
        await tx.execute(
            "insert into serverless.versions (function_id, number, definition, digest, slots, tasks_per_worker,"
            " workers_min, workers_max, idle_s, requests_min, timeout_s, retries, retry_for, retry_delay_s, created_by)"
            " values ($1, $2, $3, '', $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, 'usr_default')",
            function_id,
            number,
            msgspec.to_builtins(body),
            body.concurrency,
            body.tasks_per_worker or body.concurrency,
            body.workers_min,
            body.workers_max,
            body.idle_s,
            body.requests_min,
            body.timeout_s,
            body.retries,
            list(body.retry_for),
            body.retry_delay_s,
        )

    async def invoke(
        self, name: str = "f", *, project_id: str = "prj_default", **request: Any
    ) -> InvocationAck | Result:
        """As the source's route does."""
        payload = msgspec.Raw(msgspec.json.encode(request.pop("payload", None)))
        body = InvocationRequest(serverlessRequestID=name, payload=payload, **request)
        return await self.invoker.invoke(caller(project_id), body)

    async def call(self, name: str = "f", **request: Any) -> Result:
        """A sync invocation that ends in time."""
        answer = await self.invoke(name, mode=Mode.SYNC, **request)
        assert isinstance(answer, Result), answer
        return answer

    async def spawn(self, name: str = "f", **request: Any) -> str:
        """An async one; its id."""
        answer = await self.invoke(name, **request)
        assert isinstance(answer, InvocationAck)
        return answer.invocationID

    async def find(self, invocation_id: str, *, project_id: str = "prj_default") -> Invocation:
        """The row."""
        found = await self.invoker.find(project_id, invocation_id)
        assert found is not None
        return found

    async def ended(self, invocation_id: str, *, project_id: str = "prj_default") -> Invocation:
        """The row when it has ended."""
        await until(lambda: self._has_ended(invocation_id, project_id))
        return await self.find(invocation_id, project_id=project_id)

    async def _has_ended(self, invocation_id: str, project_id: str) -> bool:
        return (await self.find(invocation_id, project_id=project_id)).ended

    async def value(self, query: str, *args: object) -> Any:
        """One value of the database."""
        async with self.db.read() as conn:
            return await conn.fetchval(query, *args)


def caller(project_id: str = "prj_default") -> Caller:
    """A developer of a project."""
    return Caller(
        principal_id="usr_default",
        principal_kind="user",
        display_name="",
        organisation_id="org_default",
        project_id=project_id,
        role="developer",
        actions=frozenset({"functions.invoke"}),
    )


async def until(check: Callable[[], Awaitable[object]], *, timeout_s: float = 20.0) -> None:
    """Wait until the check is true."""
    async with asyncio.timeout(timeout_s):
        while not await check():
            await asyncio.sleep(0.01)


async def _end(tasks: "set[asyncio.Task[None]]") -> None:
    """Cancel them until they have ended: what a task waits for may swallow a cancellation."""
    while tasks:
        for task in tasks:
            task.cancel()
        _, tasks = await asyncio.wait(tasks, timeout=0.1)


async def _quietly(work: Awaitable[None]) -> None:
    with suppress(Exception):
        await work


@asynccontextmanager
async def shared(servers: Servers) -> AsyncIterator[Stage]:
    """A stage on a database of its own, for all tests of a module."""
    async with (
        fresh_database(servers) as url,
        bus.connect(servers.nats_url, name="test") as connected,
        db.connect(url, connected.hint, name="test") as database,
        staged(database, connected) as made,
    ):
        yield made


@asynccontextmanager
async def staged(database: Database, connected: Bus) -> AsyncIterator[Stage]:
    """A stage with fresh streams and one activator that runs."""
    await fresh_streams(connected)
    stage = Stage(database, connected)
    await stage.invoker.start()
    calls = Calls(database, connected, stage.invoker, stage.teller, stage.keys)
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.object(activator, "_SWEEP_S", 0.2))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        tasks.create_task(calls.run())
        holder = tasks.create_task(_hold(stage, tasks))
        while stage._tasks is None:
            await asyncio.sleep(0.005)
        try:
            yield stage
        finally:
            await _end({holder, *getattr(tasks, "_tasks", ())})
            await _end(stage.playing())


async def _hold(stage: Stage, tasks: asyncio.TaskGroup) -> None:
    await stage.run(tasks)
    await asyncio.Event().wait()
