"""A month's invoice: what was used, by project and price, and what the ledger took for it.

The lines sum to the month's usage and the total is the ledger's, to the micro-dollar; cents are rounded once, last.
"""

from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

import msgspec

from penstock.billing.model import CURRENCY, US_PER_HOUR
from penstock.billing.periods import Period, month_of
from penstock.billing.ports import Organisations
from penstock.billing.store import costs, invoices
from penstock.billing.store.invoices import Used
from penstock.kit import paging
from penstock.kit.caller import Caller
from penstock.kit.db import Reader, Tx
from penstock.kit.errors import Invalid, NotFound
from penstock.kit.paging import PageQuery
from penstock.kit.text import Hours, dollars
from penstock.wire import rest

LINES_MAX: Final = 1000
MOVEMENTS_MAX: Final = 500
_MICROUSD_PER_CENT: Final = 10_000
_NO_END: Final = date(3000, 1, 1)


async def listed(conn: Reader, caller: Caller, page: PageQuery) -> rest.Page[rest.InvoiceSummary]:
    """The months in which the caller's organisation used something or was given some of it back, newest first."""
    caller.require("billing.read")
    found = await invoices.months(conn, caller.organisation_id, before=_before(page), limit=page.limit + 1)
    accrued_until = await costs.accrued_until(conn)
    items = [
        rest.InvoiceSummary(
            month=month_of(month),
            draft=accrued_until < Period.month(month_of(month)).until,
            usage_microusd=amount,
        )
        for month, amount in found[: page.limit]
    ]
    more = len(found) > page.limit
    return rest.Page(items=items, next_cursor=paging.encode_cursor("invoice", items[-1].month) if more else None)


def _before(page: PageQuery) -> date:
    if page.cursor is None:
        return _NO_END
    match paging.decode_cursor(page.cursor):
        case ["invoice", str(month)]:
            try:
                return Period.month(month).from_day
            except NotFound as error:
                raise Invalid("invalid cursor", field="cursor") from error
        case _:
            raise Invalid("invalid cursor", field="cursor")


async def invoice(tx: Tx, caller: Caller, names: Organisations, month: str) -> rest.Invoice:
    """One month's. The transaction is this question's own: all of it is of one moment."""
    caller.require("billing.read")
    period = Period.month(month)
    await tx.execute("set transaction isolation level repeatable read, read only")
    organisation_id = caller.organisation_id
    usage, found, used = await invoices.used(tx, organisation_id, period.from_day, period.until.date(), limit=LINES_MAX)
    total, from_credit = await invoices.charged(tx, organisation_id, period.since, period.until)
    corrections = await invoices.movements(
        tx, organisation_id, period.since, period.until, corrections=True, limit=MOVEMENTS_MAX
    )
    if not used and not corrections.found:
        raise NotFound(f"nothing was used in {month}")
    others = await invoices.movements(
        tx, organisation_id, period.since, period.until, corrections=False, limit=MOVEMENTS_MAX
    )
    accrued_until = await costs.accrued_until(tx)
    cents = rounded_cents(total)
    return rest.Invoice(
        month=month,
        number=f"{month}/{organisation_id}",
        issued_on=period.until.date() if accrued_until >= period.until else None,
        organisation_id=organisation_id,
        organisation_name=await names.organisation_name(tx, organisation_id) or organisation_id,
        draft=accrued_until < period.until,
        accrued_until=accrued_until,
        currency=CURRENCY,
        lines=await _lines(tx, names, used),
        lines_left_out=found - len(used),
        usage_microusd=usage,
        corrections=[_on_the_total(each) for each in corrections.listed],
        corrections_microusd=total - usage,
        total_microusd=total,
        total_cents=cents,
        rounding_microusd=cents * _MICROUSD_PER_CENT - total,
        credit_used_microusd=from_credit,
        balance_used_microusd=total - from_credit,
        movements=others.listed,
        movements_left_out=others.found - len(others.listed) + corrections.found - len(corrections.listed),
        payments_microusd=others.sums.get("payment", 0),
        refunds_microusd=others.sums.get("refund", 0) + others.sums.get("dispute", 0),
        grants_microusd=others.sums.get("grant", 0),
    )


def _on_the_total(correction: rest.InvoiceMovement) -> rest.InvoiceMovement:
    """What the organisation gained is taken off the total."""
    return msgspec.structs.replace(correction, amount_microusd=-correction.amount_microusd)


async def _lines(conn: Reader, names: Organisations, used: list[Used]) -> list[rest.InvoiceLine]:
    """By project, in it the most expensive first."""
    named = await names.project_names(conn, sorted({each.project_id for each in used}))
    lines = [_line(each, named.get(each.project_id, each.project_id)) for each in used]
    return sorted(lines, key=lambda line: (line.project_name, line.project_id, -line.amount_microusd))


def _line(used: Used, project_name: str) -> rest.InvoiceLine:
    return rest.InvoiceLine(
        project_id=used.project_id,
        project_name=project_name,
        resource_kind=used.resource_kind,
        meter=used.meter,
        sku=used.sku,
        gpus=used.gpus,
        quantity=used.quantity,
        quantity_text=quantity_text(used.quantity, used.per),
        price_microusd=used.price_microusd,
        per=used.per,
        price_text=price_text(used.price_microusd, used.per),
        amount_microusd=used.amount_microusd,
    )


def quantity_text(quantity: int, per: int) -> str:
    """A quantity as people read it: hours of what is charged by the hour."""
    if per == US_PER_HOUR:
        return str(Hours(quantity))
    return f"{quantity:,}"


def price_text(price_microusd: int, per: int) -> str:
    """A price as people read it."""
    if per == US_PER_HOUR:
        return f"{dollars(price_microusd)} per h"
    return f"{dollars(price_microusd)} each" if per == 1 else f"{dollars(price_microusd)} per {per:,}"


def rounded_cents(microusd: int) -> int:
    """Whole cents; half a cent counts as one."""
    return int((Decimal(microusd) / _MICROUSD_PER_CENT).quantize(Decimal(1), ROUND_HALF_UP))
