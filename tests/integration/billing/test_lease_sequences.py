"""Random lives of budgets and leases against a simple model that keeps lists and adds them up."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.billing.treasury import KEY, MISCOUNTED, OTHER_KEY, Treasury
from penstock.billing.budgetmodel import Action, Lease, Period
from penstock.billing.errors import BudgetExhausted, LeaseOver
from penstock.kit.db import Database
from penstock.kit.ids import new_id

SUBJECTS = st.sampled_from([None, KEY, OTHER_KEY])
LIMITS = st.integers(0, 2000)
STEP = st.one_of(
    st.tuples(st.just("set"), SUBJECTS, st.sampled_from(Period), LIMITS, st.sampled_from(Action)),
    st.tuples(st.just("delete"), st.integers(0, 9)),
    st.tuples(st.just("reserve"), SUBJECTS, st.integers(1, 800), st.booleans(), st.integers(1, 3000)),
    st.tuples(st.just("reserve"), SUBJECTS, st.integers(1, 800), st.booleans(), st.integers(1, 60)),
    st.tuples(st.just("settle"), st.integers(0, 9), st.integers(0, 100)),
    st.tuples(st.just("settle"), st.integers(0, 9), st.integers(0, 100)),
    st.tuples(st.just("crash"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([1, 20, 60, 1800, 86_400])),
    st.tuples(st.just("sweep")),
)
LIVES = st.lists(STEP, min_size=5, max_size=30)


@dataclass
class Held:
    """A lease as the model sees it, with the budgets and periods that it counts under."""

    lease: Lease
    key: str | None
    at: datetime
    under: set[tuple[str, datetime]]


@dataclass
class Limit:
    """A budget as the model sees it."""

    id: str
    key: str | None
    period: Period
    limit: int
    action: Action


@dataclass
class Life:
    """What really happens, and what should."""

    treasury: Treasury
    project: str
    now: datetime = datetime(2026, 1, 31, 22, 10, tzinfo=UTC)
    budgets: list[Limit] = field(default_factory=list[Limit])
    running: list[Held] = field(default_factory=list[Held])
    #: When, by which key, under which budgets, how much.
    spent: list[tuple[Held, int]] = field(default_factory=list[tuple[Held, int]])

    def start(self, period: Period, at: datetime) -> datetime:
        hour = at.replace(minute=0, second=0)
        if period is Period.HOURLY:
            return hour
        return hour.replace(hour=0) if period is Period.DAILY else hour.replace(hour=0, day=1)

    def figures(self, budget: Limit) -> tuple[int, int]:
        """What is spent and what reserved in the period that runs."""
        here = (budget.id, self.start(budget.period, self.now))
        reserved = sum(
            held.lease.amount_microusd
            for held in self.running
            if here in held.under and held.lease.expires_at > self.now
        )
        return sum(amount for held, amount in self.spent if here in held.under), reserved

    def applying(self, key: str | None) -> list[Limit]:
        return [budget for budget in self.budgets if budget.key in (None, key)]

    async def set(self, key: str | None, period: Period, limit: int, action: Action) -> None:
        budget_id = await self.treasury.set(
            limit, period=period, key=key, action=action, project=self.project, at=self.now
        )
        made = Limit(budget_id, key, period, limit, action)
        if any(budget.id == budget_id for budget in self.budgets):
            self.budgets = [made if budget.id == budget_id else budget for budget in self.budgets]
            return
        self.budgets.append(made)
        start = self.start(period, self.now)
        for held in [*self.running, *(held for held, _ in self.spent)]:
            if key in (None, held.key) and held.at >= start:
                held.under.add((budget_id, start))

    async def delete(self, number: int) -> None:
        if number < len(self.budgets):
            gone = self.budgets.pop(number)
            assert await self.treasury.delete(gone.id, project=self.project)

    async def reserve(self, key: str | None, amount: int, whole: bool, ttl_s: int) -> None:
        needed = amount if whole else 1
        rooms = [
            budget.limit - sum(self.figures(budget)) for budget in self.applying(key) if budget.action is Action.REJECT
        ]
        room = min(rooms, default=10**9)
        try:
            lease = await self.treasury.lease(
                amount, key=key, needed=needed, ttl_s=ttl_s, at=self.now, project=self.project
            )
        except BudgetExhausted:
            assert room < needed
            return
        if lease is None:
            assert not self.applying(key)
            return
        assert needed <= lease.amount_microusd <= min(amount, room)
        assert lease.amount_microusd <= max(room // 4, 10, needed)
        assert lease.expires_at == self.now + timedelta(seconds=ttl_s)
        under = {(budget.id, self.start(budget.period, self.now)) for budget in self.applying(key)}
        self.running.append(Held(lease, key, self.now, under))

    async def settle(self, number: int, percent: int) -> None:
        if number >= len(self.running):
            return
        held = self.running[number]
        amount = held.lease.amount_microusd * percent // 100
        if held.lease.expires_at <= self.now:
            with pytest.raises(LeaseOver):
                await self.treasury.settle(held.lease, amount, at=self.now)
            return
        await self.treasury.settle(held.lease, amount, at=self.now)
        self.running.remove(held)
        self.spent.append((held, amount))
        with pytest.raises(LeaseOver):
            await self.treasury.settle(held.lease, 0, at=self.now)

    async def crash(self, number: int) -> None:
        """A holder dies: nobody settles, and time passes until its lease is over."""
        if number < len(self.running):
            self.now = max(self.now, self.running[number].lease.expires_at)

    async def wait(self, seconds: int) -> None:
        self.now += timedelta(seconds=seconds)

    async def sweep(self) -> None:
        await self.treasury.expire(at=self.now)

    async def holds(self) -> None:
        for budget in self.budgets:
            found = await self.treasury.look(budget.id, at=self.now, project=self.project)
            assert (found.spent_microusd, found.reserved_microusd) == self.figures(budget), budget


async def live(treasury: Treasury, steps: list[tuple[Any, ...]]) -> None:
    life = Life(treasury, new_id("prj"))
    for name, *args in steps:
        act: Callable[..., Awaitable[None]] = getattr(life, name)
        await act(*args)
        await life.holds()
    assert await treasury.rows(MISCOUNTED) == []
    await treasury.expire(at=life.now + timedelta(days=1))


@given(steps=LIVES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_life_agrees_with_the_model(database: Database, steps: list[tuple[Any, ...]]) -> None:
    await live(Treasury(database), steps)


@pytest.mark.soak
@given(steps=LIVES)
@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_many_more_lives_agree_with_the_model(database: Database, steps: list[tuple[Any, ...]]) -> None:
    await live(Treasury(database), steps)
