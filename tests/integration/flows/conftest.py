"""Fixtures of the flows' tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conftest import Servers
from integration.compute.stage import World
from integration.flows.stage import Cloud, cloud_on
from penstock.kit.bus import Bus
from penstock.kit.db import Database


@pytest.fixture
async def cloud(database: Database, nats_bus: Bus, servers: Servers, tmp_path: Path) -> AsyncIterator[Cloud]:
    """A cloud whose parts all work."""
    async with cloud_on(database, nats_bus, servers.temporal_address, tmp_path) as built:
        yield built


@pytest.fixture
def world(database: Database) -> World:
    """A world without a worker."""
    return World(database)
