"""A till for tests of payments: a provider that does what it is told, its events in any order, and what must hold."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.billing.errors import ProviderAway
from penstock.billing.model import CLEARING, Account
from penstock.billing.paymentmodel import Payment, PaymentTerms, Refund
from penstock.billing.providers import events
from penstock.billing.providers.events import Notice
from penstock.billing.providers.port import Checkout, RefundAnswer, RefundOrder, RefundStatus, ReturnUrls
from penstock.billing.service import inbox, refunds
from penstock.billing.service.payments import Payments
from penstock.billing.service.topups import Topups
from penstock.billing.store import ledger
from penstock.billing.store import payments as store
from penstock.billing.store import refunds as refund_store
from penstock.identity.model import Role, actions
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.ids import new_id


def caller(organisation_id: str, role: Role = Role.OWNER, *, operator: bool = False) -> Caller:
    return Caller(
        principal_id="usr_a",
        principal_kind="user",
        display_name="Ada",
        organisation_id=organisation_id,
        project_id="prj_a",
        role=role,
        actions=actions(role, operator=operator),
        operator=operator,
    )


OPERATOR = caller("org_operators", operator=True)


@dataclass
class ScriptedProvider:
    """Answers as it is told, and keeps what it was asked."""

    name: str
    answer: RefundStatus = RefundStatus.PENDING
    away: bool = False
    asked: list[RefundOrder] = field(default_factory=list[RefundOrder])

    async def checkout(self, payment: Payment, urls: ReturnUrls) -> Checkout:
        self._check()
        return Checkout(session_id=f"cs_{payment.id}", url=f"{urls.success}/{payment.id}")

    async def refund(self, order: RefundOrder) -> RefundAnswer:
        self.asked.append(order)
        self._check()
        return RefundAnswer(id=f"re_{order.refund_id}", status=self.answer, failure="")

    async def refund_status(self, provider_refund_id: str) -> RefundAnswer:
        self._check()
        return RefundAnswer(id=provider_refund_id, status=self.answer)

    def parse(self, body: bytes, signed: str) -> Notice:
        raise NotImplementedError

    async def close(self) -> None:
        return

    def _check(self) -> None:
        if self.away:
            raise ProviderAway("away")


@dataclass
class Till:
    """Payments of one organisation, with a provider of its own. Many tills may share a database."""

    db: Database
    org: str = field(default_factory=lambda: new_id("org"))
    provider: ScriptedProvider = field(default_factory=lambda: ScriptedProvider(new_id("prv")))
    terms: PaymentTerms = field(default_factory=PaymentTerms)
    numbers: Any = field(default_factory=itertools.count)

    @property
    def owner(self) -> Caller:
        return caller(self.org)

    @property
    def payments(self) -> Payments:
        return Payments(self.db, self.provider, self.terms)

    async def topup(self, amount: int = 20_000_000, who: Caller | None = None) -> Payment:
        urls = ReturnUrls(success="https://a.example", cancel="https://b.example")
        return await Topups(self.db, self.provider, urls).create(who or self.owner, None, amount)

    async def paid(self, amount: int = 20_000_000, who: Caller | None = None) -> Payment:
        payment = await self.topup(amount, who)
        await self.tell("checkout.session.completed", self.session(payment))
        await self.payments.sweep_events()
        return await self.look(payment)

    async def refund(self, payment: Payment, amount: int, who: Caller = OPERATOR) -> Refund:
        async with self.db.transaction() as tx:
            return await refunds.request(
                tx,
                who,
                self.provider.name,
                self.terms,
                payment_id=payment.id,
                amount_microusd=amount,
                reason="asked for",
            )

    async def tell(self, kind: str, thing: dict[str, Any], *, event_id: str | None = None) -> str:
        """An event arrives, verified."""
        event_id = event_id or f"evt_{self.provider.name}_{next(self.numbers)}"
        body = events.encode(event_id=event_id, kind=kind, created=1, api_version="", thing=thing)
        await inbox.receive(self.db, self.provider.name, msgspec.json.decode(body, type=Notice), body)
        return event_id

    async def told(self, kind: str, thing: dict[str, Any]) -> tuple[str, str]:
        """An event arrives and is handled; what became of it."""
        event_id = await self.tell(kind, thing)
        await self.payments.sweep_events()
        return await self.outcome(event_id)

    async def outcome(self, event_id: str) -> tuple[str, str]:
        async with self.db.read() as conn:
            found = await store.find_event(conn, event_id)
        assert found is not None
        return found.state, found.reason

    async def due(self) -> None:
        """Time passes until everything is due."""
        async with self.db.transaction() as tx:
            await tx.execute(
                "update billing.provider_events set due_at = clock_timestamp() where provider = $1", self.provider.name
            )
            await tx.execute(
                "update billing.refunds set due_at = clock_timestamp() where due_at is not null"
                " and organisation_id = $1",
                self.org,
            )

    async def states(self) -> set[str]:
        """What became of all events."""
        async with self.db.read() as conn:
            rows = await conn.fetch(
                "select distinct state from billing.provider_events where provider = $1", self.provider.name
            )
        return {row["state"] for row in rows}

    def session(self, payment: Payment, **changes: Any) -> dict[str, Any]:
        return {
            "id": payment.session_id or f"cs_{payment.id}",
            "object": "checkout.session",
            "amount_total": payment.amount_microusd // 10_000,
            "currency": "usd",
            "payment_status": "paid",
            "client_reference_id": payment.id,
            "metadata": {"payment_id": payment.id},
            "payment_intent": f"pi_{payment.id}",
            **changes,
        }

    def refund_object(
        self, payment: Payment, microusd: int, *, refund: Refund | None = None, **more: Any
    ) -> dict[str, Any]:
        return {
            "id": f"re_{refund.id}" if refund else "re_elsewhere",
            "object": "refund",
            "amount": microusd // 10_000,
            "currency": "usd",
            "status": "succeeded",
            "payment_intent": f"pi_{payment.id}",
            "metadata": {"refund_id": refund.id} if refund else {},
            **more,
        }

    def dispute(self, payment: Payment, amount: int, status: str = "needs_response") -> dict[str, Any]:
        return {
            "id": f"dp_{payment.id}",
            "object": "dispute",
            "amount": amount // 10_000,
            "currency": "usd",
            "status": status,
            "payment_intent": f"pi_{payment.id}",
        }

    async def look(self, payment: Payment) -> Payment:
        async with self.db.read() as conn:
            found = await store.find(conn, payment.id)
        assert found is not None
        return found

    async def look_at_refund(self, refund: Refund) -> Refund:
        async with self.db.read() as conn:
            found = await refund_store.find(conn, refund.id)
        assert found is not None
        return found

    async def balances(self) -> tuple[int, int, int]:
        """Balance, holds, and what the provider has of it."""
        async with self.db.read() as conn:
            cleared = await conn.fetchval(
                "select coalesce(sum(amount_microusd), 0)::bigint from billing.entries e"
                " join billing.transfers t on t.id = e.transfer_id where organisation_id = $1 and account_id = $2",
                self.org,
                CLEARING,
            )
            return (
                await ledger.balance(conn, Account.BALANCE.of(self.org)),
                await ledger.balance(conn, Account.HOLDS.of(self.org)),
                -cleared,
            )

    async def transfers(self) -> list[str]:
        async with self.db.read() as conn:
            rows = await conn.fetch("select id from billing.transfers where organisation_id = $1 order by id", self.org)
        return [row["id"] for row in rows]

    async def facts(self, payment: Payment) -> list[tuple[str, int]]:
        """Facts about a payment and their versions, in order."""
        async with self.db.read() as conn:
            rows = await conn.fetch(
                "select type, version from kit.outbox where aggregate_id = $1 order by seq", payment.id
            )
        return [(row["type"], row["version"]) for row in rows]
