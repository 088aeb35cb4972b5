"""Every row of the list of bad inputs for outgoing webhooks: those of saving against the running api, those of sending
against a real receiver with TLS; only the lookup, what counts as public and whom TLS trusts are played."""

import asyncio
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from bad_inputs import Checks, rows
from penstock.kit.addresses import is_elsewhere
from penstock.kit.db import Database
from penstock.kit.outward import ANSWER_BYTES_MAX
from penstock.notices.model import Delivery, DeliveryState, WebhookState
from penstock.notices.sender import Sender
from penstock.wire.egress import Address
from webhook_receiver import EAGER, Stage, certificates, outward, receive, stage_on

from .conftest import Api, People

#: Those before are about webhooks that come in.
ROWS = [row_id for row_id in rows("webhook") if row_id >= "webhook-26"]
CHECKS = Checks()
row = CHECKS.row


@pytest.fixture
async def stage(database: Database, tmp_path: Path) -> AsyncIterator[Stage]:
    async with stage_on(database, tmp_path) as built:
        yield built


@pytest.mark.parametrize("row_id", ROWS)
async def test_bad_input_is_answered_as_listed(row_id: str, api: Api, people: People, stage: Stage) -> None:
    await CHECKS[row_id](api, people, stage)
    assert "Traceback" not in api.log.read_text()


def test_every_row_has_a_check() -> None:
    assert set(CHECKS) == set(ROWS)


async def refused(api: Api, people: People, *urls: str, says: str) -> None:
    """400 from making and from changing a webhook, naming the field and the reason, and nothing was changed."""
    key = people.admin.key
    made = await api.call("POST", "/webhooks", key=key, json={"url": "https://8.8.8.8/", "event_types": ["*"]})
    assert made.status == 201, made.content
    path = f"/webhooks/{made.json['webhook']['id']}"
    before = (await api.call("GET", "/webhooks", key=key)).json
    for url in urls:
        for method, at in (("POST", "/webhooks"), ("PATCH", path)):
            answer = await api.call(method, at, key=key, json={"url": url})
            assert (answer.status, answer.error["field"]) == (400, "url"), (url, answer.content)
            assert says in answer.error["message"], (url, answer.error)
    assert (await api.call("GET", "/webhooks", key=key)).json == before
    assert (await api.call("DELETE", path, key=key)).status == 204


async def failed(stage: Stage, sender: Sender, path: str = "/") -> Delivery:
    """What becomes of one event that is sent so."""
    made, _ = await stage.webhook(path, ("provisioning.*",))
    await stage.say(1)
    await stage.spread()
    assert await stage.send(sender) == 1
    [delivery] = await stage.deliveries(made.id)
    return delivery


def answering(*answers: str) -> Callable[[str, int], Awaitable[Sequence[Address]]]:
    """A name service that gives one answer after the other."""
    given = iter(answers)

    async def resolve(_: str, __: int) -> Sequence[Address]:
        return [ipaddress.ip_address(next(given))]

    return resolve


@row("webhook-26")
async def _(api: Api, people: People, _: Stage) -> None:
    urls = ("http://169.254.169.254/", "https://169.254.169.254/", "https://10.0.0.1/", "https://127.0.0.1:8443/")
    await refused(api, people, *urls, says="address is not public")


@row("webhook-27")
async def _(api: Api, people: People, _: Stage) -> None:
    urls = ("http://[::ffff:127.0.0.1]/", "https://[::ffff:7f00:1]/", "https://[64:ff9b::7f00:1]/", "https://[::1]/")
    await refused(api, people, *urls, says="address is not public")


@row("webhook-29")
async def _(api: Api, people: People, stage: Stage) -> None:
    await refused(api, people, "https://localhost/", "https://localhost.:8443/", says="address is not public")
    await refused(api, people, "http://localhost/", says="https")
    # Forms of 127.0.0.1 that only a resolver reads.
    await refused(api, people, "https://2130706433/", "https://127.1/", "https://0x7f.1/", says="url: ")
    delivery = await failed(stage, stage.sender(permitted=is_elsewhere))
    assert (delivery.error, stage.receiver.seen) == ("address_not_public", [])


@row("webhook-30")
async def _(_: Api, __: People, stage: Stage) -> None:
    sender = stage.sender(resolve=answering("127.0.0.1"), permitted=is_elsewhere)
    at_save = outward(stage.receiver, stage.tls, resolve=answering("8.8.8.8"), permitted=is_elsewhere)
    await at_save.check(stage.receiver.url())
    delivery = await failed(stage, sender)
    assert (delivery.state, delivery.error) == (DeliveryState.PENDING, "address_not_public")
    assert stage.receiver.seen == []
    # One private address among public ones spoils them all.
    both = stage.sender(resolve=lambda *_: _both(), permitted=is_elsewhere)
    assert await stage.send(both) == 1
    assert stage.receiver.seen == []


