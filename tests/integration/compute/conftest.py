"""Fixtures of compute's tests."""

import pytest

from integration.compute.stage import World
from penstock.kit.db import Database


@pytest.fixture
def world(database: Database) -> World:
    """A world on a fresh database."""
    return World(database)
