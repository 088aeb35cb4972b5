"""Ends of attempts, from the queue to the rows, and then to whoever waits. Batches commit by one statement each."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from nats.aio.msg import Msg
from prometheus_client import Counter

from penstock.kit.bus import Bus
from penstock.kit.clock import utc_now
from penstock.kit.db import Database
from penstock.kit.telemetry import logger
from penstock.serverless.model import Ending
from penstock.serverless.service import reading
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.reading import Unreadable
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import commits
from penstock.serverless.store.commits import Standing
from penstock.wire import subjects
from penstock.wire.serverless import (
    VERSION,
    DeadLetterMessage,
    FailureClass,
    InvocationResultMessage,
    State,
)

#: Project, invocation, worker and token.
Key: TypeAlias = tuple[str, str, str, bytes]

_log = logger(__name__)
_PAYLOAD_MAX: Final = 64 << 10
discarded = Counter(
    "penstock_messages_discarded", "Messages that changed nothing, by source and reason", ["source", "reason"]
)
security = Counter("penstock_security_events", "Messages that nobody honest sends, by reason", ["reason"])
_skew = Counter("penstock_result_clock_skew", "Results whose end is before their beginning")


@dataclass(frozen=True, slots=True)
class Read:
    """A message that is a result."""

    message: InvocationResultMessage
    ending: Ending

    @property
    def key(self) -> "Key":
        """Which attempt it says that it is of."""
        return self.ending.project_id, self.ending.id, self.ending.worker_id, self.ending.token


class Results:
    """Commits what the consumer of results brings; `lost` is told of workers that ended with an attempt."""

    def __init__(
        self,
        db: Database,
        bus: Bus,
        teller: Teller,
        dispatcher: Dispatcher,
        *,
        lost: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._db = db
        self._bus = bus
        self._teller = teller
        self._dispatcher = dispatcher
        self._lost = lost

    async def take(self, messages: Sequence[Msg]) -> None:
        """Commit, answer, acknowledge. What fails here comes again."""
        read: dict[Key, Read] = {}
        readable: list[Msg] = []
        for message in messages:
            try:
                found = _read(message)
            except Unreadable as error:
                await self._bury(message, error)
                continue
            readable.append(message)
            if found is not None:
                read.setdefault(found.key, found)
        if read:
            await self._commit(read)
        for message in readable:
            await message.ack()

    async def _commit(self, read: Mapping[Key, Read]) -> None:
        async with self._db.read() as conn:
            rows = await commits.commit(conn, [each.ending for each in read.values()])
        # Whoever else spoke of the same invocation, or under the same token, is not believed.
        done = {(row.project_id, row.id, row.worker_id, token): row for token, row in rows.items()}
        told = [(row, read[key].message) for key, row in done.items()]
        # First those that somebody waits for.
        told.sort(key=lambda each: not each[0].reply_to)
        await self._teller.answered(told)
        # A worker that its own sidecar cannot reach must not get the next attempt too.
        for row, message in told:
            if row.waiting and message.failureClass is FailureClass.WORKER_LOST:
                await self._lost(row.worker_id, row.error)
        self._dispatcher.freed(done.values())
        if len(done) < len(read):
            await self._explain([each for key, each in read.items() if key not in done])

    async def _bury(self, message: Msg, error: Unreadable) -> None:
        discarded.labels("result", error.failure).inc()
        await bury(self._bus, message, source="result", failure=error.failure, error=error.detail)
        await message.term()

    async def _explain(self, left: Sequence[Read]) -> None:
        """Say why some counted for nothing: they came late, or twice, or are nobody's."""
        async with self._db.read() as conn:
            known = await commits.standing(conn, [(each.ending.project_id, each.ending.id) for each in left])
        for each in left:
            found = known.get((each.ending.project_id, each.ending.id))
            reason = _reason(each.ending, found)
            discarded.labels("result", reason).inc()
            _log.info("result_discarded", reason=reason, invocation=each.ending.id, worker=each.ending.worker_id)
            if reason == _FOREIGN:
                security.labels(reason).inc()
            if found is None:
                await self._orphan(each)

    async def _orphan(self, each: Read) -> None:
        request = subjects.request_token(each.message.projectID, each.message.serverlessRequestID)
        letter = dead_letter(
            source="result",
            failure=FailureClass.ORPHAN_RESULT,
            error="there is no such invocation",
            subject=subjects.result(request),
            payload=b"",
        )
        letter = msgspec.structs.replace(
            letter, invocationID=each.ending.id, projectID=each.ending.project_id, workerName=each.ending.worker_id
        )
        await publish_dead_letter(self._bus, "result", request, letter)


_FOREIGN: Final = "foreign_worker"


def _reason(ending: Ending, found: Standing | None) -> str:
    """Why a result counted for nothing."""
    if found is None:
        return "orphan_result"
    if State(found.state) not in _OPEN:
        return "terminal"
    return _FOREIGN if found.token == ending.token and found.worker_id != ending.worker_id else "stale_attempt"


_PREFIX: Final = subjects.RESULTS.removesuffix("*")
_OPEN: Final = frozenset({State.QUEUED, State.DISPATCHING, State.RUNNING})


def _read(message: Msg) -> Read | None:
    """None when it is no result that could change anything."""
    if not message.subject.startswith(_PREFIX):
        # Delivered to our consumer under a subject that it does not ask for: a reply field was forged.
        security.labels("foreign_subject").inc()
        _log.warning("security_foreign_subject", subject=message.subject)
        return None
    result = reading.result(message.data)
    if message.subject != subjects.result(subjects.request_token(result.projectID, result.serverlessRequestID)):
        security.labels("foreign_function").inc()
        _log.warning("security_foreign_function", subject=message.subject, invocation=result.invocationID)
        return None
    if result.completedAt < result.startedAt:
        _skew.inc()
    ending = reading.ending(result)
    return Read(result, ending) if ending else None


def dead_letter(
    *, source: str, failure: FailureClass, error: str, subject: str, payload: bytes, deliveries: int = 0, seq: int = 0
) -> DeadLetterMessage:
    """What could not be done, for the queue's own watchers."""
    return DeadLetterMessage(
        version=VERSION,
        source=source,
        state=State.DEAD_LETTERED,
        failureClass=failure,
        originalSubject=subject,
        stream="OUT",
        failedAt=utc_now(),
        streamSequence=seq,
        deliveryCount=deliveries,
        error=error,
        payload=payload[:_PAYLOAD_MAX].decode(errors="replace"),
    )


async def bury(bus: Bus, message: Msg, *, source: str, failure: FailureClass, error: str) -> None:
    """Publish the dead letter of a message."""
    told = message.metadata
    letter = dead_letter(
        source=source,
        failure=failure,
        error=error,
        subject=message.subject,
        payload=message.data,
        deliveries=told.num_delivered or 0,
        seq=told.sequence.stream or 0,
    )
    await publish_dead_letter(bus, source, subjects.last_token(message.subject), letter)


async def publish_dead_letter(bus: Bus, source: str, request: str, letter: DeadLetterMessage) -> None:
    """To those who watch."""
    body = msgspec.json.encode(letter)
    message_id = f"dlq-{source}-{letter.streamSequence or letter.invocationID}"
    await bus.client.publish(subjects.dead_letter(source, request), body, headers={"Nats-Msg-Id": message_id})
