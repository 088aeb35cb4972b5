"""Statements: every transfer once, in order, and sums that fit."""

import csv
import io

import pytest

from integration.billing.people import OWNER, days, lately, someone, statement_of
from integration.billing.stage import HOUR, MINUTE, PRICE, T0, Stage
from penstock.billing import pages
from penstock.billing.model import CLEARING, Account, Kind, Transfer
from penstock.billing.service import statements
from penstock.billing.service.statements import Reading
from penstock.billing.store import ledger
from penstock.identity.model import Role
from penstock.kit import paging
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.wire.rest import Funds, StatementLine


async def history(stage: Stage) -> None:
    """A payment, a grant, usage that turned out to have ended earlier, and a refund."""
    await stage.customer(paid=10_000_000, granted=30_000)
    run = await stage.start(T0, price=PRICE)
    await stage.accrue(T0 + 3 * MINUTE)
    await stage.end(run, T0 + 90 * MINUTE / 60)
    await stage.accrue(T0 + 4 * MINUTE)
    await stage.post(Kind.REFUND, "org_a", 1_000_000, key="refund/r1")
    await stage.customer("org_b", paid=77)


async def test_each_transfer_is_shown_with_what_there_was_after_it(stage: Stage) -> None:
    await history(stage)
    found = await statement_of(stage)
    assert found.opening == Funds(balance_microusd=0, credit_microusd=0, holds_microusd=0)
    kinds = [line.kind for line in found.items]
    assert kinds == ["payment", "grant", "usage", "usage", "usage", "correction", "correction", "refund"]
    funds = found.opening
    for line in found.items:
        funds = Funds(
            balance_microusd=funds.balance_microusd + line.change.balance_microusd,
            credit_microusd=funds.credit_microusd + line.change.credit_microusd,
            holds_microusd=0,
        )
        assert line.after == funds
    assert found.closing == funds
    assert funds.balance_microusd == await stage.balance()
    assert funds.credit_microusd == await stage.balance(account=Account.CREDIT)
    corrections = [line for line in found.items if line.kind == "correction"]
    assert {line.corrects for line in corrections} <= {line.transfer_id for line in found.items}
    assert found.items[2].window_start == T0
    assert found.items[-1].change.balance_microusd == -1_000_000


async def test_pages_of_a_statement_go_on_where_the_last_ended(stage: Stage) -> None:
    await history(stage)
    whole = await statement_of(stage)
    lines: list[StatementLine] = []
    cursor: str | None = None
    while cursor is not None or not lines:
        page = await statement_of(stage, limit=3, cursor=cursor)
        assert (page.opening, page.closing) == (whole.opening, whole.closing)
        lines += page.items
        cursor = page.next_cursor
    assert lines == whole.items


async def test_what_is_posted_while_somebody_reads_is_on_no_later_page(stage: Stage) -> None:
    await history(stage)
    whole = await statement_of(stage)
    page = await statement_of(stage, limit=3)
    lines = list(page.items)
    await stage.post(Kind.REFUND, "org_a", 5, key="refund/meanwhile")
    while page.next_cursor is not None:
        page = await statement_of(stage, limit=3, cursor=page.next_cursor)
        lines += page.items
    assert lines == whole.items
    assert lines[-1].after == page.closing
    assert (await statement_of(stage)).items[-1].transfer_id == "refund/meanwhile"


async def test_days_before_and_after_show_what_there_was(stage: Stage) -> None:
    await history(stage)
    whole = lately()
    before = await statement_of(stage, period=days(T0.date(), T0.date()))
    assert (before.items, before.opening, before.closing) == ([], before.opening, before.opening)
    assert before.opening.balance_microusd == 0
    later = days(whole.to_day.replace(year=whole.to_day.year + 1), whole.to_day.replace(year=whole.to_day.year + 1))
    after = await statement_of(stage, period=later)
    assert after.opening == after.closing == (await statement_of(stage)).closing


async def test_another_organisations_transfers_are_absent(stage: Stage) -> None:
    await history(stage)
    stranger = someone(Role.OWNER, org="org_b")
    mine = {line.transfer_id for line in (await statement_of(stage)).items}
    theirs = {line.transfer_id for line in (await statement_of(stage, caller=stranger)).items}
    assert len(theirs) == 1
    assert not mine & theirs
    async with stage.db.read() as conn:
        for transfer_id in (*mine, "unknown", "a\0b", "x" * 300):
            with pytest.raises(NotFound):
                await statements.transfer(conn, stranger, transfer_id)
        for role in (Role.VIEWER, Role.DEVELOPER):
            with pytest.raises(Denied):
                await statements.transfer(conn, someone(role), next(iter(mine)))


async def test_a_charge_shows_the_windows_that_it_is_made_of(stage: Stage) -> None:
    await stage.customer(paid=10_000_000)
    runs = [await stage.start(T0, end=T0 + HOUR, price=price) for price in (60_000, 120_000)]
    await stage.start(T0, end=T0 + HOUR, org="org_b")
    await stage.accrue(T0 + MINUTE)
    async with stage.db.read() as conn:
        found = await statements.transfer(conn, OWNER, "usage/org_a/2026-01-05T10:00:00Z")
    assert {entry.account_id: entry.amount_microusd for entry in found.entries} == {
        "org_a/balance": -3000,
        "platform/revenue": 3000,
    }
    assert [(window.resource_id, window.amount_microusd) for window in found.usage] == [
        (runs[1].id, 2000),
        (runs[0].id, 1000),
    ]
    assert (found.usage_count, found.window_start, found.run_at) == (2, T0, T0 + MINUTE)


@pytest.mark.parametrize(
    "parts",
    [
        ("other", 1),
        ("statement", "x"),
        ("statement", "no time", "x", "1:2:", *[0] * 9),
        ("statement", "2026-01-01", "x", "1:2:", *[0] * 9),
        ("statement", "2026-01-01T00:00:00+00:00", "x", "1:2:", *["0"] * 9),
        *(
            ("statement", "2026-01-01T00:00:00+00:00", "x", snapshot, *[0] * 9)
            for snapshot in (
                "",
                "x",
                "0:1:",
                "2:1:",
                "1:9:3,2",
                "1:9:3,3",
                "1:9:9",
                "1:9:,",
                f"1:{10**18}:",
                "1:2:" + "1" * 200,
            )
        ),
    ],
)
def test_a_foreign_cursor_is_refused(parts: tuple[str | int, ...]) -> None:
    with pytest.raises(Invalid, match="cursor"):
        Reading.of(paging.encode_cursor(*parts))


async def test_the_export_is_the_statement_and_no_cell_a_formula(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "EXPORT_ROWS", 3)
    await history(stage)
    evil = '=HYPERLINK("http://x","y"),\r\n"quoted"'
    async with stage.db.transaction() as tx:
        entries = {"org_a/balance": 5, CLEARING: -5}
        await ledger.post(
            tx, Transfer(id="payment/evil", kind=Kind.PAYMENT, organisation_id="org_a", entries=entries, memo=evil)
        )
    text = ""
    async for lines in statements.export(stage.db, OWNER, lately()):
        text += pages.statement_csv(lines, heading=not text)
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    whole = (await statement_of(stage, limit=200)).items
    assert [row["transfer_id"] for row in rows] == [line.transfer_id for line in whole]
    assert rows[-1]["memo"] == "'" + evil.replace("\r\n", "\\x0d\\x0a")
    assert rows[0]["balance_usd"] == "10.00"
    assert rows[2]["credit_usd"].startswith("-0.0")
    assert text.count("\r\n") == len(rows) + 1
