"""Random sequences of starts, stops, prices, payments, crashes and clocks: the ledger always says what is owed."""

import asyncio
import os
import random
from contextlib import AsyncExitStack

import pytest
import uvloop
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from integration.billing.meter_machine import MeterMachine
from integration.billing.stage import Stage
from penstock.kit import db


def _prove(database_url: str, examples: int) -> dict[str, int]:
    """Run so many sequences on a loop of their own; how often what was seen."""
    number = int(os.environ.get("PENSTOCK_PROPERTY_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"seed {number} (PENSTOCK_PROPERTY_SEED={number} runs it again)")
    MeterMachine.seen.clear()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        database = runner.run(
            stack.enter_async_context(db.connect(f"{database_url}?synchronous_commit=off", lambda _, __: None))
        )
        MeterMachine.runner, MeterMachine.stage = runner, Stage(database)
        try:
            run_state_machine_as_test(
                seed(number)(MeterMachine),
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=20,
                    deadline=None,
                    database=None,
                    print_blob=True,
                    suppress_health_check=[
                        HealthCheck.too_slow,
                        HealthCheck.data_too_large,
                        HealthCheck.filter_too_much,
                    ],
                ),
            )
        finally:
            runner.run(stack.aclose())
    return MeterMachine.seen


async def test_three_hundred_sequences_drift_by_nothing(database_url: str) -> None:
    seen = await asyncio.to_thread(_prove, database_url, 300)
    _was_worth_it(seen, 300)


@pytest.mark.soak
@pytest.mark.timeout(7000)
async def test_ten_thousand_sequences_drift_by_nothing(database_url: str) -> None:
    seen = await asyncio.to_thread(_prove, database_url, 10_000)
    _was_worth_it(seen, 10_000)


def _was_worth_it(seen: dict[str, int], examples: int) -> None:
    """Sequences without a crash in a run, a correction or a clock that went back would prove little."""
    print(dict(seen))
    assert seen["sequences"] >= examples * 0.9, seen
    at_least = {
        "runs": 1.0,
        "crashed": 0.2,
        "crashed_at_the_end": 0.05,
        "corrections": 0.1,
        "checkpoints": 0.2,
        "back": 0.1,
        "off": 0.05,
        "survived": 0.05,
        "silent": 0.1,
    }
    short = {what: seen[what] for what, share in at_least.items() if seen[what] < share * examples}
    assert not short, seen
