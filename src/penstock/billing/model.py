"""Accounts, transfers and what an organisation's balance means. Pure.

Amounts are whole micro-dollars. An entry that is positive is to the account's credit: a payment raises the
organisation's balance and lowers clearing, usage lowers the balance and raises revenue. `MOVES` is the whole life of a
balance: it falls one step at a time, so that each warning is given once, and rises at one go.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

CURRENCY: Final = "USD"
MICROUSD: Final = 1_000_000
#: Nobody pays or is granted more than this at once, and no sum of such amounts leaves 64 bits.
AMOUNT_MAX_MICROUSD: Final = 1_000_000 * MICROUSD
US_PER_HOUR: Final = 3_600_000_000


class Account(StrEnum):
    """An organisation's own accounts."""

    BALANCE = "balance"
    CREDIT = "credit"
    HOLDS = "holds"

    def of(self, organisation_id: str) -> str:
        """The id of the account."""
        return f"{organisation_id}/{self}"


#: The platform's accounts.
REVENUE: Final = "platform/revenue"
CLEARING: Final = "platform/clearing"
PROMOTIONS: Final = "platform/promotions"


class Kind(StrEnum):
    """What a transfer is for."""

    USAGE = "usage"
    CORRECTION = "correction"
    PAYMENT = "payment"
    REFUND = "refund"
    DISPUTE = "dispute"
    GRANT = "grant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Money that changes accounts. `id` is the key that makes it happen once; the entries sum to zero."""

    id: str
    kind: Kind
    organisation_id: str
    entries: Mapping[str, int]
    corrects: str | None = None
    memo: str = ""


class State(StrEnum):
    """How an organisation stands, best first."""

    HEALTHY = "healthy"
    LOW_BALANCE = "low_balance"
    AUTO_RELEASE_PENDING = "auto_release_pending"
    DEPLETED = "depleted"


class Event(StrEnum):
    """What can happen to it."""

    FELL = "fell"
    RECOVERED = "recovered"
    EASED = "eased"


#: The whole lifecycle. A balance that eased is better off and still not well.
MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.HEALTHY, Event.FELL): State.LOW_BALANCE,
    (State.LOW_BALANCE, Event.FELL): State.AUTO_RELEASE_PENDING,
    (State.AUTO_RELEASE_PENDING, Event.FELL): State.DEPLETED,
    (State.LOW_BALANCE, Event.RECOVERED): State.HEALTHY,
    (State.AUTO_RELEASE_PENDING, Event.RECOVERED): State.HEALTHY,
    (State.DEPLETED, Event.RECOVERED): State.HEALTHY,
    (State.AUTO_RELEASE_PENDING, Event.EASED): State.LOW_BALANCE,
    (State.DEPLETED, Event.EASED): State.LOW_BALANCE,
}
INITIAL: Final = State.DEPLETED
SEVERITY: Final = {state: number for number, state in enumerate(State)}

#: The fact that entering a state from a better one writes.
WARNINGS: Final[Mapping[State, str]] = {
    State.LOW_BALANCE: "billing.low_balance_warning",
    State.AUTO_RELEASE_PENDING: "billing.auto_release_pending",
    State.DEPLETED: "billing.balance_depleted",
}
RECOVERED_FACT: Final = "billing.balance_recovered"
FORCE_RELEASE_FACT: Final = "provisioning.force_release_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """When a balance is low, when release is near, and how much must be there for a start."""

    low_balance_microusd: int = 5 * MICROUSD
    #: Release is pending when the balance would end within this time.
    release_within_s: float = 300
    #: A create needs funds for everything that runs, and for itself, for this long.
    funds_minimum_s: float = 600
    #: A depleted balance counts as refilled from this amount on: not for the crumbs that a stop leaves over.
    recovered_from_microusd: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What an organisation owns and spends. Time is charged until `accrued_until`; what allocations cost since, each
    from its own beginning, is `unbilled_microusd`."""

    organisation_id: str
    state: State
    version: int
    balance_microusd: int
    credit_microusd: int
    holds_microusd: int
    credit_limit_microusd: int
    #: Of allocations that are paid for now.
    burn_microusd_per_hour: int
    unbilled_microusd: int
    accrued_until: datetime
    now: datetime

    @property
    def charged_microusd(self) -> int:
        """What there is to spend, by the ledger."""
        return self.balance_microusd + self.credit_microusd + self.credit_limit_microusd

    @property
    def available_microusd(self) -> int:
        """What there is to spend at this moment."""
        return self.charged_microusd - self.unbilled_microusd

    @property
    def lasts_s(self) -> float | None:
        """How long that lasts at the present rate; none for ever."""
        if self.burn_microusd_per_hour <= 0:
            return None
        return max(self.available_microusd, 0) * 3600 / self.burn_microusd_per_hour


def judge(standing: Standing, terms: Terms) -> State:
    """Where the balance belongs."""
    available, lasts_s = standing.available_microusd, standing.lasts_s
    floor = terms.recovered_from_microusd if standing.state is State.DEPLETED else 1
    if available < floor:
        return State.DEPLETED
    if lasts_s is not None and lasts_s <= terms.release_within_s:
        return State.AUTO_RELEASE_PENDING
    return State.LOW_BALANCE if available < terms.low_balance_microusd else State.HEALTHY


def path(current: State, target: State) -> tuple[State, ...]:
    """The states to enter on the way. Falling passes through each; rising goes where it can."""
    if SEVERITY[target] < SEVERITY[current]:
        return (MOVES[current, Event.RECOVERED if target is State.HEALTHY else Event.EASED],)
    entered: list[State] = []
    while current is not target:
        current = MOVES[current, Event.FELL]
        entered.append(current)
    return tuple(entered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accrued:
    """What one run charged. `until` is how far time is charged now; `behind` that there is more."""

    until: datetime
    windows: int = 0
    transfers: int = 0
    amount_microusd: int = 0
    settled: int = 0
    behind: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What `per` units of a meter cost, from a time on."""

    meter: str
    version: int
    price_microusd: int
    per: int
    effective_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Something metered by another domain, as its fact says; `key` makes it count once."""

    key: str
    organisation_id: str
    project_id: str
    meter: str
    quantity: int
    resource_kind: str
    resource_id: str
    occurred_at: datetime
    key_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    #: Whether a budget's lease covers it, so that settling the lease has counted it already.
    leased: bool = False


def rated(quantity: int, *, price_microusd: int, per: int) -> int:
    """What a quantity costs in all. A part of it costs the difference of two such totals, so no rounding adds up."""
    return quantity * price_microusd // per


def standing_payload(standing: Standing, state: State) -> dict[str, Any]:
    """What facts about a balance carry."""
    return {
        "organisation_id": standing.organisation_id,
        "state": state,
        "available_microusd": standing.available_microusd,
        "burn_microusd_per_hour": standing.burn_microusd_per_hour,
        "lasts_s": standing.lasts_s,
    }
