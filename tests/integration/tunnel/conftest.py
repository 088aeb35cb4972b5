"""Fixtures of the tunnel's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from conftest import Servers
from integration.tunnel.stage import World, client
from penstock.fleet import pki
from penstock.kit.db import Database
from penstock.secrets import keyring


@pytest.fixture
async def world(database: Database, database_url: str, servers: Servers, tmp_path: Path) -> AsyncIterator[World]:
    """One gateway, one node, one active allocation."""
    pki.init(tmp_path, ["127.0.0.1"])
    keyring.init(tmp_path / "secrets")
    made = World(database, database_url, servers.nats_url, tmp_path)
    try:
        await made.set_up()
        yield made
    finally:
        await made.tear_down()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that follows nothing by itself."""
    async with client() as session:
        yield session
