"""Balance, costs, statements and invoices; and what operators do to them. Dollars are typed and shown exactly."""

from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from penstock.cli import budgets, names, payments, prices
from penstock.cli.errors import CONFLICT, CliError
from penstock.cli.figures import is_time, remaining, used, what
from penstock.cli.output import EXTRA, ID, NEEDED, Column, Format, notice
from penstock.cli.session import Session, command, group
from penstock.cli.text import Count, Money, clean, dollars, microusd
from penstock.wire.rest import (
    Balance,
    BillingTerms,
    Cost,
    Funds,
    Invoice,
    InvoiceLine,
    InvoiceMovement,
    InvoiceSummary,
    LedgerEntry,
    LedgerProblem,
    LedgerTransfer,
    StatementLine,
    UsageWindow,
)

app = group("billing", "Balance, costs, statements and invoices.")
app.add_typer(prices.app)
app.add_typer(budgets.app)

_AMOUNT_MIN_MICROUSD: Final = 1

From = Annotated[str | None, typer.Option("--from", metavar="DAY", help="The first day (UTC); default: of the month.")]
To = Annotated[str | None, typer.Option("--to", metavar="DAY", help="The last day (UTC), included; default: today.")]
Memo = Annotated[str, typer.Option(help="Why: it stands on the statement.")]

