"""An organisation's money: what it has, what it goes to, and what operators do to it."""

import re
from collections.abc import Callable
from datetime import date, datetime
from typing import Final, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from penstock.sdk.errors import InvalidArgument
from penstock.sdk.protocol import PAGE_ITEMS, Listing, Query, Steps, call, excerpt, identifier
from penstock.sdk.resources import Resource, X, listing, operation
from penstock.wire import rest
from penstock.wire.rest import Page

Day: TypeAlias = date | str | None
R = TypeVar("R", rest.CostReport, rest.Statement)

_MONTH: Final = re.compile(r"[0-9]{4}-[0-9]{2}", re.ASCII)
_METER: Final = re.compile(r"[a-z][a-z0-9_.]{0,62}", re.ASCII)
_TRANSFER: Final = re.compile(r"[A-Za-z0-9_.:-]+(/[A-Za-z0-9_.:-]+)*", re.ASCII)


class Billing(Resource[X]):
    """The ledger of the current project's organisation."""

    @operation
    def balance(self) -> Steps[rest.Balance]:
        """What there is, what runs costs, and when that ends."""
        return call("GET", "/billing/balance", rest.Balance)

    @operation
    def usage(
        self,
        *,
        group_by: str = "project",
        from_day: Day = None,
        to_day: Day = None,
        project: str | None = None,
        limit: int | None = None,
    ) -> Steps[rest.CostReport]:
        """What was used and what it cost, all groups or so many of them; days are UTC's, the last one included."""
        query = {"group_by": group_by, "project": project, **_days(from_day, to_day)}
        return _all_pages("/billing/usage", rest.CostReport, query, limit)

    @operation
    def statement(self, *, from_day: Day = None, to_day: Day = None, limit: int | None = None) -> Steps[rest.Statement]:
        """Every transfer of some days, oldest first, with opening and closing balance."""
        return _all_pages("/billing/statement", rest.Statement, _days(from_day, to_day), limit)

    @operation
    def transfer(self, transfer_id: str) -> Steps[rest.LedgerTransfer]:
        """One transfer with all its entries."""
        return call("GET", f"/billing/transfers/{quote(_transfer(transfer_id))}", rest.LedgerTransfer)

    @listing
    def invoices(self, *, limit: int | None = None) -> Listing[rest.InvoiceSummary]:
        """The months in which something was used, newest first."""
        return Listing(path="/billing/invoices", answer=Page[rest.InvoiceSummary], limit=limit)

    @operation
    def invoice(self, month: str) -> Steps[rest.Invoice]:
        """A month's invoice, such as that of 2026-11."""
        return call("GET", f"/billing/invoices/{_month(month)}", rest.Invoice)

    @operation
    def invoice_page(self, month: str) -> Steps[bytes]:
        """The same as a page of HTML that needs nothing else."""
        return call("GET", f"/billing/invoices/{_month(month)}/page", bytes)

    @listing
    def prices(self, *, limit: int | None = None) -> Listing[rest.Price]:
        """What a unit of each meter costs now."""
        return Listing(path="/billing/prices", answer=Page[rest.Price], limit=limit)

    @listing
    def price_history(self, meter: str, *, limit: int | None = None) -> Listing[rest.Price]:
        """All versions of a meter's price, newest first."""
        return Listing(path=f"/billing/prices/{_meter(meter)}", answer=Page[rest.Price], limit=limit)

    @operation
    def set_price(
        self, meter: str, *, price_microusd: int, per: int = 1, effective_at: datetime | None = None
    ) -> Steps[rest.Price]:
        """What `per` units of a meter cost from a time on; operators only."""
        body = rest.PricePut(price_microusd=price_microusd, per=per, effective_at=effective_at)
        return call("PUT", f"/billing/prices/{_meter(meter)}", rest.Price, body=body, create=True)

    @operation
    def grant(self, organisation_id: str, amount_microusd: int, *, memo: str) -> Steps[rest.LedgerTransfer]:
        """Promotional credit for an organisation; operators only."""
        body = rest.GrantCreate(organisation_id=organisation_id, amount_microusd=amount_microusd, memo=memo)
        return call("POST", "/billing/grants", rest.LedgerTransfer, body=body, create=True)

    @operation
    def correct(self, transfer_id: str, amount_microusd: int, *, memo: str) -> Steps[rest.LedgerTransfer]:
        """Give back a part of a charge, or take back a part of a grant; operators only."""
        body = rest.CorrectionCreate(transfer_id=transfer_id, amount_microusd=amount_microusd, memo=memo)
        return call("POST", "/billing/corrections", rest.LedgerTransfer, body=body, create=True)

    @operation
    def terms(self, organisation_id: str) -> Steps[rest.BillingTerms]:
        """How far an organisation may go below zero; operators only."""
        return call("GET", _terms(organisation_id), rest.BillingTerms)

    @operation
    def set_terms(self, organisation_id: str, *, credit_limit_microusd: int) -> Steps[rest.BillingTerms]:
        """Let an organisation go so far below zero; operators only."""
        body = rest.BillingTermsPut(credit_limit_microusd=credit_limit_microusd)
        return call("PUT", _terms(organisation_id), rest.BillingTerms, body=body, create=True)

    @operation
    def verify(
        self, *, organisation_id: str | None = None, from_day: Day = None, to_day: Day = None
    ) -> Steps[rest.LedgerReport]:
        """Recompute the ledger from its entries; operators only."""
        query = {"organisation_id": organisation_id, **_days(from_day, to_day)}
        return call("GET", "/billing/verify", rest.LedgerReport, query=query)


def _days(from_day: Day, to_day: Day) -> dict[str, str | None]:
    return {"from": None if from_day is None else str(from_day), "to": None if to_day is None else str(to_day)}


def _terms(organisation_id: str) -> str:
    return f"/billing/terms/{identifier('org', organisation_id, name='organisation_id')}"


def _all_pages(path: str, answer: type[R], query: Query, limit: int | None) -> Steps[R]:
    """The pages as one, with at most so many items."""
    return _joined(
        lambda cursor, size: call("GET", path, answer, query={**query, "limit": size, "cursor": cursor}), limit
    )


def _joined(page: Callable[[str | None, int], Steps[R]], limit: int | None) -> Steps[R]:
    found = yield from page(None, min(PAGE_ITEMS, limit or PAGE_ITEMS))
    items: list[object] = [*found.items]
    cursor = found.next_cursor
    while cursor is not None and (limit is None or len(items) < limit):
        more = yield from page(cursor, min(PAGE_ITEMS, PAGE_ITEMS if limit is None else limit - len(items)))
        items += more.items
        cursor = more.next_cursor
    return msgspec.structs.replace(found, items=items, next_cursor=cursor)


def _month(text: str) -> str:
    if not _MONTH.fullmatch(text):
        raise InvalidArgument(f"month must look like 2026-11, not {excerpt(text)!r}", field="month")
    return text


def _meter(text: str) -> str:
    if not _METER.fullmatch(text):
        raise InvalidArgument(
            f"meter must be 1 to 63 lower-case letters, digits, dots and underscores, not {excerpt(text)!r}",
            field="meter",
        )
    return text


def _transfer(text: str) -> str:
    if not _TRANSFER.fullmatch(text) or not {".", ".."}.isdisjoint(text.split("/")):
        raise InvalidArgument(f"transfer_id must look like usage/org_…/…, not {excerpt(text)!r}", field="transfer_id")
    return text
