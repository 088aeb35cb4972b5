"""What sidecars report: workers that are ready, alive, or of no use, and handlers that were called.

Only a report with its worker's proof counts, and none brings back a worker that is gone.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from nats.aio.msg import Msg

from penstock.kit.bus import Bus
from penstock.kit.clock import utc_now
from penstock.kit.db import Database
from penstock.serverless.model import Limits
from penstock.serverless.service import burying
from penstock.serverless.service.burying import Foreign, Unreadable, security
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.wardens import Warden
from penstock.serverless.store import commits, workers
from penstock.wire import subjects
from penstock.wire.serverless import VERSION, FailureClass, MetricType, WorkerMetricMessage
from penstock.wire.unreadable import UNREADABLE

_decode = msgspec.json.Decoder(WorkerMetricMessage).decode
_ALIVE: Final = frozenset({MetricType.REGISTERED, MetricType.HEARTBEAT})
#: For those who watch the queue; to us the result itself says more.
_TOLD_OTHERS: Final = frozenset({MetricType.INVOCATION_FINISHED, MetricType.INVOCATION_FAILED})


class Reports:
    """Applies what the consumer of metrics brings."""

    def __init__(
        self, db: Database, bus: Bus, keys: Keys, warden: Warden, dispatcher: Dispatcher, limits: Limits
    ) -> None:
        self._db = db
        self._bus = bus
        self._keys = keys
        self._warden = warden
        self._dispatcher = dispatcher
        self._limits = limits

    async def take(self, messages: Sequence[Msg]) -> None:
        """Apply and acknowledge; then bury what cannot be read or is forged."""
        read: list[tuple[Msg, WorkerMetricMessage]] = []
        done: list[Msg] = []
        refused: list[tuple[Msg, Unreadable | Foreign]] = []
        for message in messages:
            try:
                report = _read(message)
            except (Unreadable, Foreign) as error:
                refused.append((message, error))
                continue
            if report.eventType in _TOLD_OTHERS:
                done.append(message)
            else:
                read.append((message, report))
        proved, forged = await self._proved(read)
        # Together they are as old as the oldest: a worker says everything again soon.
        await self._apply([report for _, report in proved], age_s=max(map(_age_s, messages)))
        for message in (*done, *(message for message, _ in proved)):
            await message.ack()
        for message, error in (*refused, *((message, Foreign("metric_proof")) for message in forged)):
            await burying.refuse(self._bus, message, error)

    async def _proved(
        self, read: list[tuple[Msg, WorkerMetricMessage]]
    ) -> tuple[list[tuple[Msg, WorkerMetricMessage]], list[Msg]]:
        """Those with their worker's proof, and the forged ones: under another key than their worker's. A worker that
        is gone has no key, and may well not know it yet."""
        proved = await self._keys.proved([report for _, report in read])
        if len(proved) == len(read):
            return read, []
        known = set(map(id, proved))
        forged: list[Msg] = []
        for message, report in read:
            if id(report) not in known and await self._keys.of(report.workerName) is not None:
                forged.append(message)
            elif id(report) not in known:
                security.labels("metric_proof").inc()
                await message.ack()
        return [(message, report) for message, report in read if id(report) in known], forged

    async def _apply(self, reports: Sequence[WorkerMetricMessage], *, age_s: float) -> None:
        await self._started([each for each in reports if each.eventType is MetricType.INVOCATION_STARTED])
        heard = [each for each in reports if each.eventType in _ALIVE]
        await self._alive(heard)
        for each in reports:
            if each.eventType is MetricType.UNHEALTHY:
                await self._warden.unhealthy(each.workerName, each.error)
        for each in {each.workerName: each for each in heard if each.eventType is MetricType.HEARTBEAT}.values():
            await self._warden.compare(each, age_s=age_s)

    async def _alive(self, heard: Sequence[WorkerMetricMessage]) -> None:
        if not heard:
            return
        names = sorted({each.workerName for each in heard})
        async with self._db.read() as conn:
            functions = await workers.alive(conn, names, ready=names, lease_s=self._limits.lease_s)
            if functions:
                await workers.ready(conn, functions)
                await workers.switch(conn, functions)
        self._dispatcher.point(functions)

    async def _started(self, reports: Sequence[WorkerMetricMessage]) -> None:
        attempts = [
            (each.workerNamespace, invocation_id, each.workerName, attempt)
            for each in reports
            for invocation_id, attempt in each.attempts
        ]
        if attempts:
            async with self._db.read() as conn:
                await commits.started(conn, attempts)


def _read(message: Msg) -> WorkerMetricMessage:
    try:
        report = _decode(message.data)
    except UNREADABLE as error:
        raise Unreadable(FailureClass.INVALID_METRIC, str(error)) from error
    if report.version != VERSION:
        raise Unreadable(FailureClass.UNSUPPORTED_VERSION, f"version {report.version[:32]!r} is not understood")
    project_id = report.projectID or report.workerNamespace
    if message.subject != subjects.metrics(subjects.request_token(project_id, report.serverlessRequestID)):
        raise Foreign("foreign_metric")
    if not _can_be_kept(report):
        raise Unreadable(FailureClass.INVALID_METRIC, "a zero byte in a name, or an attempt out of range")
    return report


def _can_be_kept(report: WorkerMetricMessage) -> bool:
    """Postgres knows neither zero bytes nor numbers of any size; nobody honest sends them."""
    names = (report.workerName, report.workerNamespace, *(invocation_id for invocation_id, _ in report.attempts))
    return not any("\0" in name for name in names) and all(0 <= n < 1 << 31 for _, n in report.attempts)


def _age_s(message: Msg) -> float:
    return (utc_now() - message.metadata.timestamp).total_seconds()