BALANCE_COLUMNS: list[Column[Balance]] = [
    Column("organisation", lambda found: found.organisation_id),
    Column("state", lambda found: found.state, rank=NEEDED),
    Column("available", lambda found: Money(found.available_microusd)),
    Column("balance", lambda found: Money(found.balance_microusd)),
    Column("promotional credit", lambda found: Money(found.credit_microusd)),
    Column("held", lambda found: Money(found.holds_microusd)),
    Column("credit limit", lambda found: Money(found.credit_limit_microusd)),
    Column("running costs per hour", lambda found: Money(found.burn_microusd_per_hour)),
    Column("other usage per hour", lambda found: Money(found.metered_microusd_per_hour)),
    Column("lasts", remaining),
    Column("ends at", lambda found: found.ends_at),
    Column("charged until", lambda found: found.accrued_until),
]
COST_COLUMNS: list[Column[Cost]] = [
    Column("group", lambda cost: cost.group or "(none)", rank=ID),
    Column("cost", lambda cost: Money(cost.amount_microusd), rank=ID),
    Column("used", lambda cost: {meter: used(meter, count) for meter, count in cost.quantities.items()}, rank=EXTRA),
]
#: For a terminal: balance and credit together, and the kind is how the transfer's id begins.
STATEMENT_COLUMNS: list[Column[StatementLine]] = [
    Column("at", lambda line: line.at),
    Column("change", lambda line: Money(_spendable(line.change)), rank=ID),
    Column("after", lambda line: Money(_spendable(line.after))),
    Column("transfer", lambda line: line.transfer_id, rank=ID),
    Column("memo", lambda line: line.memo, rank=EXTRA),
]
#: For spreadsheets: every account, exactly as the API's own download has it.
STATEMENT_CSV_COLUMNS: list[Column[StatementLine]] = [
    Column("at", lambda line: line.at.isoformat()),
    Column("transfer_id", lambda line: line.transfer_id),
    Column("kind", lambda line: line.kind),
    Column("memo", lambda line: line.memo, rank=EXTRA),
    Column("corrects", lambda line: line.corrects),
    Column("window_start", lambda line: line.window_start.isoformat() if line.window_start else ""),
    Column("balance_usd", lambda line: Money(line.change.balance_microusd)),
    Column("credit_usd", lambda line: Money(line.change.credit_microusd)),
    Column("holds_usd", lambda line: Money(line.change.holds_microusd)),
    Column("balance_after_usd", lambda line: Money(line.after.balance_microusd)),
    Column("credit_after_usd", lambda line: Money(line.after.credit_microusd)),
    Column("holds_after_usd", lambda line: Money(line.after.holds_microusd)),
]
TRANSFER_COLUMNS: list[Column[LedgerTransfer]] = [
    Column("transfer", lambda found: found.id),
    Column("kind", lambda found: found.kind),
    Column("organisation", lambda found: found.organisation_id),
    Column("at", lambda found: found.at),
    Column("memo", lambda found: found.memo, rank=EXTRA),
    Column("corrects", lambda found: found.corrects),
    Column("corrected by", lambda found: found.corrected_by),
    Column("window", lambda found: found.window_start),
    Column("correlation", lambda found: found.correlation_id),
]
ENTRY_COLUMNS: list[Column[LedgerEntry]] = [
    Column("account", lambda entry: entry.account_id, rank=ID),
    Column("amount", lambda entry: Money(entry.amount_microusd)),
]
WINDOW_COLUMNS: list[Column[UsageWindow]] = [
    Column("resource", lambda window: window.resource_id, rank=ID),
    Column("what", what),
    Column("from", lambda window: window.from_at),
    Column("used", lambda window: used(window.meter, window.quantity), rank=EXTRA),
    Column("cost", lambda window: Money(window.amount_microusd)),
]
SUMMARY_COLUMNS: list[Column[InvoiceSummary]] = [
    Column("month", lambda found: found.month, rank=ID),
    Column("usage", lambda found: Money(found.usage_microusd)),
    Column("draft", lambda found: found.draft),
]
LINE_COLUMNS: list[Column[InvoiceLine]] = [
    Column("project", lambda line: line.project_name),
    Column("project id", lambda line: line.project_id),
    Column("what", what),
    Column("quantity", lambda line: line.quantity_text),
    Column("price", lambda line: line.price_text),
    Column("amount", lambda line: Money(line.amount_microusd)),
]
#: For spreadsheets: `per` units of the quantity cost the price; of allocations, an hour.
LINE_CSV_COLUMNS: list[Column[InvoiceLine]] = [
    Column("project", lambda line: line.project_name),
    Column("project id", lambda line: line.project_id),
    Column("meter", lambda line: line.meter),
    Column("sku", lambda line: line.sku),
    Column("gpus", lambda line: line.gpus),
    Column("quantity", lambda line: used(line.meter, line.quantity)),
    Column("price", lambda line: Money(line.price_microusd)),
    Column("per", lambda line: 1 if is_time(line.meter) else line.per),
    Column("amount", lambda line: Money(line.amount_microusd)),
]
MOVEMENT_COLUMNS: list[Column[InvoiceMovement]] = [
    Column("at", lambda each: each.at),
    Column("kind", lambda each: each.kind),
    Column("amount", lambda each: Money(each.amount_microusd)),
    Column("transfer", lambda each: each.transfer_id, rank=ID),
    Column("memo", lambda each: each.memo, rank=EXTRA),
]
TOTAL_COLUMNS: list[Column[Invoice]] = [
    Column("month", lambda found: found.month + (" (draft)" if found.draft else "")),
    Column("usage", lambda found: Money(found.usage_microusd)),
    Column("corrections", lambda found: Money(found.corrections_microusd)),
    Column("total", lambda found: Money(found.total_microusd)),
    Column("from promotional credit", lambda found: Money(found.credit_used_microusd)),
    Column("from the balance", lambda found: Money(found.balance_used_microusd)),
    Column("total, rounded to cents", lambda found: Money(found.total_cents * 10_000)),
    Column("paid in", lambda found: Money(found.payments_microusd)),
    Column("paid back", lambda found: Money(found.refunds_microusd)),
    Column("promotional credit granted", lambda found: Money(found.grants_microusd)),
]
TERMS_COLUMNS: list[Column[BillingTerms]] = [
    Column("organisation", lambda terms: terms.organisation_id),
    Column("credit limit", lambda terms: Money(terms.credit_limit_microusd)),
]
PROBLEM_COLUMNS: list[Column[LedgerProblem]] = [
    Column("check", lambda problem: problem.check),
    Column("subject", lambda problem: problem.subject, rank=ID),
    Column("detail", lambda problem: problem.detail, rank=EXTRA),
]


