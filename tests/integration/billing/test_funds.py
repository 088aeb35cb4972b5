"""No create without funds: for itself and for everything that was asked for before it."""

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

from integration.billing.stage import Stage
from integration.compute.stage import NoSecrets, World, someone
from penstock.billing.errors import InsufficientFunds
from penstock.billing.model import Kind, Terms
from penstock.billing.service.funds import Funds
from penstock.compute.service.create import Create
from penstock.wire.rest import AllocationCreate

FUNDS = Funds(Terms(funds_minimum_s=3600))


async def _create(world: World) -> bool:
    async with world.db.transaction() as tx:
        create = Create(FUNDS, NoSecrets(), world.handoffs, world.limits)
        await create(tx, someone(), AllocationCreate(sku="g1.1"))
    return True


async def _tried(world: World) -> bool:
    try:
        return await _create(world)
    except InsufficientFunds:
        return False


async def test_whoever_never_had_anything_is_refused_with_what_is_needed(stage: Stage) -> None:
    world = World(stage.db)
    await world.add_node(2)
    with pytest.raises(InsufficientFunds, match=r"\$0\.00 there, \$3\.49 needed for 60 minutes"):
        await _create(world)
    assert await world.held() == []


async def test_of_ten_that_race_for_three_hours_worth_three_win(stage: Stage) -> None:
    world = World(stage.db)
    await world.add_node(16)
    await stage.customer("org_default", paid=2 * 3_490_000, granted=3_490_000 + 1)
    assert sum(await asyncio.gather(*(_tried(world) for _ in range(10)))) == 3


async def test_a_credit_limit_counts_as_funds(stage: Stage) -> None:
    world = World(stage.db)
    await world.add_node(2)
    await stage.customer("org_default")
    async with stage.db.transaction() as tx:
        await tx.execute("update billing.customers set credit_limit_microusd = 3490000")
    assert await _create(world)
    assert not await _tried(world)


async def test_time_that_is_not_charged_yet_is_no_funds(stage: Stage) -> None:
    world = World(stage.db)
    await world.add_node(2)
    await stage.customer("org_default", paid=2 * 3_490_000)
    now = datetime.now(UTC)
    await stage.begin(now - timedelta(hours=2))
    await stage.start(now - timedelta(hours=2), org="org_default", price=3_490_000, end=now - timedelta(minutes=59))
    assert not await _tried(world)
    await stage.post(Kind.PAYMENT, "org_default", 3_490_000)
    assert await _create(world)


async def test_what_costs_nothing_needs_nothing(stage: Stage) -> None:
    world = World(stage.db)
    await world.add_node(2)
    async with stage.db.transaction() as tx:
        await tx.execute("update compute.skus set price_microusd_per_gpu_hour = 0")
    assert await _create(world)
