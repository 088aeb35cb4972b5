"""A webhook that comes while the database is away: answered with a 5xx, and credited once when it comes again."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from litestar import Router

from penstock.billing import paymentroutes
from penstock.billing.providers import events, signature
from penstock.billing.providers.local import Local
from penstock.billing.providers.port import ReturnUrls
from penstock.billing.providers.signature import Secrets
from penstock.kit import db, http
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.edge import Edge

from .till import Till

SECRETS = Secrets(current="whsec_0123456789abcdef")


class Wire:
    """The way to a server, which can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._cut = False
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Nothing passes any more."""
        self._cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """New connections pass again."""
        self._cut = False

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(*self._to)
        self._writers |= {writer, back}
        await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()


class Nobody:
    """No one may pass; webhooks need no one."""

    async def authenticate(self, authorization: str | None, project: str | None) -> Caller:
        raise NotImplementedError


@asynccontextmanager
async def through_a_wire(url: str) -> AsyncIterator[tuple[Database, Wire]]:
    parts = urlsplit(url)
    wire = Wire(str(parts.hostname), int(parts.port or 0))
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    moved = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{port}")).geturl()
    async with db.connect(moved, lambda *_: None, name="test") as connected:
        yield connected, wire
        wire.cut()
    server.close()


async def test_a_webhook_without_a_database_is_a_5xx_and_credits_once_when_it_comes_again(database_url: str) -> None:
    async with (
        db.connect(database_url, lambda *_: None) as database,
        through_a_wire(database_url) as (cuttable, wire),
    ):
        till = Till(database)
        provider = Local(SECRETS, pay_url="", webhook_url="")
        till.provider.name = provider.name
        urls = ReturnUrls(success="", cancel="")
        routes = paymentroutes.router(cuttable, provider, urls, till.terms)
        app: Any = Edge(http.application([Router(path="/api/v1", route_handlers=[routes])], Nobody()))
        payment = await till.topup()
        kind, session = "checkout.session.completed", till.session(payment)
        body = events.encode(event_id="evt_1", kind=kind, created=1, api_version="", thing=session)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

            async def post() -> int:
                headers = {signature.HEADER: signature.sign(body, SECRETS.current, at=time.time())}
                return (await client.post("/api/v1/webhooks/local", content=body, headers=headers)).status_code

            wire.cut()
            assert [await post() for _ in range(3)] == [503, 503, 503]
            assert await till.states() == set()
            wire.mend()
            assert [await post() for _ in range(3)] == [200, 200, 200]
        await till.payments.sweep_events()
        assert await till.states() == {"applied"}
        assert await till.balances() == (20_000_000, 0, 20_000_000)
        assert await till.transfers() == [f"payment/{payment.id}"]
