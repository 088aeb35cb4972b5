"""Whoever waits for a task is told of its result, whoever else has left."""

import asyncio

from penstock.flows.outcomes import Outcomes
from penstock.kit.bus import Bus
from penstock.wire import subjects


async def test_a_waiter_that_leaves_takes_nothing_from_the_others(nats_bus: Bus) -> None:
    outcomes = Outcomes()
    await outcomes.watch(nats_bus)
    with outcomes.waiting("tsk_1") as first:
        with outcomes.waiting("tsk_1") as second:
            second.clear()
        nats_bus.hint(subjects.task_done("tsk_1"), b"")
        await asyncio.wait_for(first.wait(), 30)
