"""Ingress: accept an invocation, announce it, and wait for its end where the caller does.

Rows that come together are inserted by one statement. An id counts within its project: the same id with the same
payload is the same invocation, whoever waits for it; with another payload it is a conflict. Nothing is announced before
it is committed, and nothing that is committed depends on the announcement.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.clock import utc_now
from penstock.kit.db import Database
from penstock.kit.errors import Invalid
from penstock.kit.gather import Gatherer
from penstock.kit.telemetry import correlation_id
from penstock.serverless.errors import IdReused, NoFunction, QueueFull, TooManyWaiters
from penstock.serverless.model import (
    FINAL,
    FOREIGN,
    NAME,
    Announcement,
    Draft,
    Function,
    Invocation,
    Limits,
    Mode,
    State,
)
from penstock.serverless.ports import Bytes
from penstock.serverless.service.telling import invocation_message
from penstock.serverless.store import invocations
from penstock.wire import subjects
from penstock.wire.rest import InvocationAck, InvocationRequest, MapCreate, MapCreated
from penstock.wire.serverless import (
    HEADER_BYTES_MAX,
    INLINE_BYTES_MAX,
    PAYLOAD_BYTES_MAX,
    FailureClass,
    Reference,
    Result,
)

ACTION: Final = "functions.invoke"
_STREAM: Final = "WORK"
_BATCH_MAX: Final = 500
_KEPT_S: Final = 1.0
_KEPT_MAX: Final = 10_000
#: Kept for whoever asks how it went, for so long at most while it waits.
_TTL_S: Final = 24 * 3600.0
_LOOK_S: Final = 0.5
_WAITERS_MAX: Final = 20_000
_NULL: Final = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An invocation that will have exactly one end. `existing` is the row of an id that came before."""

    project_id: str
    id: str
    function_name: str
    mode: Mode
    created_at: datetime
    existing: Invocation | None = None


