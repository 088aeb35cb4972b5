"""Billing over REST: what people see of their organisation's money."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from litestar import MediaType, Response, Router, get
from litestar.params import QueryParameter
from litestar.response import Stream

from penstock.billing import pages
from penstock.billing.operatorroutes import operator_routes
from penstock.billing.periods import Period
from penstock.billing.ports import Organisations
from penstock.billing.service import costs, invoices, prices, statements
from penstock.kit.caller import Caller
from penstock.kit.clock import utc_now
from penstock.kit.db import Database
from penstock.kit.ids import check_id
from penstock.kit.paging import PageQuery
from penstock.wire import rest

FromDay = Annotated[
    str | None,
    QueryParameter(
        name="from", required=False, description="The first day, such as 2026-11-01; default: of the month."
    ),
]
ToDay = Annotated[
    str | None, QueryParameter(name="to", required=False, description="The last day, included; default: today.")
]


def router(organisations: Organisations, db: Database) -> Router:
    """All routes of the ledger, below /api/v1."""
    handlers = [*_costs(db), *_statements(db), *_invoices(organisations, db), *operator_routes(organisations, db)]
    return Router(path="/billing", route_handlers=handlers, tags=["billing"])


def _period(from_day: str | None, to_day: str | None) -> Period:
    return Period.of(from_day, to_day, today=utc_now().date())


def _costs(db: Database) -> list[Any]:
    @get("/balance", operation_id="getBalance")
    async def get_balance(caller: Caller) -> rest.Balance:
        """What the organisation has, what runs costs, and when that ends at this rate."""
        async with db.read() as conn:
            return await costs.balance(conn, caller)

    @get("/usage", operation_id="getUsage")
    async def get_usage(
        caller: Caller,
        page: PageQuery,
        from_day: FromDay = None,
        to_day: ToDay = None,
        group_by: Annotated[
            str,
            QueryParameter(
                max_length=80,
                description="`project`, `allocation`, `function`, `deployment`, `sku`, `meter`, `key`, `day`"
                " or `label:<name>`.",
            ),
        ] = "project",
        project: Annotated[
            str | None, QueryParameter(required=False, max_length=64, description="Only this project.")
        ] = None,
    ) -> rest.CostReport:
        """What was used and what it cost, by day and in groups: of the organisation for those who may read its
        billing, of the caller's project for everyone else."""
        if project is not None:
            check_id("prj", project, field="project")
        async with db.read() as conn:
            return await costs.usage(conn, caller, _period(from_day, to_day), group_by, project, page)

    @get("/prices", operation_id="listPrices")
    async def list_prices(caller: Caller, page: PageQuery) -> rest.Page[rest.Price]:
        """What a unit of each meter costs; the time of allocations costs what their SKU says."""
        async with db.read() as conn:
            return await prices.listed(conn, caller, page)

    @get("/prices/{name:str}", operation_id="getPrice")
    async def get_price(caller: Caller, page: PageQuery, name: str) -> rest.Page[rest.Price]:
        """All versions of a meter's price, newest first."""
        async with db.read() as conn:
            return await prices.history(conn, caller, name, page)

    return [get_balance, get_usage, list_prices, get_price]


def _statements(db: Database) -> list[Any]:
    @get("/statement", operation_id="getStatement")
    async def get_statement(
        caller: Caller, page: PageQuery, from_day: FromDay = None, to_day: ToDay = None
    ) -> rest.Statement:
        """Every transfer of the organisation, oldest first, with what there was before and after it."""
        async with db.transaction() as tx:
            return await statements.statement(tx, caller, _period(from_day, to_day), page)

    @get("/statement.csv", operation_id="exportStatement", media_type="text/csv")
    async def export_statement(caller: Caller, from_day: FromDay = None, to_day: ToDay = None) -> Stream:
        """The same as CSV (RFC 4180), all of it."""
        caller.require("billing.read")
        period = _period(from_day, to_day)
        pieces = statements.export(db, caller, period)
        first = await anext(pieces)
        name = f"statement-{period.from_day}-{period.to_day}.csv"
        return Stream(
            _csv(first, pieces),
            media_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )

    @get("/transfers/{transfer_id:path}", operation_id="getTransfer")
    async def get_transfer(caller: Caller, transfer_id: str) -> rest.LedgerTransfer:
        """One transfer with all its entries, and the windows that a charge for usage is made of."""
        async with db.read() as conn:
            return await statements.transfer(conn, caller, transfer_id.removeprefix("/"))

    return [get_statement, export_statement, get_transfer]


async def _csv(first: list[rest.StatementLine], others: AsyncIterator[list[rest.StatementLine]]) -> AsyncIterator[str]:
    yield pages.statement_csv(first, heading=True)
    async for lines in others:
        yield pages.statement_csv(lines, heading=False)


def _invoices(organisations: Organisations, db: Database) -> list[Any]:
    @get("/invoices", operation_id="listInvoices")
    async def list_invoices(caller: Caller, page: PageQuery) -> rest.Page[rest.InvoiceSummary]:
        """The months in which the organisation used something, newest first."""
        async with db.read() as conn:
            return await invoices.listed(conn, caller, page)

    @get("/invoices/{month:str}", operation_id="getInvoice")
    async def get_invoice(caller: Caller, month: str) -> rest.Invoice:
        """A month's invoice: what each project used, at which price, and what the ledger took for it."""
        async with db.transaction() as tx:
            return await invoices.invoice(tx, caller, organisations, month)

    @get("/invoices/{month:str}/page", operation_id="getInvoicePage", media_type=MediaType.HTML)
    async def get_invoice_page(caller: Caller, month: str) -> Response[str]:
        """The same as a page for printing and keeping."""
        async with db.transaction() as tx:
            found = await invoices.invoice(tx, caller, organisations, month)
        return Response(pages.invoice_page(found), media_type=MediaType.HTML, headers=pages.HEADERS)

    return [list_invoices, get_invoice, get_invoice_page]
