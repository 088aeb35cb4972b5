"""What one worker's sidecar reports about it. What decides whether a worker is used is told until the stream has it;
everything else is told once, and found out by others if it is lost."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from nats.errors import Error

from penstock.kit.bus import Bus
from penstock.kit.clock import backoff_s
from penstock.kit.publish import NotStored
from penstock.kit.telemetry import logger
from penstock.node.sidecar.answers import Outcome
from penstock.node.sidecar.letters import Letters
from penstock.wire.serverless import ERROR_BYTES_MAX, MetricType, State, WorkerDispatchMessage

_log = logger(__name__)
#: Handlers that were called within this time are told of together, and those that have ended by then not at all.
_STARTS_S: Final = 0.02
_AGAIN_CAP_S: Final = 1.0
_STARTS_MAX: Final = 1000
#: One in so many failures to tell something is logged.
_SAY_EVERY: Final = 10


class Reports:
    """`in_hand` says which attempts the worker has, `running` whether one of them has not ended."""

    def __init__(
        self,
        letters: Letters,
        bus: Callable[[], Bus],
        *,
        in_hand: Callable[[], list[tuple[str, int]]],
        running: Callable[[tuple[str, int]], bool],
    ) -> None:
        self._letters = letters
        self._bus = bus
        self._in_hand = in_hand
        self._running = running
        self._starts: list[tuple[str, int]] = []
        self._telling: asyncio.Task[None] | None = None

    async def registered(self) -> None:
        """The framework is well."""
        await self._until_stored(MetricType.REGISTERED, "")

    async def unhealthy(self, reason: str) -> None:
        """The framework will never be."""
        await self._until_stored(MetricType.UNHEALTHY, reason[:ERROR_BYTES_MAX])

    async def heartbeat(self) -> None:
        """It is still there, with these attempts."""
        in_hand = self._in_hand()
        body = self._letters.metric(MetricType.HEARTBEAT, inflight=len(in_hand), attempts=in_hand)
        await self._tell(body, self._id(MetricType.HEARTBEAT))

    def started(self, key: tuple[str, int]) -> None:
        """A handler was called."""
        self._starts.append(key)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().create_task(self._tell_starts())

    async def finished(self, dispatch: WorkerDispatchMessage, outcome: Outcome) -> None:
        """An attempt ended."""
        well = outcome.state is State.SUCCEEDED
        kind = MetricType.INVOCATION_FINISHED if well else MetricType.INVOCATION_FAILED
        body = self._letters.metric(
            kind,
            inflight=len(self._in_hand()),
            invocation_id=dispatch.invocationID,
            status=outcome.status,
            error=outcome.failure or "",
        )
        await self._tell(body, f"metric-{dispatch.workerName}-{dispatch.invocationID}-{dispatch.attempt}-{kind}")

    def close(self) -> None:
        """No more of it."""
        if self._telling is not None:
            self._telling.cancel()

    async def _tell_starts(self) -> None:
        await asyncio.sleep(_STARTS_S)
        self._telling = None
        starts, self._starts = [key for key in self._starts if self._running(key)][:_STARTS_MAX], []
        if starts:
            body = self._letters.metric(
                MetricType.INVOCATION_STARTED,
                inflight=len(self._in_hand()),
                invocation_id=starts[0][0],
                attempts=starts,
            )
            await self._tell(body, self._id(MetricType.INVOCATION_STARTED))

    async def _tell(self, body: bytes, message_id: str) -> None:
        client = self._bus().client
        with suppress(Error):
            if client.is_connected:
                await client.publish(self._letters.metrics, body, headers={"Nats-Msg-Id": message_id})

    async def _until_stored(self, kind: MetricType, error: str) -> None:
        failures = 0
        while True:
            body = self._letters.metric(kind, inflight=len(self._in_hand()), error=error)
            try:
                await self._bus().publish(self._letters.metrics, body, msg_id=self._id(kind))
            except (NotStored, Error) as refused:
                failures += 1
                if failures % _SAY_EVERY == 0:
                    _log.warning("report_not_stored", worker=self._letters.worker, kind=kind, error=repr(refused))
                await asyncio.sleep(backoff_s(failures, base_s=0.05, cap_s=_AGAIN_CAP_S))
            else:
                return

    def _id(self, kind: MetricType) -> str:
        return f"metric-{self._letters.worker}-{kind}-{time.time_ns()}"
