"""Plays every scenario on the real Temporal and writes the histories that `test_replay` replays.

Run it when the saga changes on purpose, keep the old files too while sagas of the old kind may still run:

    PYTHONPATH=tests python tests/integration/flows/record_histories.py
"""

import asyncio
import re
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from integration.flows.scenarios import SCENARIOS
from integration.flows.stage import cloud_on
from penstock.embedded import nats, postgres, temporal
from penstock.embedded.ports import free_port
from penstock.kit import bus, db
from penstock.kit.migrate import migrate

#: Who ran it does not belong into the repository.
_WORKER = re.compile(r'"\d+@[^"]+"')
HISTORIES = Path(__file__).parents[2] / "data" / "histories"


async def record() -> None:
    """Write one file per scenario."""
    HISTORIES.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "log"
        url, _ = await stack.enter_async_context(postgres.run(folder / "p", free_port(), log / "p.log"))
        nats_url, _ = await stack.enter_async_context(nats.run(folder / "n", free_port(), log / "n.log"))
        address, _ = await stack.enter_async_context(
            temporal.run(folder / "t", free_port(), free_port(), log / "t.log")
        )
        await asyncio.to_thread(migrate, url)
        connected = await stack.enter_async_context(bus.connect(nats_url, name="record"))
        database = await stack.enter_async_context(db.connect(url, connected.hint))
        for play in SCENARIOS:
            async with cloud_on(database, connected, address, folder / "pki") as cloud:
                allocation_id = await play(cloud)
                await cloud.saga(allocation_id).result()
                history = await cloud.saga(allocation_id).fetch_history()
                (HISTORIES / f"{play.__name__}.json").write_text(_WORKER.sub('"worker"', history.to_json()))
                async with database.transaction() as tx:
                    await tx.execute("update fleet.nodes set state = 'lost'")


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(record())
