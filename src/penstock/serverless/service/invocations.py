"""Look at invocations, fetch results, send one again; dead letters."""

import base64
import binascii
import hashlib
import math
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import Conflict
from penstock.kit.idempotency import Once
from penstock.serverless.errors import FunctionGone, NoInvocation, NoResult, NotFinished, NotReplayable, Replayed
from penstock.serverless.model import Invocation
from penstock.serverless.ports import Bytes
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.store import reads
from penstock.serverless.waiting import waiting_for
from penstock.wire.rest import DeadLetter, InvocationRequest
from penstock.wire.serverless import Mode, State
from penstock.wire.unreadable import UNREADABLE

RETRIES_MAX: Final = 100
_ID_CHARS_MAX: Final = 64
_RETRY: Final = re.compile(r"-r[0-9a-f]+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """An invocation, and what it waits for."""

    row: Invocation
    waiting_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A result as it was answered. `size` counts its bytes."""

    content_type: str
    size: int
    chunks: AsyncIterator[bytes]


async def get(conn: Reader, caller: Caller, invocation_id: str) -> Shown:
    """One invocation of the caller's project."""
    caller.require("functions.read")
    found = await reads.find(conn, caller.project_id, invocation_id)
    if found is None:
        raise NoInvocation.named(invocation_id)
    if not found.waiting or found.function_id is None:
        return Shown(row=found, waiting_for="")
    standings = await reads.standings(conn, [found.function_id])
    return Shown(row=found, waiting_for=waiting_for(found, standings, ahead=await reads.ahead(conn, found)))


async def page(
    conn: Reader, caller: Caller, *, function: str | None, state: str | None, before: int | None, limit: int
) -> Sequence[Shown]:
    """The project's invocations, newest first."""
    caller.require("functions.read")
    found = await reads.page(conn, caller.project_id, function_name=function, state=state, before=before, limit=limit)
    standings = await reads.standings(conn, {each.function_id for each in found if each.waiting and each.function_id})
    return [Shown(row=each, waiting_for=waiting_for(each, standings)) for each in found]


async def letters(
    conn: Reader, caller: Caller, *, function: str | None, before: str | None, limit: int
) -> Sequence[DeadLetter]:
    """What could not be done, newest first."""
    caller.require("functions.read")
    return await reads.letters(conn, caller.project_id, function_name=function, before=before, limit=limit)


async def drop_letter(tx: Tx, caller: Caller, letter_id: str) -> None:
    """Forget a dead letter."""
    caller.require("functions.write")
    if not await reads.drop_letter(tx, caller.project_id, letter_id):
        raise NoInvocation.named(letter_id, kind="dead letter")
    await audit.record(tx, caller.actor, "functions.drop_dead_letter", letter_id)


@dataclass(frozen=True, slots=True)
class Results:
    """The answers of handlers, wherever they are kept."""

    db: Database
    bytes_: Bytes

    async def open(self, caller: Caller, invocation_id: str) -> Content:
        """The bytes that the handler answered with."""
        caller.require("functions.read")
        async with self.db.read() as conn:
            found = await reads.find(conn, caller.project_id, invocation_id)
        if found is None:
            raise NoInvocation.named(invocation_id)
        if not found.ended:
            raise NotFinished(f"the invocation is {found.state}: it has no result yet")
        if found.state is not State.SUCCEEDED:
            raise NoResult(f"the invocation is {found.state} and has no result: {found.error}".rstrip(": "))
        kind = found.result_type or "application/json"
        if found.result_ref:
            size, chunks = await self.bytes_.open(caller.project_id, str(found.result_ref["key"]))
            return Content(content_type=kind, size=size, chunks=chunks)
        if found.result is None:
            raise NoResult("the invocation succeeded without a result")
        content = raw_body(found.result, content_type=kind, encoding=found.encoding)
        return Content(content_type=kind, size=len(content), chunks=_one(content))


def raw_body(kept: bytes, *, content_type: str, encoding: str) -> bytes:
    """A body as it was before it became part of a message. JSON is as it is; all else is a string of it."""
    if content_type.partition(";")[0].strip().lower().endswith("json"):
        return kept
    try:
        text = msgspec.json.decode(kept)
        if not isinstance(text, str):
            return kept
        return base64.b64decode(text, validate=True) if encoding == "base64" else text.encode()
    except (binascii.Error, UnicodeError, *UNREADABLE):
        return kept


@dataclass(frozen=True, slots=True)
class Again:
    """What was sent before, sent once more: as an invocation of its own, with an id that says where it comes from."""

    db: Database
    invoker: Invoker
    bytes_: Bytes

    async def retry(self, caller: Caller, invocation_id: str, once: Once | None) -> str:
        """The id of the new invocation. With an Idempotency-Key there is one for each key."""
        caller.require("functions.invoke")
        async with self.db.read() as conn:
            found = await reads.find(conn, caller.project_id, invocation_id)
            if found is None:
                raise NoInvocation.named(invocation_id)
            if not found.ended:
                raise NotFinished(f"the invocation is {found.state}: cancel it, or wait for its end")
            new_id = await _retry_id(conn, caller.project_id, invocation_id, once)
        await self._send(caller, invocation_id, new_id)
        await self._record(caller, "functions.retry", invocation_id, new_id)
        return new_id

    async def replay(self, caller: Caller, letter_id: str) -> str:
        """The id of what was made of it. It is the letter's own: asking again after a failure does no harm."""
        caller.require("functions.invoke")
        async with self.db.transaction() as tx:
            letter = await reads.lock_letter(tx, caller.project_id, letter_id)
        if letter is None:
            raise NoInvocation.named(letter_id, kind="dead letter")
        if letter.replayed_as is not None:
            raise Replayed(f"it was replayed before, as {letter.replayed_as}")
        if letter.source != "invocation" or letter.invocation_id is None:
            raise NotReplayable(f"a message of {letter.source} cannot be replayed")
        new_id = f"replay-{letter.id}"
        await self._send(caller, letter.invocation_id, new_id)
        async with self.db.transaction() as tx:
            await reads.mark_replayed(tx, letter.id, new_id)
            await audit.record(tx, caller.actor, "functions.replay", letter.id, detail={"invocation": new_id})
        return new_id

    async def _send(self, caller: Caller, invocation_id: str, new_id: str) -> None:
        async with self.db.read() as conn:
            sent = await reads.sent(conn, caller.project_id, invocation_id)
        if sent is None:
            raise NotReplayable("the invocation is not kept any more")
        if await self.invoker.function(caller.project_id, sent.function_name) is None:
            raise FunctionGone(f"there is no function {sent.function_name} any more")
        payload = (
            sent.payload if sent.payload_ref is None else await self._payload(caller, str(sent.payload_ref["key"]))
        )
        request = InvocationRequest(
            serverlessRequestID=sent.function_name,
            invocationID=new_id,
            mode=Mode.ASYNC,
            contentType=sent.content_type,
            headers=sent.headers,
            attributes=sent.attributes,
            payload=msgspec.Raw(payload or b"null"),
            timeoutSeconds=math.ceil(sent.timeout_s or 0),
            webhook=sent.webhook,
        )
        await self.invoker.invoke(caller, request)

    async def _payload(self, caller: Caller, key: str) -> bytes:
        _, chunks = await self.bytes_.open(caller.project_id, key)
        return b"".join([chunk async for chunk in chunks])

    async def _record(self, caller: Caller, action: str, target: str, new_id: str) -> None:
        async with self.db.transaction() as tx:
            await audit.record(tx, caller.actor, action, target, detail={"invocation": new_id})


async def _retry_id(conn: Reader, project_id: str, invocation_id: str, once: Once | None) -> str:
    root = _RETRY.sub("", invocation_id)[: _ID_CHARS_MAX - 14]
    if once is not None:
        return f"{root}-r{hashlib.sha256(f'{once.scope} {once.key}'.encode()).hexdigest()[:12]}"
    ids = [f"{root}-r{n}" for n in range(1, RETRIES_MAX + 1)]
    taken = await reads.taken_ids(conn, project_id, ids)
    if (free := next((each for each in ids if each not in taken), None)) is None:
        raise Conflict(f"it was retried {RETRIES_MAX} times already")
    return free


async def _one(content: bytes) -> AsyncIterator[bytes]:
    yield content
