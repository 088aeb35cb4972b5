"""The meter: charges every window that has ended, to everybody, once.

Any number of billers may run. The one whose turn it is locks the row of progress, and charges in one transaction no
more windows than make about `USES_MAX` usage rows: after a long absence it catches up step by step. Database time
decides.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.billing import metrics
from penstock.billing.model import Accrued
from penstock.billing.ports import Allocations
from penstock.billing.service.giveback import give_back
from penstock.billing.store import accrual
from penstock.billing.store.accrual import Excess
from penstock.kit.db import Database, Tx

WINDOWS_MAX: Final = 180
#: A minute's work or so: a step that took longer than a command may would never end.
USES_MAX: Final = 2_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Accrue:
    """The use case, with what it asks of others."""

    allocations: Allocations
    window: timedelta = timedelta(seconds=60)

    async def __call__(self, db: Database) -> Accrued | None:
        """One run, or none when it is another's turn or no window has ended."""
        async with db.transaction() as tx:
            progress = await accrual.lock_progress(tx)
            return await self.until(tx, progress.accrued_until, progress.now) if progress else None

    async def watch(self, db: Database) -> None:
        """Measure how far behind the meter is; a window that still runs is not."""
        async with db.read() as conn:
            progress = await accrual.progress(conn)
        behind = progress.now - progress.accrued_until - self.window
        metrics.BEHIND_S.set(max(behind.total_seconds(), 0.0))

    async def until(self, tx: Tx, since: datetime, now: datetime) -> Accrued | None:
        """Charge the windows that have ended by `now`, if any has; the caller has the turn."""
        if now < since + self.window:
            return None
        ended = _begin(now, self.window)
        step = await _windows_max(tx) * self.window
        until = min(ended, _begin(since, self.window) + step)
        await accrual.open_payers(tx)
        for owed in await accrual.excess(tx, run_at=until):
            await _give_back(tx, owed, until)
        charged, paid_up = await accrual.accrue(tx, since=since, until=until, window=self.window, each_max=2 * step)
        await self.allocations.settle(tx, paid_up)
        await accrual.advance(tx, until)
        return replace(charged, behind=until < ended)


async def _give_back(tx: Tx, owed: Excess, run_at: datetime) -> None:
    await give_back(
        tx,
        transfer_id=f"correction/{owed.corrects}/{run_at:%Y-%m-%dT%H:%M:%SZ}",
        corrects=owed.corrects,
        organisation_id=owed.organisation_id,
        amount_microusd=owed.amount_microusd,
        memo="charged beyond the end",
    )


async def _windows_max(tx: Tx) -> int:
    """How many windows are charged at once: the more allocations, the fewer."""
    return min(max(USES_MAX // max(await accrual.metered(tx), 1), 1), WINDOWS_MAX)


def _begin(at: datetime, window: timedelta) -> datetime:
    """When the window of this moment began."""
    return at - (at - _EPOCH) % window