class Invoker:
    """The ingress of one process. `start` must have been called: answers come to an inbox of its own."""

    def __init__(self, db: Database, bus: Bus, bytes_: Bytes, limits: Limits) -> None:
        self._db = db
        self._bus = bus
        self._bytes = bytes_
        self._limits = limits
        self._adding = Gatherer(self._add, batch_max=_BATCH_MAX, at_once=2)
        self._functions: dict[tuple[str, str], tuple[float, Function]] = {}
        self._queues: dict[str, tuple[float, int]] = {}
        self._inbox = f"_INBOX.{secrets.token_hex(16)}"
        self._waiters: dict[str, asyncio.Future[Result]] = {}

    @property
    def sync_wait_s(self) -> float:
        """How long a caller waits who does not say how long."""
        return self._limits.sync_wait_s

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
        draft = await self._draft(caller, request, name, function)
        if function is None:
            return await self._refuse(draft)
        wait_s = (request.timeoutSeconds or self._limits.sync_wait_s) if request.mode is Mode.SYNC else 0.0
        return await self.run(draft, wait_s=wait_s)

    async def run(self, draft: Draft, *, wait_s: float) -> InvocationAck | Result:
        """Accept; with a wait, answer with the end when that comes in time."""
        await self._check_room(draft.project_id, 1)
        if not wait_s:
            accepted = await self._accept(draft)
            return _ack(accepted, await self._announce(draft, accepted))
        if len(self._waiters) >= _WAITERS_MAX:
            raise TooManyWaiters("too many callers wait here; try again, or use the mode async", retry_after_s=1)
        token = secrets.token_hex(12)
        waiter: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiters[token] = waiter
        try:
            draft = replace(draft, reply_to=f"{self._inbox}.{token}")
            accepted = await self._accept(draft)
            if accepted.existing is None:
                await self._hint(draft, accepted)
            return await self._wait(accepted, waiter, wait_s) or _ack(accepted, 0)
        finally:
            self._waiters.pop(token, None)

    async def _wait(self, accepted: Accepted, waiter: "asyncio.Future[Result]", wait_s: float) -> Result | None:
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
            look_s = min(look_s * 2, 5.0) if accepted.existing is None else look_s
            if (found := await self.find(accepted.project_id, accepted.id)) and found.ended:
                return ended(found)
        return None

    async def find(self, project_id: str, invocation_id: str) -> Invocation | None:
        """The row."""
        async with self._db.read() as conn:
            return await invocations.find(conn, project_id, invocation_id)

    async def map(self, caller: Caller, name: str, request: MapCreate) -> MapCreated:
        """One invocation for each payload."""
        caller.require(ACTION)
        function = await self.function(caller.project_id, function_name(name, caller.project_id))
        if function is None:
            raise NoFunction("no function with this name")
        await self._check_room(caller.project_id, len(request.payloads))
        batch = request.id or f"map-{secrets.token_hex(12)}"
        drafts = [
            await self._draft_of(
                caller,
                function,
                invocation_id=f"{batch}-{index}",
                payload=msgspec.json.encode(payload),
                content_type=request.content_type,
                timeout_s=request.timeout_s,
                ttl_s=request.ttl_s,
            )
            for index, payload in enumerate(request.payloads)
        ]
        made = await asyncio.gather(*(self._adding.do(draft) for draft in drafts))
        for draft, accepted in zip(drafts, made, strict=True):
            if accepted.existing is None:
                await self._hint(draft, accepted)
        return MapCreated(id=batch, invocations=[draft.id for draft in drafts])

    async def call(
        self,
        caller: Caller,
        name: str,
        *,
        invocation_id: str,
        payload: bytes,
        content_type: str,
        mode: Mode,
        timeout_s: float | None,
        reply_to: str,
        parent_id: str,
    ) -> str:
        """An invocation that another one makes; its id."""
        caller.require(ACTION)
        function = await self.function(caller.project_id, name)
        if function is None:
            raise NoFunction(f"no function {name}")
        await self._check_room(caller.project_id, 1)
        draft = await self._draft_of(
            caller,
            function,
            invocation_id=invocation_id,
            payload=payload,
            content_type=content_type,
            timeout_s=timeout_s,
            mode=mode,
        )
        draft = replace(draft, reply_to=reply_to, parent_id=parent_id)
        accepted = await self._accept(draft)
        if accepted.existing is None:
            await self._hint(draft, accepted)
        return accepted.id

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

    async def draft(
        self,
        caller: Caller,
        function: Function,
        *,
        payload: bytes,
        mode: Mode,
        content_type: str = "application/json",
        invocation_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        attributes: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Draft:
        """An invocation of the gateway's own route; the payload is JSON."""
        return await self._draft_of(
            caller,
            function,
            invocation_id=invocation_id or new_invocation_id(),
            payload=payload,
            content_type=content_type,
            timeout_s=timeout_s,
            mode=mode,
            headers=headers or {},
            attributes=attributes or {},
        )

    async def _draft(self, caller: Caller, request: InvocationRequest, name: str, function: Function | None) -> Draft:
        check_headers(request.headers)
        nobody = Function(
            id="", project_id=caller.project_id, organisation_id=caller.organisation_id, name=name,
            current_version=0, serving_version=0, timeout_s=0,
        )  # fmt: skip
        return await self._draft_of(
            caller,
            function or nobody,
            invocation_id=request.invocationID or new_invocation_id(),
            payload=bytes(request.payload),
            content_type=request.contentType,
            timeout_s=request.timeoutSeconds or None,
            mode=request.mode,
            headers=request.headers,
            attributes=request.attributes,
            delay_s=request.delaySeconds,
            ttl_s=request.ttlSeconds or None,
            webhook=request.webhook,
        )

    async def _draft_of(
        self,
        caller: Caller,
        function: Function,
        *,
        invocation_id: str,
        payload: bytes,
        content_type: str,
        timeout_s: float | None,
        mode: Mode = Mode.ASYNC,
        headers: Mapping[str, str] | None = None,
        attributes: Mapping[str, str] | None = None,
        delay_s: float = 0.0,
        ttl_s: float | None = None,
        webhook: str | None = None,
    ) -> Draft:
        reference = await self._store(caller.project_id, invocation_id, payload)
        return Draft(
            project_id=caller.project_id,
            id=invocation_id,
            function_id=function.id or None,
            function_name=function.name,
            mode=mode,
            content_type=content_type,
            headers=headers or {},
            attributes=attributes or {},
            payload=None if reference else payload,
            payload_ref=reference,
            payload_hash=hashlib.sha256(payload).digest(),
            timeout_s=timeout_s,
            delay_s=delay_s,
            ttl_s=ttl_s or _TTL_S,
            reply_to="",
            webhook=webhook or function.webhook,
            parent_id=None,
            key_id=caller.key_id,
            created_by=caller.principal_id,
            correlation_id=correlation_id(),
        )

    async def _store(self, project_id: str, invocation_id: str, payload: bytes) -> dict[str, Any] | None:
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise Invalid(f"payload: max {PAYLOAD_BYTES_MAX} bytes", field="payload")
        if len(payload) <= INLINE_BYTES_MAX:
            return None
        digest = hashlib.sha256(payload).hexdigest()
        key = f"invocations/{invocation_id}/payload-{digest[:16]}"
        kept: Reference = await self._bytes.keep(project_id, key, _once(payload), bytes_max=PAYLOAD_BYTES_MAX)
        return msgspec.to_builtins(kept)

    async def _accept(self, draft: Draft) -> Accepted:
        return await self._adding.do(draft)

    async def _add(self, drafts: Sequence[Draft]) -> list[Accepted | BaseException]:
        """One statement for all; ids that came before are looked up one by one."""
        unique = {(draft.project_id, draft.id): draft for draft in reversed(drafts)}
        async with self._db.read() as conn:
            made = await invocations.add(conn, list(unique.values()))
            answers: list[Accepted | BaseException] = []
            for draft in drafts:
                key = (draft.project_id, draft.id)
                added = made.get(key) if unique.get(key) is draft else None
                existing = None if added else await invocations.find(conn, *key)
                answers.append(_accepted(draft, added.created_at if added else None, existing))
        return answers

    async def _check_room(self, project_id: str, more: int) -> None:
        """Refuse what would make the project's queue too long. The count is looked up when the estimate says that it
        may matter, and is exact to what came within a second elsewhere."""
        limit = self._limits.waiting_max_per_project
        counted_at, count = self._queues.get(project_id, (0.0, 0))
        now = time.monotonic()
        if (count + more > limit // 2 and now - counted_at > _KEPT_S) or now - counted_at > 10 * _KEPT_S:
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
        subject, message_id, body = invocation_message(_announcement(draft, accepted))
        try:
            return (await self._bus.js.publish(subject, body, timeout=1, headers={"Nats-Msg-Id": message_id})).seq
        except (NatsError, TimeoutError, OSError):
            return 0

    async def _hint(self, draft: Draft, accepted: Accepted) -> None:
        """The same, for those who need not know its place."""
        subject, message_id, body = invocation_message(_announcement(draft, accepted))
        with suppress(NatsError, OSError):
            await self._bus.client.publish(subject, body, headers={"Nats-Msg-Id": message_id})

    async def _refuse(self, draft: Draft) -> InvocationAck | Result:
        """There is no definition, so there will never be a worker: it ends as it begins, and can be looked up."""
        error = f"there is no function {draft.function_name}: deploy it first"
        async with self._db.read() as conn:
            await invocations.add_stillborn(
                conn, draft, failure_class=FailureClass.NO_WORKER_TEMPLATE, error=error, status_code=503
            )
            found = await invocations.find(conn, draft.project_id, draft.id)
        assert found is not None
        accepted = _accepted(draft, None, found)
        if isinstance(accepted, BaseException):
            raise accepted
        return ended(found) if draft.mode is Mode.SYNC else _ack(accepted, 0)


def new_invocation_id() -> str:
    """As the source makes them."""
    return f"inv-{secrets.token_hex(16)}"


def function_name(text: str, project_id: str) -> str:
    """A name as it counts, or Invalid."""
    name = text.lower()
    if not NAME.fullmatch(name) or (project_id == "prj_default" and FOREIGN.fullmatch(name)):
        raise Invalid(
            "serverlessRequestID must be 1 to 63 of a-z, 0-9, _ and -, and no other project's",
            field="serverlessRequestID",
        )
    return name


def check_headers(headers: Mapping[str, str]) -> None:
    """Headers that can be passed on."""
    if sum(len(name) + len(value) for name, value in headers.items()) > HEADER_BYTES_MAX:
        raise Invalid(f"headers: max {HEADER_BYTES_MAX} bytes in all", field="headers")
    for name, value in headers.items():
        if not name or not name.isascii() or any(ord(letter) < 32 for letter in name + value):
            raise Invalid("headers: names and values must not have control characters", field="headers")


def _accepted(draft: Draft, created_at: datetime | None, existing: Invocation | None) -> Accepted | BaseException:
    if existing is not None and (
        existing.payload_hash != draft.payload_hash or existing.function_name != draft.function_name
    ):
        return IdReused(
            f"invocationID {draft.id} was used with another payload or another function", field="invocationID"
        )
    return Accepted(
        project_id=draft.project_id,
        id=draft.id,
        function_name=draft.function_name,
        mode=draft.mode,
        created_at=existing.created_at if existing else created_at or utc_now(),
        existing=existing,
    )


def _announcement(draft: Draft, accepted: Accepted) -> Announcement:
    return Announcement(
        project_id=draft.project_id,
        id=draft.id,
        function_name=draft.function_name,
        mode=draft.mode,
        content_type=draft.content_type,
        headers=draft.headers,
        attributes=draft.attributes,
        payload=draft.payload,
        payload_ref=draft.payload_ref,
        timeout_s=draft.timeout_s,
        reply_to=draft.reply_to,
        created_at=accepted.created_at,
    )


def _ack(accepted: Accepted, sequence: int) -> InvocationAck:
    request = subjects.request_token(accepted.project_id, accepted.function_name)
    return InvocationAck(
        invocationID=accepted.id,
        serverlessRequestID=accepted.function_name,
        mode=accepted.mode,
        subject=subjects.invoke(request),
        resultSubject=subjects.result(request),
        metricsSubject=subjects.metrics(request),
        stream=_STREAM,
        sequence=sequence,
        duplicate=accepted.existing is not None,
        acceptedAt=accepted.created_at,
        state=accepted.existing.state if accepted.existing else State.QUEUED,
    )


def ended(row: Invocation) -> Result:
    """The end of an invocation, from its row."""
    return Result(
        invocationID=row.id,
        serverlessRequestID=row.function_name,
        mode=row.mode,
        state=row.state,
        statusCode=row.status_code,
        contentType=row.result_type or "application/json",
        headers=dict(row.result_headers or {}),
        body=_NULL if row.result is None else msgspec.Raw(row.result),
        encoding=row.encoding,
        bodyRef=msgspec.convert(row.result_ref, Reference) if row.result_ref else None,
        failureClass=row.failure_class,
        workerName=row.worker_id or "",
        workerNamespace=row.project_id,
        error=row.error,
        errorType=row.error_type,
        traceback=row.traceback,
        startedAt=row.started_at,
        completedAt=row.finished_at,
        attempt=row.attempt,
    )


async def _once(payload: bytes) -> AsyncIterator[bytes]:
    yield payload
