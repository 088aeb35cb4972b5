"""Ends of attempts, from the queue to the rows, and then to whoever waits. Batches commit by one statement each."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec
from nats.aio.msg import Msg
from prometheus_client import Counter

from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.telemetry import logger
from penstock.serverless.model import Ending
from penstock.serverless.service import burying, reading
from penstock.serverless.service.burying import Foreign, Unreadable, discarded, security
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.telling import Teller
from penstock.serverless.store import commits
from penstock.serverless.store.commits import Standing
from penstock.wire import subjects
from penstock.wire.serverless import (
    FailureClass,
    InvocationResultMessage,
    State,
)

#: Project, invocation, worker and token.
Key: TypeAlias = tuple[str, str, str, bytes]

_log = logger(__name__)
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
        """Commit, answer, acknowledge; then bury what cannot be read. What fails here comes again, and what was
        committed by then changes nothing the second time: an attempt ends once."""
        read: dict[Key, Read] = {}
        readable: list[Msg] = []
        refused: list[tuple[Msg, Unreadable | Foreign]] = []
        for message in messages:
            try:
                found = _read(message)
            except (Unreadable, Foreign) as error:
                refused.append((message, error))
                continue
            readable.append(message)
            if found is not None:
                read.setdefault(found.key, found)
        if read:
            await self._commit(read)
        for message in readable:
            await message.ack()
        for message, error in refused:
            await burying.refuse(self._bus, message, error)

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
                await self._publish_letter(each, FailureClass.FOREIGN_MESSAGE, "it names another worker")
            if found is None:
                await self._publish_letter(each, FailureClass.ORPHAN_RESULT, "there is no such invocation")

    async def _publish_letter(self, each: Read, failure: FailureClass, error: str) -> None:
        request = subjects.request_token(each.message.projectID, each.message.serverlessRequestID)
        letter = burying.dead_letter(subjects.result(request), b"", failure=failure, error=error)
        letter = msgspec.structs.replace(
            letter, invocationID=each.ending.id, projectID=each.ending.project_id, workerName=each.ending.worker_id
        )
        await burying.publish(self._bus, letter)


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
        raise Foreign("foreign_subject")
    result = reading.result(message.data)
    if message.subject != subjects.result(subjects.request_token(result.projectID, result.serverlessRequestID)):
        raise Foreign("foreign_function")
    if result.completedAt < result.startedAt:
        _skew.inc()
    ending = reading.ending(result)
    return Read(result, ending) if ending else None
