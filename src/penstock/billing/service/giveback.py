"""Gives money back to where it came from: to the balance first, then to the credit, never more than came from each.

Whoever calls has the turn of the meter (`billing.progress`), so that no two decide by the same remainder.
"""

from penstock.billing.model import REVENUE, Account, Kind, Transfer
from penstock.billing.store import ledger
from penstock.kit.db import Tx


async def give_back(
    tx: Tx, *, transfer_id: str, corrects: str, organisation_id: str, amount_microusd: int, memo: str
) -> int:
    """Correct a charge by this amount, or by as much as is left of it; how much that was."""
    balance, credit = Account.BALANCE.of(organisation_id), Account.CREDIT.of(organisation_id)
    taken = await ledger.remaining(tx, corrects)
    to_balance = min(amount_microusd, max(-taken.get(balance, 0), 0))
    to_credit = min(amount_microusd - to_balance, max(-taken.get(credit, 0), 0))
    entries = {balance: to_balance, credit: to_credit, REVENUE: -to_balance - to_credit}
    if to_balance + to_credit:
        await ledger.post(
            tx,
            Transfer(
                id=transfer_id,
                kind=Kind.CORRECTION,
                organisation_id=organisation_id,
                entries={account: amount for account, amount in entries.items() if amount},
                corrects=corrects,
                memo=memo,
            ),
        )
    return to_balance + to_credit
