"""The first organisation of an install begins with a promotional credit, so that everything can be tried at once."""

from typing import Final

from penstock.billing.model import MICROUSD, PROMOTIONS, Account, Kind, Transfer
from penstock.billing.store import ledger
from penstock.kit.db import Tx

CREDIT_MICROUSD: Final = 1000 * MICROUSD


async def welcome(tx: Tx, organisation_id: str) -> None:
    """Grant it, once."""
    await ledger.open_customer(tx, organisation_id)
    await ledger.post(
        tx,
        Transfer(
            id=f"grant/welcome/{organisation_id}",
            kind=Kind.GRANT,
            organisation_id=organisation_id,
            entries={PROMOTIONS: -CREDIT_MICROUSD, Account.CREDIT.of(organisation_id): CREDIT_MICROUSD},
            memo="welcome",
        ),
    )
