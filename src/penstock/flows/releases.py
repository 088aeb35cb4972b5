"""Carries out what billing asks for: everything that nobody can pay for any more is released, gracefully.

A request is carried out in batches, each one transaction, and is done with the last of them. It is for what was there
when it was made: whoever pays and starts anew before anybody gets to it is spared.
"""

from dataclasses import dataclass
from typing import Final

from penstock.billing.service import releases
from penstock.compute.service.release import Release
from penstock.kit import audit
from penstock.kit.db import Database
from penstock.kit.telemetry import correlated, logger

_log = logger(__name__)
_ACTOR: Final = audit.system("biller")
BATCH: Final = 200


@dataclass(frozen=True, slots=True)
class Releases:
    """Takes requests until there are none."""

    db: Database
    release: Release

    async def sweep(self) -> None:
        """All that are open."""
        while await self._next():
            pass

    async def _next(self) -> bool:
        async with self.db.transaction() as tx:
            asked = await releases.take(tx)
            if asked is None:
                return False
            with correlated(asked.correlation_id):
                released = await self.release.payer(
                    tx,
                    _ACTOR,
                    asked.organisation_id,
                    asked.reason,
                    project_id=asked.project_id,
                    key_id=asked.key_id,
                    created_until=asked.requested_at,
                    limit=BATCH,
                )
                if released < BATCH:
                    await releases.finish(tx, asked)
                _log.info("force_released", organisation_id=asked.organisation_id, allocations=released)
        return True
