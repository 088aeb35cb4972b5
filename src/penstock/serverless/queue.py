"""Figures of the calls that wait for a worker."""

from prometheus_client import Gauge

from penstock.kit.db import Database
from penstock.serverless.store import reads

_age_s = Gauge("penstock_function_queue_age_seconds", "Age of the oldest call that waits for a worker.")


async def measure(db: Database) -> None:
    """Bring them up to date."""
    async with db.read() as conn:
        _age_s.set(await reads.queue_age_s(conn))
