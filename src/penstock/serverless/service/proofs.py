"""What workers are known by: their MAC keys, kept for a while, and the proofs under their reports."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from penstock.kit.db import Database
from penstock.serverless.store import workers
from penstock.wire.serverless import WorkerMetricMessage

_KEPT_MAX: Final = 100_000


class Keys:
    """The MAC keys of workers. A key that does not fit is looked up again once: the worker may have got another."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._kept: dict[str, bytes] = {}

    async def of(self, worker_id: str) -> bytes | None:
        """The key of a worker that is not gone."""
        if worker_id not in self._kept:
            await self._load([worker_id])
        return self._kept.get(worker_id)

    async def proved(self, messages: Sequence[WorkerMetricMessage]) -> list[WorkerMetricMessage]:
        """Those that their worker's own key has signed."""
        unknown = {message.workerName for message in messages if not self._fits(message)}
        if unknown:
            await self._load(sorted(unknown))
        return [message for message in messages if self._fits(message)]

    def _fits(self, message: WorkerMetricMessage) -> bool:
        key = self._kept.get(message.workerName)
        return key is not None and hmac.compare_digest(proof(key, message), message.proof)

    async def _load(self, worker_ids: Sequence[str]) -> None:
        if len(self._kept) > _KEPT_MAX:
            self._kept.clear()
        for worker_id in worker_ids:
            self._kept.pop(worker_id, None)
        async with self._db.read() as conn:
            self._kept.update(await workers.keys(conn, worker_ids))

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        self._kept.pop(worker_id, None)


def proof(key: bytes, message: WorkerMetricMessage) -> str:
    """What the sidecar of this worker would sign its report with."""
    text = f"{message.eventType}\0{message.reportedAt.isoformat()}\0{message.workerName}"
    return hmac.digest(key, text.encode(), hashlib.sha256).hex()
