"""Signed callbacks: told at least once, tried again, given up after a day; one key of each project."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.kit.db import Database
from penstock.secrets import keyring
from penstock.secrets.keyring import Keyring
from penstock.secrets.vault import Vault
from penstock.serverless import schemas
from penstock.serverless.schemas import Urls
from penstock.serverless.service.callbacks import Callbacks, Signing
from penstock.serverless.upkeep import rewrap
from webhook_receiver import PROJECT, SISTER, Receiver, certificates, outward, receive

URLS = Urls(api_url="https://api.example", gateway_url="https://gw.example")
_INVOCATION = """
    insert into serverless.invocations (project_id, id, function_name, mode, state, waiting, content_type, headers,
        attributes, payload_hash, created_by, correlation_id, finished_at, result, result_type, status_code, webhook)
    values ($1, $2, 'f', 'async', 'succeeded', false, 'application/json', '{}', '{}', '', 'usr_default', '',
        clock_timestamp(), '{"answer": 42}', 'application/json', 200, $3)
"""


@dataclass
class Told:
    """A sender, its receiver, and what is owed."""

    db: Database
    receiver: Receiver
    vault: Vault
    callbacks: Callbacks

    async def owe(self, invocation: str, path: str = "/", project_id: str = PROJECT) -> None:
        url = self.receiver.url(path)
        async with self.db.transaction() as tx:
            await tx.execute(_INVOCATION, project_id, invocation, url)
            await tx.execute(
                "insert into serverless.callbacks (project_id, invocation_id, url) values ($1, $2, $3)",
                project_id,
                invocation,
                url,
            )

    async def send(self) -> int:
        count = await self.callbacks.send()
        await self.callbacks.settle()
        return count

    async def value(self, query: str) -> Any:
        async with self.db.read() as conn:
            return await conn.fetchval(query)


@pytest.fixture
async def told(database: Database, tmp_path: Path) -> AsyncIterator[Told]:
    keyring.init(tmp_path / "keys")
    vault = Vault(Keyring(tmp_path / "keys"))
    server_tls, client_tls = certificates(tmp_path)
    async with receive(server_tls) as receiver:
        sender = outward(receiver, client_tls)
        yield Told(
            database, receiver, vault, Callbacks(database, sender, vault, lambda it: schemas.invocation(it, URLS))
        )
        sender.close()


async def test_the_end_is_told_once_signed_with_the_projects_key(told: Told) -> None:
    await told.owe("one", "/here")
    assert (await told.send(), await told.send()) == (1, 0)
    (message,) = told.receiver.seen
    async with told.db.read() as conn:
        secret = await Signing(told.vault).secret(conn, PROJECT)
        other = await Signing(told.vault).secret(conn, SISTER)
    assert message.signed_by(secret)
    assert not message.signed_by(other)
    assert (message.event["id"], message.event["state"], message.event["body"]) == ("one", "succeeded", {"answer": 42})
    assert await told.value("select delivered_at is not null from serverless.callbacks")


async def test_what_is_refused_is_tried_again_and_given_up_after_a_day(told: Told) -> None:
    told.receiver.answer("/broken", 500)
    await told.owe("one", "/broken")
    assert (await told.send(), await told.send()) == (1, 0)
    assert await told.value("select next_at > clock_timestamp() from serverless.callbacks")
    assert "500" in await told.value("select error from serverless.callbacks")
    await told.value("update serverless.callbacks set next_at = now(), created_at = now() - interval '2 days'")
    assert await told.send() == 1
    assert await told.value("select failed_at is not null from serverless.callbacks")
    await told.value("update serverless.callbacks set next_at = now()")
    assert await told.send() == 0


async def test_one_project_leaves_places_for_others(told: Told) -> None:
    for n in range(10):
        await told.owe(f"many-{n}")
    await told.owe("few", project_id=SISTER)
    await told.send()
    projects = [message.event["project_id"] for message in told.receiver.seen]
    assert (projects.count(PROJECT), projects.count(SISTER)) == (4, 1)


async def test_who_falls_silent_is_not_waited_for(told: Told) -> None:
    await told.owe("one")
    await told.value("update serverless.callbacks set next_at = now() + interval '30 s', attempts = 1")
    assert await told.send() == 0
    await told.value("update serverless.callbacks set next_at = now()")
    assert await told.send() == 1
    assert len(told.receiver.seen) == 1


async def test_signing_keys_move_to_a_new_master_key(told: Told, tmp_path: Path) -> None:
    async with told.db.read() as conn:
        before = await Signing(told.vault).secret(conn, PROJECT)
    keyring.rotate(tmp_path / "keys")
    vault = Vault(Keyring(tmp_path / "keys"))
    done = await rewrap(told.db, vault, progress=lambda _: None)
    assert (done.keys, done.left) == (1, 0)
    async with told.db.read() as conn:
        assert await Signing(vault).secret(conn, PROJECT) == before
        assert await conn.fetchval("select key_id from serverless.signing_keys") == vault.current_key_id()