async def _both() -> Sequence[Address]:
    return [ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("127.0.0.1")]


@row("webhook-31")
async def _(_: Api, __: People, stage: Stage) -> None:
    stage.receiver.answer("/", 302, Location="http://10.0.0.1/")
    delivery = await failed(stage, stage.sender())
    assert (delivery.error, delivery.status) == ("redirect", 302)
    stage.receiver.answer("/", 307, Location=stage.receiver.url("/other"))
    assert await stage.send() == 1
    assert {message.path for message in stage.receiver.seen} == {"/"}


@row("webhook-34")
async def _(api: Api, people: People, _: Stage) -> None:
    urls = ("file:///etc/passwd", "gopher://example.com/", "ftp://example.com/", "http://8.8.8.8/", "8.8.8.8", "//x/")
    await refused(api, people, *urls, says="only https")
    odd = (
        "https://user:password@8.8.8.8/",
        "https://8.8.8.8/#f",
        "https:///path",
        "https://a b/",
        "https://\u00e4.de/",
    )
    await refused(api, people, *odd, "https://[::1", "https://8.8.8.8:99999/", "https://8.8.8.8\\@x/", says="url: ")
    await refused(api, people, "https://8.8.8.8/" + "a" * 2048, "", says="")


@row("webhook-35")
async def _(api: Api, people: People, _: Stage) -> None:
    urls = (
        "https://8.8.8.8:22/",
        "https://8.8.8.8:6379/",
        "https://8.8.8.8:80/",
        "https://8.8.8.8:8080/",
        "https://8.8.8.8:0/",
    )
    await refused(api, people, *urls, says="not allowed: 443 and 8443 are")


@row("webhook-36")
async def _(_: Api, __: People, stage: Stage) -> None:
    """The whole exchange has its time; a receiver that says a byte now and then does not lengthen it."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 10_000:
            if writer.is_closing():
                return
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    server_tls, client_tls = certificates(stage.folder)
    listener = await asyncio.start_server(drip, "127.0.0.1", 0, ssl=server_tls)
    stage.receiver.port, stage.tls = listener.sockets[0].getsockname()[1], client_tls
    started = time.monotonic()
    delivery = await failed(stage, stage.sender(timeout_s=0.4))
    assert delivery.error == "timeout"
    assert 0.4 <= time.monotonic() - started < 5
    listener.close()


@row("webhook-37")
async def _(_: Api, __: People, stage: Stage) -> None:
    written = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Length": str(10 << 30)})
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            written += 65536

    stage.receiver.on("/", flood)
    answer = await outward(stage.receiver, stage.tls).post(stage.receiver.url(), b"{}", {})
    assert len(answer.body) == ANSWER_BYTES_MAX == 64 << 10
    delivery = await failed(stage, stage.sender())
    assert delivery.state is DeliveryState.DELIVERED
    assert written < 64 << 20


@row("webhook-39")
async def _(_: Api, __: People, stage: Stage) -> None:
    stage.receiver.answer("/", 500)
    made, _secret = await stage.webhook("/", ("provisioning.*",))
    stage.patience = replace(EAGER, failures_max=50)
    await stage.say(1)
    await stage.spread()
    assert await stage.send(rounds=3) == 3
    await stage.sql("update notices.webhooks set failing_since = clock_timestamp() - interval '3 days'")
    assert await stage.send() == 1
    seen = await stage.show(made.id)
    assert seen.state is WebhookState.PAUSED
    assert "failed 4 times in a row" in seen.reason
    told = "select count(*) from kit.outbox where type = 'notices.webhook_paused' and project_id = $1"
    assert await stage.sql(told, made.project_id) == 1
    assert await stage.send() == 0


@row("webhook-40")
async def _(_: Api, __: People, stage: Stage) -> None:
    server_tls, client_tls = certificates(stage.folder, days=-1)
    async with receive(server_tls) as expired:
        stage.receiver, stage.tls = expired, client_tls
        delivery = await failed(stage, stage.sender())
        assert (delivery.error, delivery.state) == ("tls", DeliveryState.PENDING)
        assert "expired" in delivery.detail
        assert await stage.send(rounds=3) == 3
        assert expired.seen == []
    # Nor is a certificate taken that is for another name, or that nobody vouches for.
    server_tls, client_tls = certificates(stage.folder, days=2)
    async with receive(server_tls) as other:
        stage.receiver = other
        await stage.sql("update notices.webhooks set url = $1", other.url(host="other.example"))
        stage.tls = client_tls
        assert await stage.send() == 1
        await stage.sql("update notices.webhooks set url = $1", other.url())
        stage.tls = ssl.create_default_context()
        assert await stage.send() == 1
        assert other.seen == []
