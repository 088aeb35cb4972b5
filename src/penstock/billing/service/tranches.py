"""Budgets on hot paths: tranches are leased, spent without asking, and settled.

Under no budget that rejects do leases promise more than its limit leaves, however many processes lease at once. A lease
counts in full until it is settled or over; a holder that dies gives all of it back by that.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from penstock.billing.budgetmodel import LEASE_S_MAX, BudgetTerms, Lease, refusal, tightest, tranche
from penstock.billing.errors import BudgetExhausted, LeaseOver
from penstock.billing.model import AMOUNT_MAX_MICROUSD
from penstock.billing.store import leases as store
from penstock.kit.db import Tx
from penstock.kit.errors import Invalid
from penstock.kit.ids import new_id

BATCH: Final = 500


@dataclass(frozen=True, slots=True)
class Budgets:
    """For gateways, activators and creates. All times are the database's; `at` is for tests."""

    terms: BudgetTerms = field(default_factory=BudgetTerms)

    async def reserve(
        self,
        tx: Tx,
        *,
        project_id: str,
        key_id: str | None,
        amount_microusd: int,
        holder: str,
        ttl_s: float,
        needed_microusd: int = 1,
        at: datetime | None = None,
    ) -> Lease | None:
        """A lease of what is asked or less, but of no less than is needed; none where no budget applies."""
        _require(amount_microusd, needed=needed_microusd, ttl_s=ttl_s)
        moment, budgets = await store.lock_budgets(tx, project_id=project_id, key_id=key_id, at=at)
        if moment is None:
            return None
        amount = tranche(budgets, asked=amount_microusd, needed=needed_microusd, terms=self.terms)
        if not amount:
            tight = tightest(budgets)
            assert tight is not None
            raise BudgetExhausted(refusal(tight), budget_id=tight.id)
        return await store.insert(
            tx,
            new_id("lea"),
            budgets,
            project_id=project_id,
            key_id=key_id,
            amount_microusd=amount,
            holder=holder,
            at=moment,
            ttl_s=ttl_s,
        )

    async def settle(self, tx: Tx, lease_id: str, spent_microusd: int, *, at: datetime | None = None) -> None:
        """So much of the lease was spent, and counts where it was reserved; the rest goes back. Once, and in time."""
        if spent_microusd < 0:
            raise Invalid("spent_microusd must be 0 or more", field="spent_microusd")
        await store.lock_budgets_of(tx, [lease_id])
        if await store.settle(tx, lease_id, spent_microusd, at=at):
            return
        leased = await store.amount(tx, lease_id)
        if leased is not None and spent_microusd > leased:
            raise Invalid(f"spent_microusd must be at most {leased}, which is leased", field="spent_microusd")
        raise LeaseOver("the lease is settled or has expired", lease_id=lease_id)

    async def expire(self, tx: Tx, *, at: datetime | None = None) -> int:
        """Sweep up a batch of leases that are over; how many."""
        over = await store.over(tx, limit=BATCH, at=at)
        if not over:
            return 0
        await store.lock_budgets_of(tx, over)
        return await store.expire(tx, over, at=at)

    async def check(
        self,
        tx: Tx,
        *,
        project_id: str,
        key_id: str | None,
        price_microusd_per_hour: int,
        minimum_s: float,
        at: datetime | None = None,
    ) -> None:
        """Pass, or name the budget that has no room for so long of one more allocation. Creates of one organisation
        take turns already, so nothing is locked here."""
        lacking = await store.lacking(
            tx,
            project_id=project_id,
            key_id=key_id,
            price_microusd_per_hour=price_microusd_per_hour,
            minimum_s=minimum_s,
            at=at,
        )
        if lacking is not None:
            minutes = minimum_s / 60
            raise BudgetExhausted(
                f"too little for {minutes:g} minutes of this and of all that runs: {refusal(lacking)}",
                budget_id=lacking.id,
            )


def _require(amount_microusd: int, *, needed: int, ttl_s: float) -> None:
    if not 1 <= amount_microusd <= AMOUNT_MAX_MICROUSD:
        raise Invalid(f"amount_microusd must be 1 to {AMOUNT_MAX_MICROUSD}", field="amount_microusd")
    if not 1 <= needed <= amount_microusd:
        raise Invalid("needed_microusd must be 1 to amount_microusd", field="needed_microusd")
    if not 0 < ttl_s <= LEASE_S_MAX:
        raise Invalid(f"ttl_s must be at most {LEASE_S_MAX:g}", field="ttl_s")
