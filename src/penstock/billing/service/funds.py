"""Whether an organisation can pay for one more allocation; compute's Protocol `Funds`.

Creates of one organisation are measured one after the other, each with all that was asked for before it.
"""

from dataclasses import dataclass

from penstock.billing.errors import InsufficientFunds
from penstock.billing.model import Terms
from penstock.billing.service.tranches import Budgets
from penstock.billing.store import standing
from penstock.billing.store.standing import Purse
from penstock.kit.db import Tx
from penstock.kit.text import dollars


@dataclass(frozen=True, slots=True)
class Funds:
    """Filled into compute by the api."""

    terms: Terms

    async def check(
        self, tx: Tx, *, organisation_id: str, project_id: str, key_id: str | None, price_microusd_per_hour: int
    ) -> None:
        """Pass, or say what is missing."""
        if price_microusd_per_hour == 0:
            return
        purse = await standing.lock_purse(tx, organisation_id, project_id)
        self._require(purse, price_microusd_per_hour)
        if purse is not None and purse.budgeted:
            await Budgets().check(
                tx,
                project_id=project_id,
                key_id=key_id,
                price_microusd_per_hour=price_microusd_per_hour,
                minimum_s=self.terms.funds_minimum_s,
            )

    def _require(self, purse: Purse | None, price_microusd_per_hour: int) -> None:
        funds = purse.funds_microusd if purse else 0
        rate = price_microusd_per_hour + (purse.committed_microusd_per_hour if purse else 0)
        needed = -(-rate * round(self.terms.funds_minimum_s) // 3600)
        if funds < needed:
            minutes = self.terms.funds_minimum_s / 60
            raise InsufficientFunds(
                f"insufficient funds: {dollars(funds)} there, {dollars(needed)} needed for {minutes:g} minutes of this"
                " and of all that runs or was asked for; an owner or the role billing can top up with"
                " `penstock billing topup`"
            )
