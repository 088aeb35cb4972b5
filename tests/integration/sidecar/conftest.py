"""One NATS and one sidecar for all of these tests; each test has units of its own."""

from collections.abc import AsyncIterator

import pytest

from integration.sidecar.stage import Stage, nats_and_stage


@pytest.fixture(scope="package")
async def stage() -> AsyncIterator[Stage]:
    async with nats_and_stage() as (stage, _):
        yield stage
