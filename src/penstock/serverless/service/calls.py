"""Handlers that call other functions of their project. Calls of many workers are taken in turn.

The sidecar passes a call on with the token of the attempt that makes it. It becomes an invocation like any other, made
by whoever made its parent. Its end goes to the caller's worker, whose name we know from the row, and to no reply field.
"""

import asyncio
import hashlib
from typing import Final

import msgspec
from nats.aio.msg import Msg

from penstock.kit.bus import Bus
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import PenstockError, Unavailable
from penstock.kit.fair import FairQueue
from penstock.kit.process import every, guarded
from penstock.kit.pull import Pull
from penstock.serverless import streams
from penstock.serverless.model import Mode, State
from penstock.serverless.service import burying
from penstock.serverless.service.burying import Unreadable, discarded, security
from penstock.serverless.service.drafting import Asked, function_name
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.service.outcomes import Accepted, ended
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.telling import Teller, call_answer, call_inbox
from penstock.serverless.store import sayings
from penstock.serverless.store.sayings import Parent
from penstock.wire import subjects
from penstock.wire.serverless import VERSION, CallAnswer, CallMessage, FailureClass
from penstock.wire.unreadable import UNREADABLE

_decode = msgspec.json.Decoder(CallMessage).decode
_PULLED_MAX: Final = 256
#: What is refused is asked again by its sidecar.
_WAITING_PER_WORKER_MAX: Final = 256
_WAITING_MAX: Final = 8192
_WAITING_BYTES_PER_WORKER_MAX: Final = 16 << 20
_AT_ONCE: Final = 4


class Calls:
    """Takes calls, in one of the activators."""

    def __init__(self, db: Database, bus: Bus, invoker: Invoker, teller: Teller, keys: Keys) -> None:
        self._db = db
        self._bus = bus
        self._invoker = invoker
        self._teller = teller
        self._keys = keys
        self._waiting: FairQueue[tuple[str, bytes]] = FairQueue(
            each_max=_WAITING_PER_WORKER_MAX, total_max=_WAITING_MAX, each_bytes_max=_WAITING_BYTES_PER_WORKER_MAX
        )

    async def run(self) -> None:
        """Take what comes, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            for _ in range(_AT_ONCE):
                tasks.create_task(self._take())

    async def _hear(self) -> None:
        async def ensure() -> None:
            await streams.ensure(self._bus)

        async with Pull(
            self._bus, stream=streams.CALLS, consumer=streams.CALLERS, batch=_PULLED_MAX, ensure=ensure
        ) as pull:

            async def turn() -> None:
                for message in await pull.take(_PULLED_MAX):
                    await self._queue(message)

            await every(0, turn, name="calls")

    async def _queue(self, message: Msg) -> None:
        """Acknowledged before it is made: its sidecar asks again until it hears of it."""
        if not self._waiting.put(message.subject, (message.subject, message.data), len(message.data)):
            discarded.labels("call", FailureClass.BACKPRESSURE).inc()
        await message.ack()

    async def _take(self) -> None:
        while True:
            subject, data = await self._waiting.take()
            await guarded(self._receive(subject, data), name="call", subject=subject)

    async def _receive(self, subject: str, data: bytes) -> None:
        try:
            message, token = _read(data)
        except Unreadable as error:
            discarded.labels("call", error.failure).inc()
            await self._bury(subject, data, error.failure, str(error))
            return
        async with self._db.read() as conn:
            parent = await sayings.parent(
                conn,
                project_id=message.projectID,
                invocation_id=message.invocationID,
                token=token,
                worker_id=message.workerName,
            )
        if parent is None or subject != subjects.call(parent.request, message.workerName):
            security.labels("foreign_call").inc()
            await self._bury(subject, data, FailureClass.FOREIGN_MESSAGE, "foreign_call")
            return
        await self._call(parent, message)

    async def _bury(self, subject: str, data: bytes, failure: FailureClass, error: str) -> None:
        await burying.publish(self._bus, burying.dead_letter(subject, data, failure=failure, error=error))

    async def _call(self, parent: Parent, message: CallMessage) -> None:
        digest = hashlib.sha256(f"{parent.id}/{message.token}/{message.call}".encode()).hexdigest()
        invocation_id = f"call-{digest[:32]}"
        try:
            existing = (await self._accept(parent, message, invocation_id)).existing
        except Unavailable:
            # That says nothing of the call: its sidecar asks again.
            raise
        except PenstockError as error:
            # A call that was accepted before is not refused for what has changed since.
            existing = await self._invoker.find(parent.project_id, invocation_id)
            if existing is None:
                await self._answer(parent, message, _refusal(message.call, error))
                return
        if message.mode is Mode.ASYNC:
            answer = CallAnswer(call=message.call, invocationID=invocation_id, state=State.QUEUED, statusCode=202)
            await self._answer(parent, message, answer)
        elif existing is not None and existing.ended:
            # It is asked for again: the answer was lost.
            await self._answer(parent, message, call_answer(message.call, ended(existing)))

    async def _accept(self, parent: Parent, message: CallMessage, invocation_id: str) -> Accepted:
        reply = call_inbox(parent.request, message.workerName, message.call) if message.mode is Mode.SYNC else ""
        asked = Asked(
            id=invocation_id,
            payload=bytes(message.payload),
            content_type=message.contentType,
            mode=message.mode,
            timeout_s=message.timeoutSeconds or None,
            reply_to=reply,
            parent_id=parent.id,
        )
        return await self._invoker.call(_caller(parent), function_name(message.function, parent.project_id), asked)

    async def _answer(self, parent: Parent, message: CallMessage, answer: CallAnswer) -> None:
        key = await self._keys.of(message.workerName)
        if key is not None:
            await self._teller.answer_call(
                request=parent.request, worker=message.workerName, mac_key=key, answer=answer
            )


def _read(data: bytes) -> tuple[CallMessage, bytes]:
    """The call and the token of its attempt."""
    try:
        message = _decode(data)
        token = bytes.fromhex(message.token)
    except (*UNREADABLE, ValueError) as error:
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, str(error)) from error
    if message.version != VERSION:
        raise Unreadable(FailureClass.UNSUPPORTED_VERSION, f"version {message.version[:32]!r} is not understood")
    names = (message.projectID, message.invocationID, message.workerName, message.call, message.contentType)
    if not all(name.isprintable() for name in names):
        raise Unreadable(FailureClass.MALFORMED_MESSAGE, "a name has a control character")
    return message, token


def _caller(parent: Parent) -> Caller:
    """Whoever made the parent, allowed to do no more than it did."""
    return Caller(
        principal_id=parent.created_by,
        principal_kind="function",
        display_name="",
        organisation_id=parent.organisation_id,
        project_id=parent.project_id,
        role="function",
        actions=frozenset({"functions.invoke"}),
        key_id=parent.key_id,
    )


def _refusal(call: str, error: PenstockError) -> CallAnswer:
    return CallAnswer(
        call=call,
        invocationID="",
        state=State.FAILED,
        statusCode=400,
        failureClass=FailureClass.DISPATCH_ERROR,
        error=error.detail,
        errorType=error.code,
    )
