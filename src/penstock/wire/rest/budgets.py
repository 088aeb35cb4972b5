"""Budgets: what a project or a key may spend in a period."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body
from penstock.wire.rest.states import BudgetAction, BudgetPeriod
from penstock.wire.times import Time


class BudgetPut(Body, frozen=True):
    """Set the one budget of a project, or of a key of it, for a period of the UTC calendar. At the limit, `reject`
    refuses and releases, `warn` only tells."""

    period: Literal["hourly", "daily", "monthly"]
    limit_microusd: Annotated[int, Meta(ge=0, le=10**12)]
    action: Literal["reject", "warn"] = "reject"
    key_id: Annotated[str, Meta(max_length=64)] | None = None


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget and how it stands. `reserved_microusd` is promised to what runs, and spent or given back soon."""

    id: str
    project_id: str
    key_id: str | None
    period: BudgetPeriod
    limit_microusd: int
    action: BudgetAction
    spent_microusd: int
    reserved_microusd: int
    remaining_microusd: int
    period_start: Time
    resets_at: Time
    created_at: Time
    updated_at: Time
