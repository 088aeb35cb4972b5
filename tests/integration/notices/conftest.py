"""Fixtures of the webhooks' tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.kit.db import Database
from webhook_receiver import Stage, stage_on


@pytest.fixture
async def stage(database: Database, tmp_path: Path) -> AsyncIterator[Stage]:
    """All parts of notices, and a receiver."""
    async with stage_on(database, tmp_path) as built:
        yield built
