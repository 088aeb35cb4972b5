"""Heartbeats of all links of a gateway, stored together: one statement a second, however many nodes there are.

The database's clock counts. A node's own clock is only compared with it, and one that is far off is told of in the log
and in the metrics.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from penstock.fleet import gpus, metrics
from penstock.fleet.link import Link, Links, Report
from penstock.fleet.store import gpus as gpu_rows
from penstock.fleet.store import links as link_rows
from penstock.fleet.store import nodes as node_rows
from penstock.fleet.store import slots as slot_rows
from penstock.fleet.store.links import Beat, LinkKey, UnitRow
from penstock.kit.db import Database, Tx
from penstock.kit.telemetry import logger
from penstock.wire import subjects
from penstock.wire.link import TROUBLE_CHARS_MAX, GpuReading, Heartbeat, HeartbeatAck

#: So often what sensors showed is stored.
READINGS_S: Final = 10.0
SKEW_ALARM_S: Final = 60.0
_SKEW_MAX_S: Final = 1e9

_log = logger(__name__)
_encoder = msgspec.msgpack.Encoder()


class DatabaseClock:
    """What the database's clock shows now, as far as this process knows."""

    def __init__(self) -> None:
        self._at = datetime.now(UTC)
        self._read = time.monotonic()

    def set(self, at: datetime) -> None:
        """The database just said so."""
        self._at, self._read = at, time.monotonic()

    def now(self) -> datetime:
        """Then, and the time since."""
        return self._at + timedelta(seconds=time.monotonic() - self._read)


class Heartbeats:
    """Collects and stores heartbeats."""

    def __init__(self, db: Database, links: Links, clock: DatabaseClock, *, accepts_per_s: float) -> None:
        self._db = db
        self._links = links
        self._clock = clock
        #: Link → the newest readings of its node's GPUs that are not yet in the database.
        self._readings: dict[LinkKey, list[GpuReading]] = {}
        self._accepts_per_s = accepts_per_s

    def receive(self, link: Link, heartbeat: Heartbeat) -> None:
        """Keep the newest of the link until the next `flush`."""
        skew_s = skew(heartbeat.sent_at, self._clock.now())
        metrics.SKEW_S.labels(link.key.node_id).set(skew_s)
        far = abs(skew_s) > SKEW_ALARM_S
        if far and not link.skewed:
            _log.warning("node_clock_skewed", node_id=link.key.node_id, skew_s=round(skew_s, 1))
        link.skewed = far
        link.heartbeat = (heartbeat, skew_s)
        if heartbeat.readings:
            self._readings[link.key] = heartbeat.readings

    async def flush(self) -> None:
        """Store what came since the last time. A link that was superseded or revoked is passed over."""
        batch: list[tuple[Link, Heartbeat, float]] = []
        for link in self._links:
            if link.heartbeat is not None:
                batch.append((link, *link.heartbeat))
                link.heartbeat = None
        if not batch:
            return
        async with self._db.transaction() as tx:
            beats = [
                Beat(
                    node_id=link.key.node_id,
                    link_id=link.key.link_id,
                    skew_s=skew_s,
                    trouble=heartbeat.trouble.replace("\0", "")[:TROUBLE_CHARS_MAX],
                )
                for link, heartbeat, skew_s in batch
            ]
            seen = await link_rows.beat(tx, beats, listed=True)
            counted = [(link, heartbeat) for link, heartbeat, _ in batch if link.key.node_id in seen]
            await _store_reports(tx, [pair for pair in counted if _report(pair[1]) != pair[0].stored])
        for link, heartbeat in counted:
            link.stored = _report(heartbeat)
        if counted:
            await self._store_serving(counted)
            self._clock.set(max(seen.values()))
            await self._acknowledge([link for link, _ in counted])

    async def _store_serving(self, counted: Sequence[tuple[Link, Heartbeat]]) -> None:
        """In a transaction of its own: who connects locks the node before its heartbeat."""
        said = {link: heartbeat.serves_functions for link, heartbeat in counted}
        news = {link: serves for link, serves in said.items() if link.serves_functions is not serves}
        if not news:
            return
        async with self._db.transaction() as tx:
            changed = await node_rows.serve(tx, {link.key: serves for link, serves in news.items()})
            if any(changed.values()):
                tx.hint(subjects.CAPACITY)
        for link, serves in news.items():
            link.serves_functions = serves
        for node_id, serves in changed.items():
            _log.info("node_serves_functions", node_id=node_id, serves=serves)

    async def _acknowledge(self, links: Sequence[Link]) -> None:
        """All are told the same."""
        spread_s = self._links.spread_s(self._accepts_per_s)
        frame = _encoder.encode(HeartbeatAck(server_time=self._clock.now(), spread_s=spread_s))
        for link in links:
            await link.socket.post(frame)

    async def flush_readings(self) -> None:
        """Store what sensors showed last, of all nodes in one statement. Nothing depends on it: a lost one is lost."""
        newest, self._readings = self._readings, {}
        rows = [(key.node_id, key.link_id, reading) for key, readings in newest.items() for reading in readings]
        if rows:
            async with self._db.read() as conn:
                await gpu_rows.store_readings(conn, rows)


def _report(heartbeat: Heartbeat) -> Report:
    return heartbeat.units, heartbeat.gpus


async def _store_reports(tx: Tx, changed: Sequence[tuple[Link, Heartbeat]]) -> None:
    if not changed:
        return
    units = [
        UnitRow(link.key.node_id, unit.unit_id, unit.state.value, unit.exit_code, unit.exit_class)
        for link, heartbeat in changed
        for unit in heartbeat.units
    ]
    await link_rows.replace_units(tx, [link.key.node_id for link, _ in changed], units)
    reports = [
        (link.key.node_id, gpu.uuid, gpu.healthy, gpu.detail) for link, heartbeat in changed for gpu in heartbeat.gpus
    ]
    if reports and await slot_rows.report_health(tx, reports):
        tx.hint(subjects.CAPACITY)
    await gpus.take_reports(tx, [(link.key.node_id, gpu) for link, heartbeat in changed for gpu in heartbeat.gpus])


def skew(sent_at: datetime, now: datetime) -> float:
    """How far the sender's clock is ahead, in seconds."""
    aware = sent_at if sent_at.tzinfo is not None else sent_at.replace(tzinfo=UTC)
    seconds = (aware - now).total_seconds()
    return max(-_SKEW_MAX_S, min(_SKEW_MAX_S, seconds))
