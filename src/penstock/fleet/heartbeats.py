"""Heartbeats of all links of a gateway, stored together: one statement a second, however many nodes there are.

The database's clock counts. A node's own clock is only compared with it, and one that is far off is told of in the log
and in the metrics.
"""

import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.fleet import metrics
from penstock.fleet.link import Link, Links, Report
from penstock.fleet.store import links as link_rows
from penstock.fleet.store import slots as slot_rows
from penstock.fleet.store.links import UnitRow
from penstock.kit.db import Database, Tx
from penstock.kit.telemetry import logger
from penstock.wire import subjects
from penstock.wire.link import Heartbeat

SKEW_ALARM_S: Final = 60.0
_SKEW_MAX_S: Final = 1e9

_log = logger(__name__)


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

    def __init__(self, db: Database, links: Links, clock: DatabaseClock) -> None:
        self._db = db
        self._links = links
        self._clock = clock

    def receive(self, link: Link, heartbeat: Heartbeat) -> None:
        """Keep the newest of the link until the next `flush`."""
        skew_s = skew(heartbeat.sent_at, self._clock.now())
        metrics.SKEW_S.labels(link.key.node_id).set(skew_s)
        far = abs(skew_s) > SKEW_ALARM_S
        if far and not link.skewed:
            _log.warning("node_clock_skewed", node_id=link.key.node_id, skew_s=round(skew_s, 1))
        link.skewed = far
        link.heartbeat = (heartbeat, skew_s)

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
            seen = await link_rows.beat(tx, [(link.key.node_id, link.key.link_id, skew_s) for link, _, skew_s in batch])
            counted = [(link, heartbeat) for link, heartbeat, _ in batch if link.key.node_id in seen]
            await _store_reports(tx, [pair for pair in counted if _report(pair[1]) != pair[0].stored])
        for link, heartbeat in counted:
            link.stored = _report(heartbeat)
            self._clock.set(seen[link.key.node_id])
            link.acknowledge(self._clock.now())


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


def skew(sent_at: datetime, now: datetime) -> float:
    """How far the sender's clock is ahead, in seconds."""
    aware = sent_at if sent_at.tzinfo is not None else sent_at.replace(tzinfo=UTC)
    seconds = (aware - now).total_seconds()
    return max(-_SKEW_MAX_S, min(_SKEW_MAX_S, seconds))
