"""Outbox → JetStream, in order per aggregate, with any number of relays.

A relay works on the shards whose advisory locks it gets. It reads their unpublished rows in order, publishes them in
waves (no aggregate twice in a wave, so a lost message can never be overtaken by its successor) with the event id as
message id, and takes what was acknowledged off the list. A failure holds back that aggregate only. A row that the
server refuses `ATTEMPTS_MAX` times becomes a dead letter, and its aggregate waits until an operator requeues or
discards it.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

import msgspec
from nats.errors import MaxPayloadError
from nats.js.api import PubAck
from nats.js.errors import APIError, ServerError, ServiceUnavailableError
from prometheus_client import Counter, Gauge, Histogram

from penstock.kit.bus import EVENTS, Bus
from penstock.kit.clock import backoff_s, utc_now
from penstock.kit.db import Database, Reader, Row
from penstock.kit.outbox import SHARDS
from penstock.kit.process import heed_cancellation
from penstock.kit.streamguard import StreamGuard
from penstock.kit.telemetry import logger, span
from penstock.wire import subjects
from penstock.wire.events import Envelope

BATCH: Final = 2000
LANES: Final = 2
ATTEMPTS_MAX: Final = 5
IDLE_POLL_S: Final = 1.0
_LOCKS: Final = 7001
_ACK_TIMEOUT_S: Final = 5.0
_CONFIRM_TIMEOUT_S: Final = 2.0
_PAYLOAD_BYTES_MAX: Final = (EVENTS.max_msg_size or 0) - 1024

_log = logger(__name__)
_encoder = msgspec.json.Encoder()
_published = Counter("penstock_outbox_published_total", "Events published by this relay")
_refused = Counter("penstock_outbox_refused_total", "Publishes that the server refused")
_dead = Gauge("penstock_outbox_dead_letters", "Events that wait for an operator")
_waiting_s = Gauge("penstock_outbox_waiting_seconds", "Age of the oldest event that waits to be published")
_lag = Histogram(
    "penstock_outbox_lag_seconds",
    "From the event's transaction to its acknowledgement by JetStream",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5, 30, 300),
)

_READ = """
select o.seq, event_id, type, o.aggregate_id, version, organisation_id, project_id, correlation_id,
       payload::text as payload, occurred_at
  from kit.waiting w join kit.outbox o using (seq)
 where w.shard = any($1) and not w.dead
   and not exists (select 1 from kit.waiting d where d.aggregate_id = w.aggregate_id and d.dead)
 order by w.seq
 limit $2
"""
_REFUSE = """
update kit.waiting set attempts = attempts + 1, last_error = $2, dead = attempts + 1 >= $3 where seq = $1
returning dead
"""
_MEASURE = """
select (select count(*) from kit.waiting where dead) as dead,
       coalesce((select extract(epoch from clock_timestamp() - occurred_at)::float8 from kit.outbox
                  where seq = (select min(seq) from kit.waiting where not dead)), 0) as waiting_s
