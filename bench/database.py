"""A migrated database on a Postgres of its own, for what is measured without the rest of the cloud."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from penstock.embedded import postgres
from penstock.embedded.child import free_port
from penstock.kit import db
from penstock.kit.db import Database
from penstock.kit.migrate import migrate


@asynccontextmanager
async def migrated(*, connections_max: int = 10, command_timeout_s: float) -> AsyncIterator[Database]:
    """In a folder that goes with it; hints go nowhere."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        url, _ = await stack.enter_async_context(postgres.run(folder / "postgres", free_port(), folder / "pg.log"))
        await asyncio.to_thread(migrate, url)
        yield await stack.enter_async_context(
            db.connect(url, _unheard, connections_max=connections_max, command_timeout_s=command_timeout_s)
        )


def _unheard(_: str, __: bytes) -> None:
    """Nobody listens."""
