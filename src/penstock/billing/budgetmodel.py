"""Budgets, and how much of them is leased at a time. Pure.

A budget limits what a project, or one of its keys, spends in an hour, a day or a month of UTC. Hot paths lease a
tranche ahead and spend from it without asking. Tranches shrink as a limit comes near, so that the last of the money is
not locked up with one holder while others starve.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from penstock.kit.text import dollars

#: Of one project.
BUDGETS_MAX: Final = 100
#: A holder that dies locks its tranche up for so long at most.
LEASE_S_MAX: Final = 3600.0
WARNING_FACT: Final = "billing.budget_warning"
EXHAUSTED_FACT: Final = "billing.budget_exhausted"
_RAISE: Final = "raise it with `penstock billing budget set`"


class Period(StrEnum):
    """Of the UTC calendar."""

    HOURLY = "hourly"
    DAILY = "daily"
    MONTHLY = "monthly"


class Action(StrEnum):
    """What happens at the limit."""

    REJECT = "reject"
    WARN = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTerms:
    """How leases shrink, and how far ahead the end is seen."""

    #: No tranche is made smaller than this for the sake of others.
    tranche_min_microusd: int = 10_000
    #: Allocations are released when the limit would be reached within this time: two windows and a margin.
    release_lead_s: float = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a budget is set to. Project, key and period say which one it is."""

    organisation_id: str
    project_id: str
    key_id: str | None
    period: Period
    limit_microusd: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Setting):
    """A budget and its period at a moment. `reserved` is promised to holders of leases, `held` kept for allocations
    that run and are not charged yet."""

    id: str
    created_at: datetime
    updated_at: datetime
    starts_at: datetime
    ends_at: datetime
    spent_microusd: int
    reserved_microusd: int
    held_microusd: int

    @property
    def room_microusd(self) -> int:
        """What is still to be had; negative when more than all is taken."""
        return self.limit_microusd - self.spent_microusd - self.reserved_microusd - self.held_microusd

    @property
    def title(self) -> str:
        """How messages name it."""
        subject = f"key {self.key_id}" if self.key_id else "the project"
        return f"the {self.period} budget of {subject} ({self.id})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """So much may be spent before it expires, and must be settled by then."""

    id: str
    amount_microusd: int
    expires_at: datetime


def tightest(budgets: Sequence[Budget]) -> Budget | None:
    """The one that refuses first; none where all only warn."""
    refusing = [budget for budget in budgets if budget.action is Action.REJECT]
    return min(refusing, key=lambda budget: (budget.room_microusd, budget.id), default=None)


def tranche(budgets: Sequence[Budget], *, asked: int, needed: int, terms: BudgetTerms) -> int:
    """How much is leased under all these budgets at once: at most a quarter of what is left, but not less than a
    sensible minimum or what is needed; 0 where there is not even that."""
    tight = tightest(budgets)
    if tight is None:
        return asked
    room = tight.room_microusd
    if room < needed:
        return 0
    return min(asked, room, max(room // 4, terms.tranche_min_microusd, needed))


def refusal(budget: Budget) -> str:
    """Why no more is to be had, and what to do about it."""
    if budget.limit_microusd == 0:
        return f"the limit of {budget.title} is $0.00: nothing may be spent; {_RAISE}"
    left = f"has {dollars(budget.room_microusd)} left" if budget.room_microusd > 0 else "is used up"
    text = f"{budget.title} {left}: {dollars(budget.spent_microusd)} of {dollars(budget.limit_microusd)} is spent"
    if promised := budget.reserved_microusd + budget.held_microusd:
        text += f", and what runs needs {dollars(promised)} more"
    return f"{text}; it resets at {budget.ends_at:%Y-%m-%d %H:%M} UTC; {_RAISE}"


def budget_payload(budget: Budget) -> dict[str, Any]:
    """What facts about a budget carry."""
    return {
        "budget_id": budget.id,
        "project_id": budget.project_id,
        "key_id": budget.key_id,
        "period": budget.period,
        "period_start": budget.starts_at,
        "limit_microusd": budget.limit_microusd,
        "spent_microusd": budget.spent_microusd,
        "action": budget.action,
    }
