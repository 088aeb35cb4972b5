"""The worker process as a whole."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from conftest import Servers
from integration.compute.stage import World
from integration.flows.fakenode import FakeNode
from penstock.compute.model import AT_REST, Allocation, State
from penstock.embedded import temporal
from penstock.embedded.ports import free_port
from penstock.fleet import pki
from penstock.kit.bus import Bus
from penstock.kit.outward import Outward
from penstock.notices.model import Patience
from penstock.notices.service import Webhooks
from penstock.processes import worker
from penstock.processes.worker import Settings
from penstock.secrets import keyring
from penstock.secrets.keyring import Keyring
from penstock.secrets.vault import Vault
from webhook_receiver import caller as webhook_caller


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[None]:
    """The process's body, as a task."""

    async def body() -> None:
        async with AsyncExitStack() as stack:
            await worker.body(stack, settings)

    task = asyncio.create_task(body())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def settle(world: World, allocation_id: str) -> Allocation:
    async with asyncio.timeout(20):
        while (row := await world.row(allocation_id)).state not in AT_REST:
            await asyncio.sleep(0.05)
    return row


async def test_the_worker_waits_for_temporal_and_outlives_it(
    world: World, database_url: str, nats_bus: Bus, servers: Servers, tmp_path: Path
) -> None:
    port = free_port()
    pki.init(tmp_path / "pki", ["127.0.0.1"])
    keyring.init(tmp_path / "secrets")
    settings = Settings(
        database_url=database_url,
        nats_url=servers.nats_url,
        temporal_address=f"127.0.0.1:{port}",
        pki_dir=str(tmp_path / "pki"),
        secrets_dir=str(tmp_path / "secrets"),
        objects_url=(tmp_path / "objects").as_uri(),
        heartbeat_s=100,
        saga_idle_s=2,
        ops_port=0,
    )
    node = FakeNode(world.db, await world.add_node(2))
    async with node.running(nats_bus), running(settings):
        webhook_id = await _webhook_to_ourselves(world, Vault(Keyring(tmp_path / "secrets")))
        first = await world.create()
        await asyncio.sleep(0.5)
        assert (await world.row(first.id)).state is State.REQUESTED
        async with temporal.run(tmp_path / "one", port, free_port(), tmp_path / "one.log"):
            assert (await settle(world, first.id)).state is State.ACTIVE
        second = await world.create()
        waits = await world.create(wait_s=60)
        await world.release(first.id)
        async with temporal.run(tmp_path / "two", port, free_port(), tmp_path / "two.log"):
            assert (await settle(world, first.id)).state is State.RELEASED
            assert (await settle(world, second.id)).state is State.ACTIVE
            assert (await settle(world, waits.id)).state is State.ACTIVE
        assert await _refusals(world, webhook_id) == {"address_not_public"}
    assert node.units == {second.unit_id, waits.unit_id}


async def _webhook_to_ourselves(world: World, vault: Vault) -> str:
    """As if its address had been public when it was saved."""
    async with world.db.transaction() as tx:
        made, _ = await Webhooks(Outward(), vault, Patience()).create(
            tx, webhook_caller("prj_default"), url="https://127.0.0.1:8443/", event_types=["*"]
        )
    return made.id


async def _refusals(world: World, webhook_id: str) -> set[str]:
    """Why events were not sent there, as soon as one was tried."""
    tried = "select distinct error from notices.deliveries where webhook_id = $1 and attempts > 0 and error <> ''"
    async with asyncio.timeout(20):
        while True:
            async with world.db.read() as conn:
                if found := {row["error"] for row in await conn.fetch(tried, webhook_id)}:
                    return found
            await asyncio.sleep(0.05)
