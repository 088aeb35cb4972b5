"""What happens to payments without anybody's asking for it. Any number of billers may sweep."""

from penstock.billing.paymentmodel import PaymentTerms
from penstock.billing.providers.port import Provider
from penstock.billing.service.inbox import Inbox
from penstock.billing.service.refunds import RefundDesk
from penstock.kit.db import Database


class Payments:
    """The biller's part in payments. Without a provider there is still an inbox to empty."""

    def __init__(self, db: Database, provider: Provider | None, terms: PaymentTerms | None = None) -> None:
        self._inbox = Inbox(db, terms or PaymentTerms())
        self._desk = RefundDesk(db, provider) if provider is not None else None

    async def sweep_events(self) -> None:
        """Handle what the provider told; woken by a hint, and every two seconds."""
        await self._inbox.sweep()
        await self._inbox.sweep_abandoned()

    async def sweep_refunds(self) -> None:
        """Ask the provider for what was requested; woken by a hint, and every two seconds."""
        if self._desk is not None:
            await self._desk.sweep()
