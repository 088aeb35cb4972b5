"""The invoice as a page: well formed, complete, and without anything that people wrote taken for markup."""

from datetime import UTC, date, datetime
from html.parser import HTMLParser

import msgspec
import pytest

from penstock.billing import pages
from penstock.wire.rest import Funds, Invoice, InvoiceLine, InvoiceMovement, StatementLine

MOMENT = datetime(2026, 2, 1, tzinfo=UTC)
EVIL = "<img src=x onerror='alert(1)'>&\u202e"
LINE = InvoiceLine(
    project_id="prj_1",
    project_name=EVIL,
    resource_kind="allocation",
    meter="allocation.interactive",
    sku="g1.1",
    gpus=8,
    quantity=3_600_000_000,
    quantity_text="1.0000 h",
    price_microusd=3_490_000,
    per=3_600_000_000,
    price_text="$3.49 per h",
    amount_microusd=3_490_000,
)
PAYMENT = InvoiceMovement(
    transfer_id="payment/pay_1", kind="payment", at=MOMENT, memo=EVIL, corrects=None, amount_microusd=25_000_000
)
INVOICE = Invoice(
    month="2026-01",
    number="2026-01/org_1",
    issued_on=None,
    organisation_id="org_1",
    organisation_name=EVIL,
    draft=True,
    accrued_until=MOMENT,
    currency="USD",
    lines=[LINE, msgspec.structs.replace(LINE, sku="", gpus=0, meter="tokens")],
    lines_left_out=2,
    usage_microusd=6_990_000,
    corrections=[msgspec.structs.replace(PAYMENT, kind="correction", amount_microusd=-1)],
    corrections_microusd=-1,
    total_microusd=6_989_999,
    total_cents=699,
    rounding_microusd=1,
    credit_used_microusd=0,
    balance_used_microusd=6_989_999,
    movements=[PAYMENT],
    movements_left_out=3,
    payments_microusd=25_000_000,
    refunds_microusd=0,
    grants_microusd=0,
)


class Reader(HTMLParser):
    """Notes tags and text, and fails where they do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.cells: list[int] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on") or name in ("src", "href")]
        if tag == "tr":
            self.cells.append(0)
        if tag in ("td", "th"):
            self.cells[-1] += int(dict(attrs).get("colspan") or 1)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read(invoice: Invoice) -> Reader:
    reader = Reader()
    reader.feed(pages.invoice_page(invoice))
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_is_well_formed_and_foreign_text_is_only_text() -> None:
    found = read(INVOICE)
    assert found.tags.isdisjoint({"img", "script", "link", "iframe", "a"})
    assert "<img src=x onerror='alert(1)'>&\\u202e" in "".join(found.words)
    assert set(found.cells) == {4, 2}


@pytest.mark.parametrize(
    "part",
    [
        "$6.99",
        "$6.989999",
        "-$0.000001",
        "2 smaller lines",
        "3 more movements",
        "Draft",
        "1.0000 h",
        "payment/pay_1",
        "g1.1 x 8",
        "Number 2026-01/org_1",
    ],
)
def test_the_page_says(part: str) -> None:
    assert part in "".join(read(INVOICE).words)


def test_what_there_is_none_of_is_left_out() -> None:
    plain = msgspec.structs.replace(
        INVOICE,
        draft=False,
        issued_on=date(2026, 2, 1),
        lines_left_out=0,
        corrections=[],
        corrections_microusd=0,
        movements=[],
        movements_left_out=0,
    )
    text = "".join(read(plain).words)
    assert "Issued on 2026-02-01" in text
    for part in ("Draft", "smaller lines", "Corrections", "Payments, refunds", "more movements"):
        assert part not in text


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "$0.00"), (5, "$0.05"), (123_456_789, "$1,234,567.89"), (-5, "-$0.05")]
)
def test_cents_are_money(count: int, shown: str) -> None:
    assert pages.cents(count) == shown


@pytest.mark.parametrize("memo", ["=1+1", "+cmd", "-2+3", "@x", "\tx", 'a,"b"', "a\r\nb", "\u202e"])
def test_no_cell_of_a_statement_is_a_formula_or_breaks_its_line(memo: str) -> None:
    funds = Funds(balance_microusd=-1, credit_microusd=0, holds_microusd=2_000_000)
    line = StatementLine(
        transfer_id="t",
        kind="payment",
        at=MOMENT,
        memo=memo,
        corrects=None,
        window_start=None,
        correlation_id="",
        change=funds,
        after=funds,
    )
    text = pages.statement_csv([line], heading=True)
    assert text.count("\r\n") == 2
    heading, row = text.splitlines()
    assert heading == ",".join(pages.CSV_TITLES)
    assert row.endswith("-0.000001,0.00,2.00,-0.000001,0.00,2.00")
    assert not [cell for cell in row.split(",")[3:4] if cell.startswith(("=", "+", "-", "@", "\t"))]