"""


class Relay:
    """Drains the shards that it can lock."""

    def __init__(self, db: Database, bus: Bus, guard: StreamGuard | None = None) -> None:
        self._db = db
        self._bus = bus
        self._guard = guard
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Drain for ever: at once when woken, and every second in case a hint was lost."""
        await self._bus.on_hint(subjects.OUTBOX, self._woken)
        failures = 0
        while True:
            self._wake.clear()
            try:
                while await self.drain():
                    pass
                failures = 0
            except Exception:  # noqa: BLE001 (the loop outlives servers that come and go)
                _log.exception("relay_failed")
                failures += 1
            heed_cancellation()
            await self._sleep(IDLE_POLL_S if not failures else backoff_s(failures))

    async def _woken(self, _: str, __: bytes) -> None:
        self._wake.set()

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return

    async def drain(self) -> int:
        """Publish one batch of the shards that are free; how many rows were published. While one lane waits for
        Postgres, the other publishes."""
        return sum(await asyncio.gather(*(self._drain_lane(lane) for lane in range(LANES))))

    async def _drain_lane(self, lane: int) -> int:
        async with self._db.read() as conn:
            locked = await _lock_shards(conn, lane)
            try:
                rows = await conn.fetch(_READ, locked, BATCH)
                if not rows:
                    return 0
                with span("relay.publish", events=len(rows)):
                    return await self._publish(conn, rows)
            finally:
                await conn.execute("select pg_advisory_unlock_all()")

    async def _publish(self, conn: Reader, rows: list[Row]) -> int:
        held: set[str] = set()
        sent: list[Row] = []
        for wave in waves(rows):
            ready = [row for row in wave if row["aggregate_id"] not in held]
            outcomes = await self._publish_wave(ready)
            for row, error in zip(ready, outcomes, strict=True):
                if error is None:
                    sent.append(row)
                else:
                    held.add(row["aggregate_id"])
                    await _record_refusal(conn, row, error)
            await self._judge(outcomes)
        await _mark(conn, sent)
        return len(sent)

    async def _judge(self, outcomes: Sequence[Exception | None]) -> None:
        """Tell whether the stream stores: one message that it took says so."""
        silences = [error for error in outcomes if isinstance(error, TimeoutError)]
        if self._guard is None or not outcomes:
            return
        if None in outcomes:
            await self._guard.stored()
        elif silences:
            await self._guard.refused(silences[0])

    async def _publish_wave(self, rows: Sequence[Row]) -> list[Exception | None]:
        """Publish without waiting in between, then wait for all; none means acknowledged."""
        futures = [await self._send(row) for row in rows]
        with suppress(TimeoutError):
            async with asyncio.timeout(_ACK_TIMEOUT_S):
                for future in futures:
                    if isinstance(future, asyncio.Future):
                        await future
        return await self._outcomes(rows, futures)

    async def _outcomes(
        self, rows: Sequence[Row], futures: "Sequence[asyncio.Future[PubAck] | Exception]"
    ) -> list[Exception | None]:
        """None when acknowledged. A pipelined publish never tells of a refusal; asked again alone, the server does.
        Where the server is silent, the rest is left for the next pass."""
        outcomes: list[Exception | None] = []
        silent: Exception | None = None
        for row, future in zip(rows, futures, strict=True):
            if isinstance(future, Exception):
                outcomes.append(future)
            elif future.done() and not future.cancelled():
                outcomes.append(None)
            else:
                future.cancel()
                outcomes.append(silent or await self._confirm(row))
                silent = outcomes[-1] if isinstance(outcomes[-1], TimeoutError) else None
        return outcomes

    async def _send(self, row: Row) -> "asyncio.Future[PubAck] | Exception":
        try:
            payload = encode(row)
            if len(payload) > _PAYLOAD_BYTES_MAX:
                return MaxPayloadError()
            return await self._bus.js.publish_async(
                subjects.event(row["type"]),
                payload,
                stream=EVENTS.name,
                headers={"Nats-Msg-Id": row["event_id"]},
            )
        except Exception as error:  # noqa: BLE001 (one row's failure is that row's outcome)
            return error

    async def _confirm(self, row: Row) -> Exception | None:
        try:
            await self._bus.js.publish(
                subjects.event(row["type"]),
                encode(row),
                timeout=_CONFIRM_TIMEOUT_S,
                stream=EVENTS.name,
                headers={"Nats-Msg-Id": row["event_id"]},
            )
        except Exception as error:  # noqa: BLE001 (one row's failure is that row's outcome)
            return error
        return None


async def _lock_shards(conn: Reader, lane: int) -> list[int]:
    rows = await conn.fetch(
        "select shard from generate_series($2::int, $3 - 1, $4) shard where pg_try_advisory_lock($1, shard)",
        _LOCKS,
        lane,
        SHARDS,
        LANES,
    )
    return [row["shard"] for row in rows]


async def _mark(conn: Reader, sent: list[Row]) -> None:
    now = utc_now()
    for row in sent:
        _lag.observe((now - row["occurred_at"]).total_seconds())
    await conn.execute("delete from kit.waiting where seq = any($1)", [row["seq"] for row in sent])
    _published.inc(len(sent))


async def measure(db: Database) -> None:
    """Bring the figures of what waits up to date."""
    async with db.read() as conn:
        row = await conn.fetchrow(_MEASURE)
    assert row is not None
    _dead.set(row["dead"])
    _waiting_s.set(row["waiting_s"])


async def _record_refusal(conn: Reader, row: Row, error: Exception) -> None:
    """Count what the server refused for good; an outage counts for nothing."""
    if not isinstance(error, APIError | MaxPayloadError) or isinstance(error, ServerError | ServiceUnavailableError):
        _log.info("publish_deferred", event_id=row["event_id"], error=repr(error))
        return
    _refused.inc()
    dead = await conn.fetchval(_REFUSE, row["seq"], repr(error)[:500], ATTEMPTS_MAX)
    _log.warning("publish_refused", event_id=row["event_id"], error=repr(error), dead=dead)


def waves(rows: Iterable[Row]) -> list[list[Row]]:
    """Split so that the n-th row of each aggregate is in the n-th wave."""
    seen: dict[str, int] = {}
    split: list[list[Row]] = []
    for row in rows:
        depth = seen.get(row["aggregate_id"], 0)
        seen[row["aggregate_id"]] = depth + 1
        if depth == len(split):
            split.append([])
        split[depth].append(row)
    return split


def encode(row: Row) -> bytes:
    """The envelope as it goes on the wire."""
    return _encoder.encode(
        Envelope(
            event_id=row["event_id"],
            event_type=row["type"],
            aggregate_id=row["aggregate_id"],
            version=row["version"],
            organisation_id=row["organisation_id"],
            project_id=row["project_id"],
            correlation_id=row["correlation_id"],
            occurred_at=row["occurred_at"],
            payload=msgspec.Raw(row["payload"].encode()),
        )
    )
