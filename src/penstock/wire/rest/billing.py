"""What organisations own, spend and are billed. Amounts are whole micro-dollars; days and months are UTC's."""

from datetime import date
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.wire.rest.common import Body
from penstock.wire.rest.states import BalanceState
from penstock.wire.times import Time

Amount = Annotated[int, Meta(ge=1, le=1_000_000_000_000)]
Memo = Annotated[str, Meta(min_length=1, max_length=200)]


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How an organisation stands. `available_microusd` is what there is to spend now: balance, promotional credit and
    credit limit, less the time since `accrued_until`, which is spent and not yet charged. `lasts_s` and `ends_at` say
    when that ends at the present rate, none for never: `burn_microusd_per_hour` is what runs now,
    `metered_microusd_per_hour` today's average of everything else."""

    organisation_id: str
    state: BalanceState
    available_microusd: int
    balance_microusd: int
    credit_microusd: int
    holds_microusd: int
    credit_limit_microusd: int
    burn_microusd_per_hour: int
    metered_microusd_per_hour: int
    lasts_s: float | None
    ends_at: Time | None
    accrued_until: Time
    at: Time


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one group cost. Quantities are by meter: microseconds of allocations, units of everything else."""

    group: str
    amount_microusd: int
    quantities: dict[str, int]


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """A page of groups, the most expensive first (days: the oldest first). The total is that of all pages."""

    from_day: date
    to_day: date
    group_by: str
    project_id: str | None
    total_microusd: int
    items: list[Cost]
    next_cursor: str | None = None


class Funds(msgspec.Struct, frozen=True, kw_only=True):
    """Amounts on an organisation's accounts."""

    balance_microusd: int
    credit_microusd: int
    holds_microusd: int


class StatementLine(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer as the organisation sees it: what it changed, and what there was after it."""

    transfer_id: str
    kind: str
    at: Time
    memo: str
    corrects: str | None
    window_start: Time | None
    correlation_id: str
    change: Funds
    after: Funds


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """A page of an organisation's transfers, the oldest first. Opening and closing are those of the whole time."""

    organisation_id: str
    from_day: date
    to_day: date
    opening: Funds
    closing: Funds
    items: list[StatementLine]
    next_cursor: str | None = None


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer did to one account; positive is to the account's credit."""

    account_id: str
    amount_microusd: int


class UsageWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What was charged for one thing in one window."""

    project_id: str
    resource_kind: str
    resource_id: str
    meter: str
    sku: str
    gpus: int
    from_at: Time
    until_at: Time
    quantity: int
    price_microusd: int
    per: int
    amount_microusd: int


class LedgerTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer with all its entries. Of a charge for usage, `usage` are the largest of the `usage_count` windows that
    it is made of."""

    id: str
    kind: str
    organisation_id: str
    at: Time
    memo: str
    corrects: str | None
    corrected_by: list[str]
    window_start: Time | None
    run_at: Time | None
    correlation_id: str
    entries: list[LedgerEntry]
    usage: list[UsageWindow] = []
    usage_count: int = 0


class InvoiceLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a project used of one thing at one price. `per` units of the quantity cost the price; the texts say both in
    units that people read. The price of an allocation is that of all its `gpus`; everything else has 0 of them."""

    project_id: str
    project_name: str
    resource_kind: str
    meter: str
    sku: str
    gpus: int
    quantity: int
    quantity_text: str
    price_microusd: int
    per: int
    price_text: str
    amount_microusd: int


class InvoiceMovement(msgspec.Struct, frozen=True, kw_only=True):
    """A payment, a refund or a grant, with what the organisation gained by it; or a correction of usage, with what it
    adds to the total, which is below zero."""

    transfer_id: str
    kind: str
    at: Time
    memo: str
    corrects: str | None
    amount_microusd: int


class InvoiceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A month with usage. It is a draft until the month is over and charged."""

    month: str
    draft: bool
    usage_microusd: int


class Invoice(msgspec.Struct, frozen=True, kw_only=True):
    """A month of an organisation. `total_microusd` is what the ledger took for it: the usage, less the corrections that
    were made in the month, partly from promotional credit. `total_cents` is that, rounded once for showing. Of many
    lines and movements only some are listed; the sums are of all. A draft is not issued yet."""

    month: str
    number: str
    issued_on: date | None
    organisation_id: str
    organisation_name: str
    draft: bool
    accrued_until: Time
    currency: str
    lines: list[InvoiceLine]
    lines_left_out: int
    usage_microusd: int
    corrections: list[InvoiceMovement]
    corrections_microusd: int
    total_microusd: int
    total_cents: int
    rounding_microusd: int
    credit_used_microusd: int
    balance_used_microusd: int
    movements: list[InvoiceMovement]
    movements_left_out: int
    payments_microusd: int
    refunds_microusd: int
    grants_microusd: int


class GrantCreate(Body, frozen=True):
    """Promotional credit for an organisation."""

    organisation_id: Annotated[str, Meta(max_length=64)]
    amount_microusd: Amount
    memo: Memo


class CorrectionCreate(Body, frozen=True):
    """Give back a part of a charge, or take back a part of a grant."""

    transfer_id: Annotated[str, Meta(min_length=1, max_length=200)]
    amount_microusd: Amount
    memo: Memo


class BillingTermsPut(Body, frozen=True):
    """How far an organisation may go below zero."""

    credit_limit_microusd: Annotated[int, Meta(ge=0, le=1_000_000_000_000)]


class BillingTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What was agreed with an organisation."""

    organisation_id: str
    credit_limit_microusd: int


class PricePut(Body, frozen=True):
    """The price of `per` units, from a time on; without one, from now on."""

    price_microusd: Annotated[int, Meta(ge=0, le=1_000_000_000_000)]
    per: Annotated[int, Meta(ge=1, le=1_000_000_000_000_000)]
    effective_at: Time | None = None


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a meter's price. Versions never change; `in_force` is the one that counts now."""

    meter: str
    version: int
    price_microusd: int
    per: int
    effective_at: Time
    created_at: Time
    created_by: str
    in_force: bool


class LedgerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must hold, and of how many it was asked."""

    name: str
    looked_at: int
    problems: int


class LedgerProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Where it does not."""

    check: str
    subject: str
    detail: str


class LedgerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger recomputed from its entries. Of each check at most a hundred problems are listed."""

    holds: bool
    at: Time
    checks: list[LedgerCheck]
    problems: list[LedgerProblem]
