"""Brings the database of an install to where its processes can use it: the schema, and the first administrator."""

import asyncio

from penstock.billing.service import welcome
from penstock.embedded import secret
from penstock.identity import bootstrap
from penstock.identity.model import DEFAULT_ORGANISATION
from penstock.kit import db
from penstock.kit.db import Database, Tx
from penstock.kit.errors import Conflict
from penstock.kit.migrate import migrate
from penstock.processes.up.folder import DataFolder


class KeyElsewhere(Conflict):
    """The database's administrator was made by another install."""

    code = "up.admin_key_elsewhere"


async def prepare(database_url: str, folder: DataFolder, *, ours: bool) -> None:
    """Migrate, and see to it that the folder holds the administrator's key."""
    await asyncio.to_thread(migrate, database_url)
    async with db.connect(database_url, _no_hint, connections_max=1, name="up") as database:
        await _keep_admin_key(database, folder, ours=ours)


async def administrator(database_url: str, *, reset: bool) -> str | None:
    """The key of a new administrator, or of the one there is when it is to be reset; none when there is one."""
    async with (
        db.connect(database_url, _no_hint, connections_max=1, name="bootstrap") as database,
        database.transaction() as tx,
    ):
        key = await _first(tx)
        return await bootstrap.reset_admin_key(tx) if key is None and reset else key


async def _first(tx: Tx) -> str | None:
    """The administrator and what the first organisation may spend."""
    key = await bootstrap.bootstrap(tx)
    if key is not None:
        await welcome.welcome(tx, DEFAULT_ORGANISATION)
    return key


async def _keep_admin_key(database: Database, folder: DataFolder, *, ours: bool) -> None:
    # The key is on disk before the transaction that makes it valid commits: a crash in between costs nothing.
    async with database.transaction() as tx:
        if key := await _first(tx):
            secret.keep(folder.admin_key, key)
            return
    if folder.admin_key.exists():
        return
    if not ours:
        raise KeyElsewhere(
            f"this database already has an administrator, whose key is not in {folder.admin_key};"
            " put it there, or make a new one with `penstock bootstrap --reset`"
        )
    async with database.transaction() as tx:
        secret.keep(folder.admin_key, await bootstrap.reset_admin_key(tx))


def _no_hint(_: str, __: bytes) -> None:
    """Nobody listens yet; whoever comes later reads the database."""
