"""Invoices and statements as documents: a page that prints well and needs nothing else, and CSV for spreadsheets. Pure.

Everything that came from people is escaped; the page has no scripts and loads nothing.
"""

import csv
import io
from collections.abc import Iterable
from datetime import datetime
from html import escape
from typing import Final

from penstock.kit.text import clean, csv_cell, decimal, dollars
from penstock.wire.rest import Funds, Invoice, InvoiceLine, InvoiceMovement, StatementLine

#: Goes with the page: even a mistake here could run nothing.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox",
}
CSV_TITLES: Final = (
    "at",
    "transfer_id",
    "kind",
    "memo",
    "corrects",
    "window_start",
    "balance_usd",
    "credit_usd",
    "holds_usd",
    "balance_after_usd",
    "credit_after_usd",
    "holds_after_usd",
)

_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; color: #1a2230;
  background: #fff; max-width: 56rem; margin: 2.5rem auto; padding: 0 1.5rem; }
header { display: flex; justify-content: space-between; align-items: flex-start; border-bottom: 2px solid #1a2230;
  padding-bottom: 1rem; margin-bottom: 1.5rem; gap: 2rem; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
header p, footer p { margin: .15rem 0; color: #526071; }
.total { text-align: right; }
.total strong { font-size: 1.6rem; color: #1a2230; }
.draft { display: inline-block; background: #fff3cd; color: #6b4e00; border-radius: .3rem; padding: 0 .5rem; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid #e3e7ec; vertical-align: top;
  overflow-wrap: anywhere; }
th { font-weight: 600; color: #526071; font-size: .85rem; }
td.number, th.number { text-align: right; padding-right: 0; padding-left: .75rem; white-space: nowrap; }
tr.project td { font-weight: 600; padding-top: .9rem; }
tr.sum td { font-weight: 600; border-bottom: none; border-top: 2px solid #1a2230; }
small { color: #526071; }
footer { margin-top: 2.5rem; font-size: .85rem; }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } tr { break-inside: avoid; }
  thead { display: table-header-group; } }
"""
_KINDS: Final = {
    "payment": "Payment",
    "refund": "Refund",
    "dispute": "Dispute",
    "grant": "Promotional credit",
    "correction": "Correction",
    "usage": "Usage",
}


def invoice_page(invoice: Invoice) -> str:
    """An invoice as a page."""
    title = f"Invoice {invoice.month}, {invoice.organisation_name}"
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style></head><body>",
        _head(invoice),
        _usage(invoice),
        _summary(invoice),
        _movements("Payments, refunds and promotional credit", invoice.movements),
        _foot(invoice),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _head(invoice: Invoice) -> str:
    draft = '<p><span class="draft">Draft: the month is not over, or not charged to its end</span></p>'
    return (
        f"<header><div><h1>Invoice {_text(invoice.month)}</h1><p>{_text(invoice.organisation_name)}</p>"
        f"<p><small>{_text(invoice.organisation_id)}</small></p><p>Number {_text(invoice.number)}</p>"
        f"{draft if invoice.issued_on is None else f'<p>Issued on {invoice.issued_on}</p>'}</div>"
        f'<div class="total"><p>Total, {_text(invoice.currency)}</p>'
        f"<p><strong>{cents(invoice.total_cents)}</strong></p></div></header>"
    )


def _usage(invoice: Invoice) -> str:
    rows: list[str] = []
    project: str | None = None
    for line in invoice.lines:
        if line.project_id != project:
            project = line.project_id
            rows.append(
                f'<tr class="project"><td colspan="4">{_text(line.project_name)}'
                f" <small>{_text(line.project_id)}</small></td></tr>"
            )
        rows.append(_usage_row(line))
    if invoice.lines_left_out:
        left = invoice.usage_microusd - sum(line.amount_microusd for line in invoice.lines)
        rows.append(_row([f"{invoice.lines_left_out} smaller lines", "", ""], dollars(left)))
    rows.append(_row(["Usage", "", ""], dollars(invoice.usage_microusd), kind="sum"))
    heads = '<th>What</th><th class="number">Quantity</th><th class="number">Price</th><th class="number">Amount</th>'
    return f"<h2>Usage</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"


def _usage_row(line: InvoiceLine) -> str:
    times = f" x {line.gpus}" if line.gpus else ""
    what = f"{_text(line.sku)}{times} <small>{_text(line.meter)}</small>" if line.sku else _text(line.meter)
    return (
        f'<tr><td>{what}</td><td class="number">{_text(line.quantity_text)}</td>'
        f'<td class="number">{_text(line.price_text)}</td><td class="number">{dollars(line.amount_microusd)}</td></tr>'
    )


def _summary(invoice: Invoice) -> str:
    corrections = _movements("Corrections of usage made this month", invoice.corrections)
    rows = [_row(["Usage"], dollars(invoice.usage_microusd))]
    if invoice.corrections_microusd:
        rows.append(_row(["Corrections"], dollars(invoice.corrections_microusd)))
    rows += [
        _row(["Total charged"], dollars(invoice.total_microusd), kind="sum"),
        _row(["of it from promotional credit"], dollars(invoice.credit_used_microusd)),
        _row(["of it from the balance"], dollars(invoice.balance_used_microusd)),
        _row(["Rounding to whole cents"], dollars(invoice.rounding_microusd)),
        _row(["Total in whole cents"], cents(invoice.total_cents), kind="sum"),
    ]
    return f"{corrections}\n<h2>Total</h2>\n<table><tbody>\n" + "\n".join(rows) + "\n</tbody></table>"


def _movements(title: str, movements: Iterable[InvoiceMovement]) -> str:
    rows = [
        _row(
            [_moment(each.at), f"{_KINDS.get(each.kind, each.kind)}: {each.memo}".rstrip(": "), each.transfer_id],
            dollars(each.amount_microusd),
        )
        for each in movements
    ]
    if not rows:
        return ""
    heads = '<th>When</th><th>What</th><th>Transfer</th><th class="number">Amount</th>'
    return (
        f"<h2>{_text(title)}</h2>\n<table><thead><tr>{heads}</tr></thead><tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table>"
    )


def _foot(invoice: Invoice) -> str:
    more = (
        f"<p>{invoice.movements_left_out} more movements are on the statement.</p>"
        if invoice.movements_left_out
        else ""
    )
    return (
        f"<footer>{more}<p>Days are UTC's; usage belongs to the month in which its window began. Charged until"
        f" {_moment(invoice.accrued_until)}.</p><p>Amounts are exact to the micro-dollar.</p></footer>"
    )


def _row(cells: list[str], amount: str, *, kind: str = "") -> str:
    shown = "".join(f"<td>{_text(cell)}</td>" for cell in cells)
    start = f'<tr class="{kind}">' if kind else "<tr>"
    return f'{start}{shown}<td class="number">{amount}</td></tr>'


def _text(text: str) -> str:
    return escape(clean(text))


def _moment(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M} UTC"


def cents(count: int) -> str:
    """Whole cents as money."""
    return f"{'-' if count < 0 else ''}${abs(count) // 100:,}.{abs(count) % 100:02d}"


def statement_csv(lines: Iterable[StatementLine], *, heading: bool) -> str:
    """Lines of a statement as RFC 4180 has them; amounts are exact dollars."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\r\n")
    if heading:
        writer.writerow(CSV_TITLES)
    for line in lines:
        writer.writerow(map(csv_cell, _cells(line)))
    return target.getvalue()


def _cells(line: StatementLine) -> list[str]:
    return [
        line.at.isoformat(),
        line.transfer_id,
        line.kind,
        line.memo,
        line.corrects or "",
        line.window_start.isoformat() if line.window_start else "",
        *_amounts(line.change),
        *_amounts(line.after),
    ]


def _amounts(funds: Funds) -> list[str]:
    return [decimal(funds.balance_microusd), decimal(funds.credit_microusd), decimal(funds.holds_microusd)]
