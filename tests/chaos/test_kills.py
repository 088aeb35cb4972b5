"""kill -9 of every kind of process while allocations come and go: nothing is lost, held twice or left behind."""

import asyncio
import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from chaos.faults import kill
from chaos.invariants import (
    events_are_complete_and_in_order,
    every_second_is_charged_once,
    everything_ended,
    fetch,
    no_outage_is_billed,
    no_unit_is_left,
    sandboxes,
    unit_folders,
)
from e2e.cloud import Cloud
from penstock import AsyncClient
from penstock.sdk.errors import SdkError

KINDS = ("api", "gateway", "worker", "relay", "biller", "activator", "agent", "sidecar", "nats", "temporal", "postgres")
TENANTS = 4
_FROM_STOCK = "select count(*) from compute.allocations where stock_id is not null"


async def _come_and_go(client: AsyncClient, dice: random.Random, stop: asyncio.Event) -> int:
    """Create, wait a random while, release; whatever the api answers in between."""
    cycles = 0
    while not stop.is_set():
        with suppress(SdkError):
            # The first takes from stock, which is of one GPU each.
            allocation = await client.allocations.create("g1.1", gpus=dice.choice((1, 1, 2, 4)) if cycles else 1)
            await asyncio.sleep(dice.uniform(0, 1.5))
            await _release(client, allocation.id)
            cycles += 1
        await asyncio.sleep(dice.uniform(0, 0.2))
    return cycles


async def _release(client: AsyncClient, allocation_id: str) -> None:
    """Asked for again while the api is away: five hundred kills would leave enough units behind to fill the fleet."""
    for _ in range(20):
        with suppress(SdkError):
            await client.allocations.release(allocation_id)
            return
        await asyncio.sleep(0.5)


async def _release_all(client: AsyncClient) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            async for allocation in client.allocations.list():
                if allocation.state not in ("released", "failed", "releasing"):
                    await client.allocations.release(allocation.id)
        except SdkError:
            await asyncio.sleep(0.5)
        else:
            return


async def _stocked(client: AsyncClient) -> None:
    """Wait for the stock: under the kills to come it may never be complete again."""
    deadline = time.monotonic() + 60
    while not [floor async for floor in client.stock.list() if floor.ready >= floor.floor]:
        assert time.monotonic() < deadline, "the stock did not fill up"
        await asyncio.sleep(0.1)


async def _turn_off(cloud: Cloud, client: AsyncClient, dice: random.Random) -> datetime:
    """Everything is off for a while, with units running; when it was off."""
    await _release_all(client)  # units whose creation was answered to nobody: they may fill the fleet
    await _running(client)
    await asyncio.to_thread(cloud.down)
    off = datetime.now(UTC)
    await asyncio.sleep(dice.uniform(2, 5))
    await asyncio.to_thread(cloud.up)
    return off


async def _running(client: AsyncClient) -> None:
    """One that nobody releases meanwhile is there for the outage."""
    deadline = time.monotonic() + 60
    made = ""
    while time.monotonic() < deadline:
        with suppress(SdkError):
            made = made or (await client.allocations.create("g1.1")).id
            state = (await client.allocations.get(made)).state
            if state == "active":
                return
            made = made if state in ("requested", "provisioning") else ""
        await asyncio.sleep(0.2)
    raise AssertionError("nothing ran before the outage")


async def _storm(cloud: Cloud, kills: int) -> None:
    seed = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"seed {seed} (PENSTOCK_CHAOS_SEED={seed} runs it again)")
    dice = random.Random(seed)
    cloud = replace(cloud, env={**cloud.env, "PENSTOCK_BILLER_WINDOW_SECONDS": "1"})
    await asyncio.to_thread(cloud.up)
    stop = asyncio.Event()
    async with AsyncClient(cloud.api, cloud.key, timeout_s=10) as client:
        await client.stock.put("g1.1", floor=2)
        await _stocked(client)
        tenants = [asyncio.create_task(_come_and_go(client, dice, stop)) for _ in range(TENANTS)]
        order = [KINDS[number % len(KINDS)] for number in range(kills)]
        dice.shuffle(order)
        seen = 0
        for kind in order:
            await asyncio.sleep(dice.uniform(0, 1.0))
            seen += len(sandboxes(unit_folders(cloud)))
            await kill(cloud, kind)
        off = await _turn_off(cloud, client, dice)
        stop.set()
        cycles = sum(await asyncio.gather(*tenants))
        await _release_all(client)
        await client.stock.delete("g1.1")
    assert cycles >= kills // 4, f"only {cycles} cycles ran: the faults hit nothing"
    assert seen, "no sandbox ran when a process was killed"
    assert (await fetch(cloud, _FROM_STOCK))[0][0], "nothing came from stock"
    await everything_ended(cloud)
    await no_unit_is_left(cloud)
    await no_outage_is_billed(cloud, off)
    assert await every_second_is_charged_once(cloud) > 0
    assert await events_are_complete_and_in_order(cloud) >= cycles


@pytest.mark.timeout(400)
async def test_twenty_kills_leave_nothing_behind(cloud: Cloud) -> None:
    await _storm(cloud, 20)


@pytest.mark.soak
@pytest.mark.timeout(7000)
async def test_five_hundred_kills_leave_nothing_behind(cloud: Cloud) -> None:
    await _storm(cloud, 500)
