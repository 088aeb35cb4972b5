"""Sends what is due: claim (short transaction), send (none), settle (short transaction, by the claim's number).

Whoever dies in between has sent it or not; the lease ends and another sends it again. So every event arrives at least
once, or fails for everyone to see. A receiver that hangs holds a few of the places, and after its first failure one.
"""

import asyncio
import time
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import msgspec
from prometheus_client import Counter, Histogram

from penstock.kit.db import Database, Tx
from penstock.kit.outward import Outward, Undelivered
from penstock.kit.telemetry import correlated, logger
from penstock.notices.model import Crowd, Due, Patience, WebhookState
from penstock.notices.ports import Vault
from penstock.notices.service import pause, secret_name
from penstock.notices.store import deliveries, webhooks
from penstock.wire import signature
from penstock.wire.events import Envelope

POLL_S: Final = 1.0
_DETAIL_CHARS_MAX: Final = 300
_USER_AGENT: Final = "Penstock-Webhooks/1"

_log = logger(__name__)
_sent = Counter("penstock_webhook_attempts_total", "Requests to webhooks, by what became of them.", ("outcome",))
_taken_s = Histogram(
    "penstock_webhook_attempt_seconds",
    "How long webhooks took to answer or to fail.",
    buckets=(0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
_paused = Counter("penstock_webhooks_paused_total", "Webhooks that were paused because they failed for too long.")


class Sender:
    """The deliveries that this process has under way."""

    def __init__(
        self, db: Database, outward: Outward, vault: Vault, patience: Patience, crowd: Crowd | None = None
    ) -> None:
        self._db = db
        self._outward = outward
        self._vault = vault
        self._patience = patience
        self._crowd = crowd or Crowd()
        self._sending: set[asyncio.Task[None]] = set()
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """There may be something to send."""
        self._woken.set()

    async def keep(self) -> None:
        """Start what is due and there is room for, then wait until something may have changed."""
        self._woken.clear()
        await self.start()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), POLL_S)

    async def start(self) -> int:
        """How many were claimed and are being sent now."""
        room = self._crowd.at_once - len(self._sending)
        if room <= 0:
            return 0
        async with self._db.read() as conn:
            if not await deliveries.any_pending(conn):
                return 0
        async with self._db.transaction() as tx:
            claimed = await deliveries.claim(tx, self._crowd, room=room, lease_s=self._patience.lease_s)
        for due in claimed:
            task = asyncio.create_task(self._supervise(due), name=f"deliver-{due.id}")
            self._sending.add(task)
            task.add_done_callback(self._ended)
        return len(claimed)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._woken.set()

    async def settle(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._sending)

    async def close(self) -> None:
        """Drop what is under way; it is sent again when its lease has ended."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _supervise(self, due: Due) -> None:
        try:
            with correlated(due.correlation_id, project_id=due.webhook_project_id, webhook_id=due.webhook_id):
                await self._deliver(due)
        except Exception:  # noqa: BLE001 - supervises one delivery: the others go on, and its lease ends
            _log.exception("webhook_delivery_broken", delivery_id=due.id)

    async def _deliver(self, due: Due) -> None:
        body, headers = self._message(due)
        started = time.monotonic()
        try:
            answer = await self._outward.post(due.url, body, headers)
        except Undelivered as error:
            _sent.labels(error.failure).inc()
            await self._failed(due, error)
        else:
            _sent.labels("delivered").inc()
            async with self._db.read() as conn:
                await deliveries.delivered(conn, due, status=answer.status)
        finally:
            _taken_s.observe(time.monotonic() - started)

    def _message(self, due: Due) -> tuple[bytes, dict[str, str]]:
        body = msgspec.json.encode(_envelope(due))
        secrets = [
            self._vault.unseal(
                project_id=due.webhook_project_id,
                name=secret_name(due.webhook_id, each.version),
                key_id=each.key_id,
                sealed=each.content,
            ).decode()
            for each in due.secrets
        ]
        headers = {
            "Content-Type": "application/json",
            "User-Agent": _USER_AGENT,
            signature.EVENT_ID_HEADER: due.event_id,
            signature.HEADER: signature.sign(body, secrets, at=int(time.time())),
        }
        return body, headers

    async def _failed(self, due: Due, error: Undelivered) -> None:
        host = urlsplit(due.url).hostname
        _log.info("webhook_failed", delivery_id=due.id, host=host, failure=error.failure, attempts=due.attempts)
        async with self._db.transaction() as tx:
            trouble = await deliveries.failed(
                tx,
                due,
                self._patience,
                error=error.failure,
                detail=error.why[:_DETAIL_CHARS_MAX],
                status=error.status,
            )
            if trouble is None:
                return
            failures, failing_s = trouble
            if failures >= self._patience.failures_max or failing_s >= self._patience.give_up_s:
                await self._pause(tx, due, f"failed {failures} times in a row, the last time with {error.failure}")

    async def _pause(self, tx: Tx, due: Due, reason: str) -> None:
        webhook = await webhooks.find(tx, due.webhook_project_id, due.webhook_id, lock=True)
        if webhook is None or webhook.state is not WebhookState.ACTIVE:
            return
        await pause(tx, webhook, reason)
        _paused.inc()
        _log.warning("webhook_paused", reason=reason)


def _envelope(due: Due) -> Envelope:
    return Envelope(
        event_id=due.event_id,
        event_type=due.event_type,
        aggregate_id=due.aggregate_id,
        version=due.version,
        organisation_id=due.organisation_id,
        project_id=due.project_id,
        correlation_id=due.correlation_id,
        occurred_at=due.occurred_at,
        payload=msgspec.Raw(msgspec.json.encode(due.payload)),
    )