@command(app, "balance", example="penstock billing balance")
def balance(session: Session) -> None:
    """Show what the organisation has, what runs costs, and when that ends."""
    with session.client() as client:
        session.output.item(client.billing.balance(), BALANCE_COLUMNS)


@command(app, "usage", example="penstock billing usage --by label:team --from 2026-11-01 --to 2026-11-30")
def usage(
    session: Session,
    by: Annotated[
        str,
        typer.Option(
            help="project, allocation, function, deployment, sku, meter, key, day or label:<name>.", metavar="GROUP"
        ),
    ] = "project",
    from_: From = None,
    to: To = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many groups at most.")] = None,
) -> None:
    """Show what was used and what it cost. With --project only of that project."""
    with session.client() as client:
        found = client.billing.usage(
            group_by=by, from_day=day(from_, "from"), to_day=day(to, "to"), project=session.flags.project, limit=limit
        )
    if session.output.format is Format.JSON:
        session.output.json(found)
        return
    session.output.items(found.items, COST_COLUMNS)
    if session.output.format is Format.TABLE:
        session.output.line(f"\n{dollars(found.total_microusd)} from {found.from_day} to {found.to_day}")


@command(app, "statement", example="penstock billing statement --from 2026-11-01 -o csv > november.csv")
def statement(
    session: Session,
    from_: From = None,
    to: To = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many transfers at most.")] = None,
) -> None:
    """Show every transfer, oldest first, with what there was after it: balance and credit together; with -o csv or json
    each account."""
    with session.client() as client:
        found = client.billing.statement(from_day=day(from_, "from"), to_day=day(to, "to"), limit=limit)
    if session.output.format is Format.JSON:
        session.output.json(found)
        return
    csv = session.output.format is Format.CSV
    session.output.items(found.items, STATEMENT_CSV_COLUMNS if csv else STATEMENT_COLUMNS)
    if session.output.format is Format.TABLE:
        for name, funds in (("opening", found.opening), ("closing", found.closing)):
            shown = f"balance {dollars(funds.balance_microusd)}, credit {dollars(funds.credit_microusd)}"
            session.output.line(f"{name}: {shown}, held {dollars(funds.holds_microusd)}")
    if found.next_cursor:
        notice("there is more: raise --limit")


@command(app, "transfer", example="penstock billing transfer usage/org_default/2026-11-16T10:00:00Z")
def transfer(session: Session, transfer_id: Annotated[str, typer.Argument(help="As the statement names it.")]) -> None:
    """Show one transfer with all its entries, and what a charge is made of."""
    with session.client() as client:
        _show_transfer(session, client.billing.transfer(transfer_id))


def _show_transfer(session: Session, found: LedgerTransfer) -> None:
    session.output.item(found, TRANSFER_COLUMNS)
    if session.output.format is Format.TABLE:
        session.output.line("")
        session.output.items(found.entries, ENTRY_COLUMNS)
        if found.usage:
            session.output.line(f"\n{len(found.usage)} of {found.usage_count} windows, largest first")
            session.output.items(found.usage, WINDOW_COLUMNS)


@command(app, "invoice", example="penstock billing invoice 2026-11 --html invoice.html")
def invoice(
    session: Session,
    month: Annotated[str | None, typer.Argument(help="Such as 2026-11; without it the months are listed.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page for printing to this file.")
    ] = None,
) -> None:
    """Show a month's invoice, or list the months with usage."""
    if month is None and html is not None:
        raise CliError("say which month, such as 2026-11", field="month")
    with session.client() as client:
        if month is None:
            session.output.items(client.billing.invoices(), SUMMARY_COLUMNS)
        elif html is not None:
            _write(html, client.billing.invoice_page(month))
        else:
            _show_invoice(session, client.billing.invoice(month))


def _write(file: Path, page: bytes) -> None:
    try:
        file.write_bytes(page)
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}", field="html") from error
    notice(f"wrote {file}")


