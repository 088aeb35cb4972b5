"""Top-ups: a row first, then a page at the provider, never both at once.

A crash in between leaves a payment without a page; the same request again gives it one, and money that comes all the
same finds its payment by the id that the provider was given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.billing.errors import NoPayments, TooManyOpen
from penstock.billing.model import CURRENCY
from penstock.billing.paymentmodel import TOPUP_MIN_MICROUSD, Payment, PaymentState, Refund, check_amount
from penstock.billing.providers.port import Provider, ReturnUrls
from penstock.billing.service import crediting
from penstock.billing.store import payments as store
from penstock.billing.store import refunds
from penstock.kit import idempotency
from penstock.kit.caller import Caller
from penstock.kit.db import Database, Reader, Tx
from penstock.kit.errors import missing
from penstock.kit.idempotency import Once
from penstock.kit.ids import new_id
from penstock.kit.telemetry import correlation_id

#: So many pages may an organisation open in a day without paying at one.
OPEN_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Topups:
    """The use case, with the provider that an install uses."""

    db: Database
    provider: Provider | None
    urls: ReturnUrls

    async def create(self, caller: Caller, once: Once | None, amount_microusd: int) -> Payment:
        """A payment and where it can be paid."""
        caller.require("billing.write")
        check_amount(amount_microusd, at_least=TOPUP_MIN_MICROUSD)
        provider = required(self.provider)

        async def effect(tx: Tx) -> bytes:
            return (await _draft(tx, caller, provider.name, amount_microusd)).id.encode()

        payment_id = (await idempotency.run(self.db, once, effect)).decode()
        return await self._with_page(provider, payment_id)

    async def _with_page(self, provider: Provider, payment_id: str) -> Payment:
        async with self.db.read() as conn:
            payment = await store.find(conn, payment_id)
        assert payment is not None
        if payment.checkout_url or payment.state is not PaymentState.OPEN:
            return payment
        checkout = await provider.checkout(payment, self.urls)
        async with self.db.transaction() as tx:
            return await store.attach(tx, payment_id, checkout)


def required(provider: Provider | None) -> Provider:
    """The provider, or NoPayments."""
    if provider is None:
        raise NoPayments("this install takes no payments: its operators have set up no payment provider")
    return provider


async def _draft(tx: Tx, caller: Caller, provider: str, amount_microusd: int) -> Payment:
    if await store.count_open(tx, caller.organisation_id) >= OPEN_MAX:
        raise TooManyOpen(f"{OPEN_MAX} payments were begun in a day and not finished; finish or cancel some of them")
    payment = await store.insert(
        tx,
        store.Draft(
            id=new_id("pay"),
            organisation_id=caller.organisation_id,
            project_id=caller.project_id,
            provider=provider,
            amount_microusd=amount_microusd,
            currency=CURRENCY,
            created_by=caller.principal_id,
            correlation_id=correlation_id(),
        ),
    )
    await crediting.record(tx, caller.actor, "payments.create", payment, amount_microusd)
    return payment


async def page(conn: Reader, caller: Caller, *, before: str, limit: int) -> Sequence[Payment]:
    """The organisation's payments, newest first."""
    caller.require("billing.read")
    return await store.page(conn, caller.organisation_id, before=before, limit=limit)


async def show(conn: Reader, caller: Caller, payment_id: str) -> tuple[Payment, Sequence[Refund]]:
    """One payment with its refunds; operators see everybody's."""
    caller.require("billing.read")
    own = None if "billing.adjust" in caller.actions else caller.organisation_id
    payment = await store.find(conn, payment_id, organisation_id=own)
    if payment is None:
        raise missing("payment", payment_id)
    return payment, await refunds.of_payment(conn, payment.id)


async def at_page(conn: Reader, provider: str, session_id: str) -> Payment | None:
    """The payment of a checkout page, if it is one; whoever knows the page's address may see it."""
    return await store.find_by_session(conn, provider, session_id)
