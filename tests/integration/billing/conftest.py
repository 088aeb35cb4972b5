"""Fixtures of billing's tests."""

import os
from collections.abc import AsyncIterator

import asyncpg
import pytest

from conftest import Servers
from integration.billing.stage import Stage
from integration.billing.till import Till
from penstock.kit import db
from penstock.kit.db import Database


@pytest.fixture
async def stage(database: Database) -> Stage:
    """A meter on a fresh database, at ten o'clock."""
    made = Stage(database)
    await made.begin()
    return made


@pytest.fixture(scope="package")
async def shared_database(servers: Servers) -> AsyncIterator[Database]:
    """One database for all tests that keep to an organisation of their own."""
    name = f"billing_{os.urandom(6).hex()}"
    admin = await asyncpg.connect(servers.admin_url)
    await admin.execute(f"create database {name} template {servers.template}")
    async with db.connect(servers.admin_url.rsplit("/", 1)[0] + f"/{name}", lambda *_: None, name="test") as connected:
        yield connected
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()


@pytest.fixture
def till(shared_database: Database) -> Till:
    """Payments of an organisation that nobody else has."""
    return Till(shared_database)
