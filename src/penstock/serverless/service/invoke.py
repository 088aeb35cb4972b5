"""Ingress: accept an invocation, announce it, and wait for its end where the caller does.

Rows that come together are inserted by one statement. An id counts within its project: the same id with the same
payload is the same invocation, whoever waits for it; with another payload it is a conflict. Nothing is announced before
it is committed, and nothing that is committed depends on the announcement.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import asyncpg
import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import Invalid, Unauthenticated
from penstock.kit.gather import Gatherer
from penstock.serverless.errors import IdReused, NoFunction, QueueFull, TooManyWaiters
from penstock.serverless.model import (
    FINAL,
    Draft,
    Function,
    Invocation,
    Limits,
    Mode,
)
from penstock.serverless.ports import Bytes
from penstock.serverless.service import drafting, outcomes
from penstock.serverless.service.drafting import Asked, function_name
from penstock.serverless.service.outcomes import Accepted, acknowledgement, announcement, ended, reused
from penstock.serverless.service.telling import invocation_message
from penstock.serverless.store import invocations
from penstock.wire import subjects
from penstock.wire.rest import InvocationAck, InvocationRequest, MapCreate, MapCreated
from penstock.wire.serverless import (
    FailureClass,
    Result,
)

ACTION: Final = "functions.invoke"
_STREAM: Final = "WORK"
_BATCH_MAX: Final = 500
_KEPT_S: Final = 1.0
_KEPT_MAX: Final = 10_000
_FULL_S: Final = 0.05
_LOOK_S: Final = 0.5
#: With what the authenticator keeps (2 s), a caller outlives a credential by less than five seconds.
_RECHECK_S: Final = 2.0
_WAITERS_MAX: Final = 20_000
_WAITERS_PER_PROJECT_MAX: Final = 5000
_NULL: Final = msgspec.Raw(b"null")


async def _always(_: Caller) -> bool:
    """For processes where nobody waits."""
    return True


class Invoker:
    """The ingress of one process. `start` must have been called: answers come to an inbox of its own."""

    def __init__(
        self,
        db: Database,
        bus: Bus,
        bytes_: Bytes,
        limits: Limits,
        *,
        still_valid: Callable[[Caller], Awaitable[bool]] = _always,
    ) -> None:
        self._db = db
        self._bus = bus
        self._bytes = bytes_
        self._limits = limits
        self._still_valid = still_valid
        self._adding = Gatherer(self._add, batch_max=_BATCH_MAX, at_once=2)
        self._functions: dict[tuple[str, str], tuple[float, Function]] = {}
        self._queues: dict[str, tuple[float, int]] = {}
        self._inbox = f"_INBOX.{secrets.token_hex(16)}"
        self._waiters: dict[str, asyncio.Future[Result]] = {}
        #: How many of each project.
        self._waiting: Counter[str] = Counter()

    @property
    def limits(self) -> Limits:
        """What the installation sets."""
        return self._limits

    async def start(self) -> None:
        """Listen for answers, and for changes of functions."""
        await self._bus.client.subscribe(f"{self._inbox}.*", cb=self._answered, pending_msgs_limit=1 << 16)
        await self._bus.on_hint(subjects.FUNCTIONS, self._changed)

    async def _changed(self, _: str, __: bytes) -> None:
        self._functions.clear()

    async def _answered(self, message: Msg) -> None:
        waiter = self._waiters.pop(subjects.last_token(message.subject), None)
        if waiter is not None and not waiter.done():
            with suppress(msgspec.DecodeError):
                waiter.set_result(msgspec.json.decode(message.data, type=Result))

    async def invoke(self, caller: Caller, request: InvocationRequest) -> InvocationAck | Result:
        """The source's route: an acknowledgement for async, the end for sync; and the acknowledgement too when the wait
        was over before the work."""
        caller.require(ACTION)
        name = function_name(request.serverlessRequestID, caller.project_id)
        function = await self.function(caller.project_id, name)
        asked = drafting.asked_by(request)
        if function is None:
            return await self._refuse(await drafting.draft(self._bytes, caller, drafting.nobodys(caller, name), asked))
        draft = await self.draft(caller, function, asked)
        wait_s = self._limits.patience_s(request.timeoutSeconds) if request.mode is Mode.SYNC else 0.0
        return await self.run(caller, draft, wait_s=wait_s)

    async def run(self, caller: Caller, draft: Draft, *, wait_s: float) -> InvocationAck | Result:
        """Accept what `draft` made; with a wait, answer with the end when that comes in time. A caller whose credential
        is revoked meanwhile is sent away; the invocation goes on."""
        if not wait_s:
            accepted = await self._accept(draft)
            return acknowledgement(accepted, await self._announce(draft, accepted))
        if len(self._waiters) >= _WAITERS_MAX or self._waiting[draft.project_id] >= _WAITERS_PER_PROJECT_MAX:
            raise TooManyWaiters("too many callers wait here; try again, or use the mode async", retry_after_s=1)
        token = secrets.token_hex(12)
        waiter: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiters[token] = waiter
        self._waiting[draft.project_id] += 1
        try:
            draft = replace(draft, reply_to=f"{self._inbox}.{token}")
            accepted = await self._accept(draft)
            if accepted.existing is None:
                await self._hint(draft, accepted)
            return await self._wait(caller, accepted, waiter, wait_s) or await self._unfinished(accepted)
        finally:
            self._waiters.pop(token, None)
            self._waiting[draft.project_id] -= 1
            if not self._waiting[draft.project_id]:
                del self._waiting[draft.project_id]

    async def _wait(
        self, caller: Caller, accepted: Accepted, waiter: "asyncio.Future[Result]", wait_s: float
    ) -> Result | None:
        """The end, told or found: whoever joins an invocation that others made is not told."""
        if accepted.existing is not None and accepted.existing.state in FINAL:
            return ended(accepted.existing)
        deadline = time.monotonic() + wait_s
        # A caller of ours is told; looking at the row now and then makes up for what was lost.
        look_s = _LOOK_S if accepted.existing is None else _LOOK_S / 5
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, look_s)):
                    return await asyncio.shield(waiter)
            if not await self._still_valid(caller):
                raise Unauthenticated("the credential was revoked while its caller waited")
            look_s = min(look_s * 2, _RECHECK_S) if accepted.existing is None else look_s
            if (found := await self.find(accepted.project_id, accepted.id)) and found.ended:
                return ended(found)
        return None

    async def _unfinished(self, accepted: Accepted) -> InvocationAck | Result:
        """For a caller whose wait is over: how far it has come."""
        found = await self.find(accepted.project_id, accepted.id)
        if found is not None and found.ended:
            return ended(found)
        made = acknowledgement(accepted, 0)
        return msgspec.structs.replace(made, state=found.state) if found else made

    async def find(self, project_id: str, invocation_id: str) -> Invocation | None:
        """The row."""
        async with self._db.read() as conn:
            return await invocations.find(conn, project_id, invocation_id)

    async def map(self, caller: Caller, name: str, request: MapCreate) -> MapCreated:
        """One invocation for each payload."""
        caller.require(ACTION)
        function = await self.function(caller.project_id, function_name(name, caller.project_id))
        if function is None:
            raise NoFunction.named(caller.project_id, name)
        drafting.check_text("content_type", request.content_type)
        await self._check_room(caller.project_id, len(request.payloads))
        batch = request.id or f"map-{secrets.token_hex(12)}"
        payloads = {f"{batch}-{index}": msgspec.json.encode(each) for index, each in enumerate(request.payloads)}
        if request.id is not None:
            await self._check_unused(function, payloads)
        each = Asked(payload=b"", content_type=request.content_type, timeout_s=request.timeout_s, ttl_s=request.ttl_s)
        drafts = [
            await drafting.draft(self._bytes, caller, function, replace(each, id=invocation_id, payload=payload))
            for invocation_id, payload in payloads.items()
        ]
        for start in range(0, len(drafts), _BATCH_MAX):
            batch_drafts = drafts[start : start + _BATCH_MAX]
            for draft, accepted in zip(batch_drafts, await self._add(batch_drafts), strict=True):
                if isinstance(accepted, BaseException):
                    raise accepted
                if accepted.existing is None:
                    await self._hint(draft, accepted)
        return MapCreated(id=batch, invocations=[draft.id for draft in drafts])

    async def _check_unused(self, function: Function, payloads: Mapping[str, bytes]) -> None:
        """Refuse ids that came before with something else, before any of them is made."""
        async with self._db.read() as conn:
            known = await invocations.hashes(conn, function.project_id, list(payloads))
        for invocation_id, before in known.items():
            if before != (function.name, hashlib.sha256(payloads[invocation_id]).digest()):
                raise reused(invocation_id)

    async def call(self, caller: Caller, name: str, asked: Asked) -> Accepted:
        """An invocation that another one makes. It may be asked for again."""
        caller.require(ACTION)
        function = await self.function(caller.project_id, name)
        if function is None:
            raise NoFunction.named(caller.project_id, name)
        draft = await self.draft(caller, function, asked)
        accepted = await self._accept(draft)
        if accepted.existing is None:
            await self._hint(draft, accepted)
        return accepted

    async def function(self, project_id: str, name: str) -> Function | None:
        """The function of this name, as it was a moment ago."""
        kept = self._functions.get((project_id, name))
        now = time.monotonic()
        if kept is not None and kept[0] > now:
            return kept[1]
        async with self._db.read() as conn:
            found = await invocations.function(conn, project_id, name)
        if found is not None:
            if len(self._functions) >= _KEPT_MAX:
                self._functions.clear()
            self._functions[project_id, name] = (now + _KEPT_S, found)
        return found

    async def draft(self, caller: Caller, function: Function, asked: Asked) -> Draft:
        """An invocation for `run`. Refused when there is no room for it, before anything is stored."""
        await self._check_room(caller.project_id, 1)
        return await drafting.draft(self._bytes, caller, function, asked)

    async def _accept(self, draft: Draft) -> Accepted:
        try:
            return await self._adding.do(draft)
        except IdReused:
            await self._discard(draft)
            raise

    async def _discard(self, draft: Draft) -> None:
        """Its payload is nobody's, unless it is that of the one with the same id."""
        if draft.payload_ref is None:
            return
        key = str(draft.payload_ref["key"])
        async with self._db.read() as conn:
            used = await invocations.refers_to(conn, draft.project_id, draft.id, key)
        if not used:
            await self._bytes.drop(draft.project_id, key)

    async def _add(self, drafts: Sequence[Draft]) -> list[Accepted | BaseException]:
        """All at once; one that Postgres cannot keep is its own caller's fault alone."""
        try:
            return await self._add_together(drafts)
        except asyncpg.DataError as error:
            if len(drafts) == 1:
                return [Invalid("the invocation has text that cannot be kept", error=str(error))]
        return [(await self._add([draft]))[0] for draft in drafts]

    async def _add_together(self, drafts: Sequence[Draft]) -> list[Accepted | BaseException]:
        """One statement for all; ids that came before are looked up one by one."""
        unique: dict[tuple[str, str], Draft] = {}
        for draft in drafts:
            unique.setdefault((draft.project_id, draft.id), draft)
        async with self._db.read() as conn:
            made = await invocations.add(conn, list(unique.values()))
            answers: list[Accepted | BaseException] = []
            for draft in drafts:
                key = (draft.project_id, draft.id)
                added = made.get(key) if unique.get(key) is draft else None
                existing = None if added else await invocations.find(conn, *key)
                answers.append(outcomes.accepted(draft, added.created_at if added else None, existing))
        return answers

    async def _check_room(self, project_id: str, more: int) -> None:
        """Refuse what would make the project's queue too long. The count is looked up when the estimate says that it
        may matter, and is exact to what came within a second elsewhere; nobody is refused for an old count."""
        limit = self._limits.waiting_max_per_project
        counted_at, count = self._queues.get(project_id, (0.0, 0))
        now = time.monotonic()
        kept_s = _FULL_S if count + more > limit else _KEPT_S if count + more > limit // 2 else 10 * _KEPT_S
        if now - counted_at > kept_s:
            async with self._db.read() as conn:
                count = await invocations.waiting(conn, project_id, limit=limit + 1)
            counted_at = now
        if count + more > limit:
            raise QueueFull(f"the queue is full: {limit} invocations of the project wait already", retry_after_s=5)
        if len(self._queues) >= _KEPT_MAX:
            self._queues.clear()
        self._queues[project_id] = (counted_at, count + more)

    async def _announce(self, draft: Draft, accepted: Accepted) -> int:
        """The announcement's place in the queue; 0 when the queue is away."""
        if accepted.existing is not None:
            return 0
        subject, message_id, body = invocation_message(announcement(draft, accepted))
        try:
            return (await self._bus.js.publish(subject, body, timeout=1, headers={"Nats-Msg-Id": message_id})).seq
        except (NatsError, TimeoutError, OSError):
            return 0

    async def _hint(self, draft: Draft, accepted: Accepted) -> None:
        """The same, for those who need not know its place."""
        subject, message_id, body = invocation_message(announcement(draft, accepted))
        with suppress(NatsError, OSError):
            await self._bus.client.publish(subject, body, headers={"Nats-Msg-Id": message_id})

    async def _refuse(self, draft: Draft) -> InvocationAck | Result:
        """There is no definition, so there will never be a worker: it ends as it begins, and can be looked up."""
        error = f"there is no function {draft.function_name}: deploy it first"
        async with self._db.read() as conn:
            is_new = await invocations.add_stillborn(
                conn, draft, failure_class=FailureClass.NO_WORKER_TEMPLATE, error=error, status_code=503
            )
            found = await invocations.find(conn, draft.project_id, draft.id)
        assert found is not None
        accepted = outcomes.accepted(draft, None, found)
        if isinstance(accepted, BaseException):
            raise accepted
        if draft.mode is Mode.SYNC:
            return ended(found)
        return msgspec.structs.replace(acknowledgement(accepted, 0), duplicate=not is_new)
