"""A webhook that comes while the database is away: answered with a 5xx, and credited once when it comes again."""

import time
from typing import Any
from unittest.mock import AsyncMock

import asyncpg
import httpx
from litestar import Router

from penstock.billing import paymentroutes
from penstock.billing.providers import events, signature
from penstock.billing.providers.local import Local
from penstock.billing.providers.port import ReturnUrls
from penstock.billing.providers.signature import Secrets
from penstock.embedded.child import free_port
from penstock.kit import http
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.edge import Edge
from penstock.kit.exchanges import Exchanges

from .till import Till

SECRETS = Secrets(current="whsec_0123456789abcdef")


class Nobody:
    """No one may pass; webhooks need no one."""

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        raise NotImplementedError


async def post(db: Database, till: Till, body: bytes) -> int:
    """The status that the webhook answers with this database."""
    provider = Local(SECRETS, pay_url="", webhook_url="")
    routes = paymentroutes.router(db, provider, ReturnUrls(success="", cancel=""), till.terms)
    app: Any = Edge(
        http.application([Router(path="/api/v1", route_handlers=[routes])], Nobody()), Exchanges(AsyncMock())
    )
    headers = {signature.HEADER: signature.sign(body, SECRETS.current, at=time.time())}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return (await client.post("/api/v1/webhooks/local", content=body, headers=headers)).status_code


async def test_a_webhook_without_a_database_is_a_5xx_and_credits_once_when_it_comes_again(till: Till) -> None:
    till.provider.name = "local"
    payment = await till.topup()
    body = events.encode(
        event_id=f"evt_{payment.id}",
        kind="checkout.session.completed",
        created=1,
        api_version="",
        thing=till.session(payment),
    )
    async with asyncpg.create_pool(f"postgresql://127.0.0.1:{free_port()}/none", min_size=0, max_size=2) as nowhere:
        away = Database(nowhere, lambda *_: None)
        assert [await post(away, till, body) for _ in range(3)] == [503, 503, 503]
    assert await till.transfers() == []
    assert [await post(till.db, till, body) for _ in range(3)] == [200, 200, 200]
    await till.payments.sweep_events()
    assert await till.outcome(f"evt_{payment.id}") == ("applied", "")
    assert await till.balances() == (20_000_000, 0, 20_000_000)
    assert await till.transfers() == [f"payment/{payment.id}"]