def _show_invoice(session: Session, found: Invoice) -> None:
    if session.output.format is Format.JSON:
        session.output.json(found)
        return
    if session.output.format is Format.CSV:
        session.output.items(found.lines, LINE_CSV_COLUMNS)
        return
    session.output.items(found.lines, LINE_COLUMNS)
    for title, movements in (("corrections", found.corrections), ("movements", found.movements)):
        if movements:
            session.output.line(f"\n{title}")
            session.output.items(movements, MOVEMENT_COLUMNS)
    session.output.line("")
    session.output.item(found, TOTAL_COLUMNS)


@command(app, "grant", example="penstock billing grant org_default 25 --memo 'welcome'")
def grant(
    session: Session,
    organisation: Annotated[str, typer.Argument(help="The organisation, by name or id (org_…).")],
    amount: Annotated[str, typer.Argument(metavar="DOLLARS", help="Such as 25 or 3.49.")],
    memo: Memo,
) -> None:
    """Give an organisation promotional credit; operators only."""
    asked = microusd(amount, field="amount", at_least=_AMOUNT_MIN_MICROUSD)
    with session.client() as client:
        made = client.billing.grant(names.organisation(client, organisation), asked, memo=memo)
    _show_transfer(session, made)


@command(
    app,
    "correct",
    example="penstock billing correct usage/org_default/2026-11-16T10:00:00Z 3.49 --memo 'node was down'",
)
def correct(
    session: Session,
    transfer_id: Annotated[str, typer.Argument(help="A charge for usage, or a grant.")],
    amount: Annotated[str, typer.Argument(metavar="DOLLARS", help="At most what is left of it.")],
    memo: Memo,
) -> None:
    """Give back a part of a charge, or take back a part of a grant; operators only."""
    asked = microusd(amount, field="amount", at_least=_AMOUNT_MIN_MICROUSD)
    with session.client() as client:
        made = client.billing.correct(transfer_id, asked, memo=memo)
    _show_transfer(session, made)


@command(app, "terms", example="penstock billing terms org_default --credit-limit 100")
def terms(
    session: Session,
    organisation: Annotated[str, typer.Argument(help="The organisation, by name or id (org_…).")],
    credit_limit: Annotated[
        str | None, typer.Option(metavar="DOLLARS", help="Let it go so far below zero; without it, show the terms.")
    ] = None,
) -> None:
    """Show or set how far an organisation may go below zero; operators only."""
    limit = None if credit_limit is None else microusd(credit_limit, field="credit-limit")
    with session.client() as client:
        organisation_id = names.organisation(client, organisation)
        if limit is None:
            found = client.billing.terms(organisation_id)
        else:
            found = client.billing.set_terms(organisation_id, credit_limit_microusd=limit)
    session.output.item(found, TERMS_COLUMNS)


@command(app, "verify", example="penstock billing verify --organisation org_default --from 2026-11-01")
def verify(
    session: Session,
    organisation: Annotated[str | None, typer.Option(help="Only of this organisation (org_…).")] = None,
    from_: From = None,
    to: To = None,
) -> None:
    """Recompute the ledger from its entries; exit 5 where it does not hold. Operators only."""
    with session.client() as client:
        report = client.billing.verify(organisation_id=organisation, from_day=day(from_, "from"), to_day=day(to, "to"))
    if session.output.format is Format.JSON:
        session.output.json(report)
    else:
        if session.output.format is Format.TABLE:
            rows = [[check.name, Count(check.looked_at), Count(check.problems)] for check in report.checks]
            session.output.rows(["check", "looked at", "problems"], rows)
        if report.problems or session.output.format is Format.CSV:
            session.output.items(report.problems, PROBLEM_COLUMNS)
    if not report.holds:
        raise typer.Exit(CONFLICT)


payments.register(app)


def _spendable(funds: Funds) -> int:
    return funds.balance_microusd + funds.credit_microusd


def day(text: str | None, field: str) -> date | None:
    """A day as it is typed."""
    if text is None:
        return None
    try:
        return datetime.strptime(text.strip(), "%Y-%m-%d").date()  # noqa: DTZ007 - a day has no zone
    except ValueError as error:
        raise CliError(f"{field} must be a day such as 2026-11-16, not {clean(text)[:40]!r}", field=field) from error
