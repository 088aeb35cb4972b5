"""Tasks from the control plane: verified, journaled, executed once, answered until the answer is acknowledged.

Nothing is believed for having arrived: the signature is checked over the exact bytes before they are decoded, then
node, type, parameters, expiry (by server time) and fence. Whatever fails a check is refused without any side effect.
What passes is noted on disk before its first effect, and the handlers are idempotent, so an agent that dies anywhere
in between resumes and ends with one effect; a start or handoff that expired meanwhile ends with none. The values of
secrets are asked for just before they are used, and are never noted.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from prometheus_client import Counter, Histogram

from penstock.kit.full import is_full
from penstock.kit.telemetry import correlated, logger, span
from penstock.node.errors import DISK_FULL, Failed, NodeError, Refused
from penstock.node.journal import Begun, Standing
from penstock.node.serverclock import ServerClock
from penstock.node.unit import check_handoff, check_start, check_unit_id
from penstock.wire.link import TaskResult
from penstock.wire.tasks import (
    PARAMS,
    UNIT_STOP,
    Outcome,
    RuntimeBuild,
    RuntimeResolve,
    SignedTask,
    TaskBody,
    UnitHandoff,
    UnitStart,
    UnitStop,
)
from penstock.wire.unreadable import UNREADABLE

_log = logger(__name__)
#: Tasks at work at once; more wait at the gateway.
CONCURRENCY: Final = 64
_BODY_BYTES_MAX: Final = 1 << 20
_DETAIL_CHARS_MAX: Final = 2000
_SECRETS_TIMEOUT_S: Final = 40.0
_done = Counter("penstock_node_tasks_total", "Tasks ended, by type and outcome.", ("type", "outcome"))
_seconds = Histogram("penstock_node_task_seconds", "From arrival to result.", ("type",))

#: Takes the parameters; one whose parameters name secrets also takes their values by name.
Handler = Callable[..., Awaitable[msgspec.Struct]]
#: The values of a task's secrets, by name.
Secrets = Callable[[str], Awaitable[Mapping[str, bytes]]]


class Journal(Protocol):
    """What was told to this node and done; `node.journal` keeps it on disk."""

    async def begin(self, task: TaskBody, signed: SignedTask, *, expired: bool) -> Begun:
        """Note that a task is about to have effects, unless it may not; NodeError if it cannot be noted."""
        ...

    async def finish(self, result: TaskResult) -> None:
        """Note how it ended."""
        ...

    async def unfinished(self) -> list[SignedTask]:
        """What had begun when the agent last ended."""
        ...

    async def unacknowledged(self) -> list[TaskResult]:
        """What no gateway has acknowledged."""
        ...


@dataclass(frozen=True)
class Verified:
    """A task that may be executed, should its time and fence still hold."""

    signed: SignedTask
    body: TaskBody
    params: msgspec.Struct


class Verifier:
    """Decides what this node acts on."""

    def __init__(self, node_id: str, keys: Callable[[], Mapping[str, Ed25519PublicKey]]) -> None:
        self._node_id = node_id
        self._keys = keys

    def verify(self, signed: SignedTask) -> Verified:
        """The task, or Refused."""
        key = self._keys().get(signed.key_id)
        if key is None or len(signed.body) > _BODY_BYTES_MAX:
            raise Refused("bad_signature", f"no key {signed.key_id!r} is trusted here")
        try:
            key.verify(signed.signature, signed.body)
        except InvalidSignature:
            raise Refused("bad_signature", "the signature does not match the task") from None
        body = _decode(signed.body)
        if body.node_id != self._node_id:
            raise Refused("wrong_node", f"the task is for node {body.node_id}")
        if body.type not in PARAMS:
            raise Refused("unknown_type", f"this agent knows no task {body.type!r}")
        return Verified(signed, body, _params(body))


def _decode(content: bytes) -> TaskBody:
    try:
        return msgspec.msgpack.decode(content, type=TaskBody)
    except UNREADABLE as error:
        raise Refused("malformed", f"the task cannot be read: {error}") from error


def _params(body: TaskBody) -> msgspec.Struct:
    try:
        params = msgspec.msgpack.decode(body.params, type=PARAMS[body.type][0])
    except UNREADABLE as error:
        raise Refused("malformed", f"the parameters of {body.type} are wrong: {error}") from error
    if isinstance(params, UnitStart):
        check_start(params)
    if isinstance(params, UnitHandoff):
        check_handoff(params)
    if isinstance(params, UnitStop):
        check_unit_id(params.unit_id)
    return params


class Turns:
    """Locks by name, first come first served, forgotten when nobody holds or wants them."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def take(self, name: str) -> AsyncIterator[None]:
        """Hold the name's lock."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[name][1] - 1
            if users:
                self._locks[name] = (lock, users)
            else:
                del self._locks[name]


async def _no_secrets(task_id: str) -> NoReturn:
    raise Failed("secrets_unavailable", f"nobody here can ask for the secrets of task {task_id}")


class Executor:
    """Runs tasks: many at once, but one unit's in the order they came."""

    def __init__(
        self,
        *,
        verifier: Verifier,
        journal: Journal,
        clock: ServerClock,
        handlers: Mapping[str, Handler],
        on_result: Callable[[TaskResult], None],
        secrets: Secrets = _no_secrets,
        on_begin: Callable[[UnitStart | UnitHandoff], None] = lambda _: None,
    ) -> None:
        self._verifier = verifier
        self._journal = journal
        self._clock = clock
        self._handlers = handlers
        self._on_result = on_result
        self._secrets = secrets
        #: Told of a unit while its secrets are still asked for.
        self._on_begin = on_begin
        self._slots = asyncio.Semaphore(CONCURRENCY)
        #: Apart, because they take minutes: however many wait, units start and stop.
        self._builds = asyncio.Semaphore(CONCURRENCY)
        self._turns = Turns()
        self._working: dict[str, asyncio.Task[None]] = {}

    async def resume(self) -> None:
        """Take up what had begun when the agent last ended."""
        for signed in await self._journal.unfinished():
            self._begin(signed, _decode(signed.body).task_id)
        for result in await self._journal.unacknowledged():
            self._on_result(result)

    def submit(self, signed: SignedTask) -> None:
        """Take a task from the link. One that is at work already goes on."""
        task_id = _claimed_id(signed)
        if task_id in self._working:
            return
        self._begin(signed, task_id)

    def _begin(self, signed: SignedTask, task_id: str) -> None:
        task = asyncio.create_task(self._run(signed, task_id), name=f"task-{task_id}")
        self._working[task_id] = task
        task.add_done_callback(lambda _: self._working.pop(task_id, None))

    async def _run(self, signed: SignedTask, task_id: str) -> None:
        try:
            verified = self._verifier.verify(signed)
        except Refused as refused:
            _log.warning("task_refused", task_id=task_id, code=refused.code, detail=refused.detail)
            _done.labels("unverified", Outcome.REFUSED.value).inc()
            if task_id:
                self._on_result(_result(task_id, _claimed_fence(signed), Outcome.REFUSED, refused))
            return
        body = verified.body
        ids = {"task_id": body.task_id, "allocation_id": body.allocation_id or ""}
        with (
            correlated(body.correlation_id, **ids),
            span("agent.task", type=body.type, **ids),
            _seconds.labels(body.type).time(),
        ):
            async with self._turns.take(_turn(verified)):
                if isinstance(verified.params, UnitStart | UnitHandoff):
                    # A resumed one may be too old by now, which only a server can say.
                    await self._clock.known.wait()
                async with self._builds if isinstance(verified.params, RuntimeBuild | RuntimeResolve) else self._slots:
                    await self._execute(verified)

    async def _execute(self, task: Verified) -> None:
        handler = await self._admit(task)
        if handler is None:
            return
        result = await self._attempt(task, handler)
        await self._journal.finish(result)
        self._report(task, result)

    async def _admit(self, task: Verified) -> Handler | None:
        """Note the task and say what does it, or answer at once what needs no doing."""
        body = task.body
        expired = self._clock.expired(body.expires_at)
        try:
            begun = await self._journal.begin(body, task.signed, expired=expired)
        except NodeError as error:
            self._report(task, _result(body.task_id, body.fence, Outcome.REFUSED, error))
            return None
        match begun.standing:
            case Standing.UNFINISHED if expired and isinstance(task.params, UnitStart | UnitHandoff):
                return self._too_late
            case Standing.NEW | Standing.UNFINISHED:
                return self._handlers[body.type]
            case Standing.DONE:
                assert begun.result is not None
                self._on_result(begun.result)
            case Standing.STALE:
                refused = Refused("stale_fence", f"fence {body.fence} is lower than one seen before")
                self._report(task, _result(body.task_id, body.fence, Outcome.REFUSED, refused))
            case Standing.EXPIRED:
                refused = Refused("expired", f"the task expired at {body.expires_at.isoformat()}")
                self._report(task, _result(body.task_id, body.fence, Outcome.REFUSED, refused))
        return None

    async def _too_late(self, params: UnitStart | UnitHandoff) -> NoReturn:
        """The agent was away for so long that nobody waits for the unit any more."""
        await self._undo(params)
        raise Failed("expired", "the task expired before the agent could finish it; what had begun was stopped")

    async def _undo(self, params: UnitStart | UnitHandoff) -> None:
        gpus = params.gpu_uuids if isinstance(params, UnitStart) else []
        stop = UnitStop(unit_id=params.unit_id, gpu_uuids=gpus, allocation_id=params.allocation_id)
        await self._handlers[UNIT_STOP](stop)

    async def _call(self, task: Verified, handler: Handler) -> msgspec.Struct:
        params = task.params
        if not isinstance(params, UnitStart | UnitHandoff) or handler == self._too_late:
            return await handler(params)
        self._on_begin(params)
        if not params.secrets and params.serving is None:
            return await handler(params)
        try:
            async with asyncio.timeout(_SECRETS_TIMEOUT_S):
                values = await self._secrets(task.body.task_id)
        except (NodeError, TimeoutError) as error:
            detail = error.detail if isinstance(error, NodeError) else "no answer came in time"
            await self._undo(params)
            raise Failed("secrets_unavailable", detail) from error
        return await handler(params, values)

    async def _attempt(self, task: Verified, handler: Handler) -> TaskResult:
        body = task.body
        try:
            answer = await self._call(task, handler)
        except Refused as refused:
            return _result(body.task_id, body.fence, Outcome.REFUSED, refused)
        except NodeError as error:
            return _result(body.task_id, body.fence, Outcome.FAILED, error)
        except Exception as error:  # noqa: BLE001 - supervises one task: the agent goes on
            _log.exception("task_crashed", type=body.type)
            code = DISK_FULL if is_full(error) else "internal"
            return _result(body.task_id, body.fence, Outcome.FAILED, Failed(code, repr(error)))
        return TaskResult(
            task_id=body.task_id,
            fence=body.fence,
            outcome=Outcome.SUCCEEDED,
            answer=msgspec.Raw(msgspec.msgpack.encode(answer)),
        )

    def _report(self, task: Verified, result: TaskResult) -> None:
        _done.labels(task.body.type, result.outcome.value).inc()
        _log.info("task_ended", type=task.body.type, outcome=result.outcome.value, code=result.error_code)
        self._on_result(result)

    async def close(self) -> None:
        """Leave what is at work as the journal has it."""
        for task in list(self._working.values()):
            task.cancel()
        await asyncio.gather(*self._working.values(), return_exceptions=True)


def _turn(task: Verified) -> str:
    """Whose turn a task takes: a unit's, which may pass from one allocation to another."""
    if isinstance(task.params, UnitStart | UnitHandoff | UnitStop):
        return task.params.unit_id
    if isinstance(task.params, RuntimeBuild | RuntimeResolve):
        # An environment is no unit's own, and a stop does not wait for it.
        return task.body.task_id
    return task.body.allocation_id or task.body.task_id


def _result(task_id: str, fence: int, outcome: Outcome, error: NodeError) -> TaskResult:
    return TaskResult(
        task_id=task_id, fence=fence, outcome=outcome, error_code=error.code, detail=error.detail[:_DETAIL_CHARS_MAX]
    )


class _Claim(msgspec.Struct, frozen=True):
    """What an unverified task says of itself; used to answer it, never to act."""

    task_id: str = ""
    fence: int = 0


def _claim(signed: SignedTask) -> _Claim:
    try:
        return msgspec.msgpack.decode(signed.body[:_BODY_BYTES_MAX], type=_Claim)
    except UNREADABLE:
        return _Claim()


def _claimed_id(signed: SignedTask) -> str:
    return _claim(signed).task_id


def _claimed_fence(signed: SignedTask) -> int:
    return _claim(signed).fence
