"""Fixtures of billing's tests."""

from collections.abc import AsyncIterator

import pytest

from conftest import Servers, fresh_database
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
    async with fresh_database(servers) as url, db.connect(url, lambda *_: None, name="test") as connected:
        yield connected


@pytest.fixture
def till(shared_database: Database) -> Till:
    """Payments of an organisation that nobody else has."""
    return Till(shared_database)
