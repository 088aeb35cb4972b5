"""What operators do to an organisation's money: grants, corrections, terms. Every change is audited."""

from dataclasses import dataclass

from penstock.billing.errors import CorrectionTooLarge, NotCorrectable
from penstock.billing.model import PROMOTIONS, REVENUE, Account, Kind, Transfer
from penstock.billing.ports import Organisations
from penstock.billing.service import statements
from penstock.billing.service.giveback import give_back
from penstock.billing.store import adjustments, ledger
from penstock.billing.store import statements as store
from penstock.billing.store.invoices import ADJUSTMENT
from penstock.kit import audit
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, missing
from penstock.kit.ids import is_id, new_id
from penstock.kit.text import dollars
from penstock.wire import rest, subjects


@dataclass(frozen=True, slots=True)
class Adjust:
    """The use cases, with what they ask of others."""

    organisations: Organisations

    async def grant(self, tx: Tx, caller: Caller, wanted: rest.GrantCreate) -> rest.LedgerTransfer:
        """Promotional credit, which is spent before the balance."""
        caller.require("billing.adjust")
        organisation_id = wanted.organisation_id
        if not await self._exists(tx, organisation_id):
            raise Invalid("organisation_id names no organisation", field="organisation_id")
        await ledger.open_customer(tx, organisation_id)
        amount = wanted.amount_microusd
        transfer = Transfer(
            id=f"grant/{new_id('grt')}",
            kind=Kind.GRANT,
            organisation_id=organisation_id,
            entries={PROMOTIONS: -amount, Account.CREDIT.of(organisation_id): amount},
            memo=wanted.memo,
        )
        await ledger.post(tx, transfer)
        return await _done(tx, caller, "billing.grant", transfer.id, organisation_id, amount, wanted.memo)

    async def terms(self, conn: Reader, caller: Caller, organisation_id: str) -> rest.BillingTerms:
        """What was agreed with an organisation."""
        caller.require("billing.adjust")
        if not await self._exists(conn, organisation_id):
            raise missing("organisation", organisation_id)
        limit = await adjustments.credit_limit(conn, organisation_id)
        return rest.BillingTerms(organisation_id=organisation_id, credit_limit_microusd=limit)

    async def set_terms(
        self, tx: Tx, caller: Caller, organisation_id: str, terms: rest.BillingTermsPut
    ) -> rest.BillingTerms:
        """How far an organisation may go below zero."""
        caller.require("billing.adjust")
        if not await self._exists(tx, organisation_id):
            raise missing("organisation", organisation_id)
        await ledger.open_customer(tx, organisation_id)
        await ledger.lock_customer(tx, organisation_id)
        await adjustments.set_credit_limit(tx, organisation_id, terms.credit_limit_microusd)
        await audit.record(
            tx,
            caller.actor,
            "billing.terms",
            organisation_id,
            organisation_id=organisation_id,
            detail={"credit_limit_microusd": terms.credit_limit_microusd},
        )
        tx.hint(subjects.BILLING)
        return rest.BillingTerms(organisation_id=organisation_id, credit_limit_microusd=terms.credit_limit_microusd)

    async def _exists(self, conn: Reader, organisation_id: str) -> bool:
        return (
            is_id("org", organisation_id)
            and await self.organisations.organisation_name(conn, organisation_id) is not None
        )


async def correct(tx: Tx, caller: Caller, wanted: rest.CorrectionCreate) -> rest.LedgerTransfer:
    """Give back a part of a charge, or take back a part of a grant; never more than is left."""
    caller.require("billing.adjust")
    owner = await store.owner(tx, wanted.transfer_id)
    if owner is None:
        raise missing("transfer", wanted.transfer_id)
    organisation_id, kind = owner
    await adjustments.wait_for_turn(tx)
    await ledger.lock_customer(tx, organisation_id)
    transfer_id = f"{ADJUSTMENT.removesuffix('cor_')}{new_id('cor')}"
    match kind:
        case Kind.USAGE:
            await _correct_usage(tx, wanted, organisation_id, transfer_id)
        case Kind.GRANT:
            await _correct_grant(tx, wanted, organisation_id, transfer_id)
        case _:
            raise NotCorrectable(f"a {kind} cannot be corrected, only usage and grants", field="transfer_id")
    return await _done(tx, caller, "billing.correct", transfer_id, organisation_id, wanted.amount_microusd, wanted.memo)


async def _correct_usage(tx: Tx, wanted: rest.CorrectionCreate, organisation_id: str, transfer_id: str) -> None:
    left = (await ledger.remaining(tx, wanted.transfer_id)).get(REVENUE, 0)
    _require_left(wanted, left)
    await give_back(
        tx,
        transfer_id=transfer_id,
        corrects=wanted.transfer_id,
        organisation_id=organisation_id,
        amount_microusd=wanted.amount_microusd,
        memo=wanted.memo,
    )


async def _correct_grant(tx: Tx, wanted: rest.CorrectionCreate, organisation_id: str, transfer_id: str) -> None:
    """As far as the credit is not spent."""
    credit = Account.CREDIT.of(organisation_id)
    left = (await ledger.remaining(tx, wanted.transfer_id)).get(credit, 0)
    _require_left(wanted, min(left, await ledger.balance(tx, credit)))
    await ledger.post(
        tx,
        Transfer(
            id=transfer_id,
            kind=Kind.CORRECTION,
            organisation_id=organisation_id,
            entries={credit: -wanted.amount_microusd, PROMOTIONS: wanted.amount_microusd},
            corrects=wanted.transfer_id,
            memo=wanted.memo,
        ),
    )


def _require_left(wanted: rest.CorrectionCreate, left: int) -> None:
    if wanted.amount_microusd > left:
        raise CorrectionTooLarge(
            f"amount_microusd must be at most {max(left, 0)} ({dollars(max(left, 0))}): that is left of this transfer",
            field="amount_microusd",
        )


async def _done(
    tx: Tx, caller: Caller, action: str, transfer_id: str, organisation_id: str, amount_microusd: int, memo: str
) -> rest.LedgerTransfer:
    """Written down, told to the biller, and as it reads in the ledger."""
    await audit.record(
        tx,
        caller.actor,
        action,
        transfer_id,
        organisation_id=organisation_id,
        detail={"amount_microusd": amount_microusd, "memo": memo},
    )
    tx.hint(subjects.BILLING)
    return await statements.show(tx, organisation_id, transfer_id)
