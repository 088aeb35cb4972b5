"""Invoices: to the micro-dollar what the ledger took, by the month in which a window began."""

from datetime import UTC, datetime, timedelta

import pytest

from integration.billing.people import OPERATOR, OWNER, move, someone
from integration.billing.stage import HOUR, MINUTE, PRICE, T0, Stage
from penstock.billing import pages
from penstock.billing.model import Account, Kind, Transfer
from penstock.billing.service import adjust, invoices
from penstock.billing.store import ledger
from penstock.identity.directory import Directory
from penstock.identity.model import Role
from penstock.kit.caller import Caller
from penstock.kit.db import Database
from penstock.kit.errors import Denied, NotFound
from penstock.kit.paging import PageQuery
from penstock.wire import rest

FEBRUARY = datetime(2026, 2, 1, tzinfo=UTC)
PROJECT = f"prj_{'v' * 26}"
#: What the ledger earned with the windows of a month, corrections of them included.
_REVENUE = """
    select coalesce(sum(e.amount_microusd), 0) from billing.entries e join billing.transfers t on t.id = e.transfer_id
    left join billing.transfers o on o.id = t.corrects
    where e.account_id = 'platform/revenue' and t.organisation_id = $1
        and to_char(coalesce(t.window_start, o.window_start) at time zone 'UTC', 'YYYY-MM') = $2
"""
#: All transfers were posted in a month of our choice. Only tests can do that: the table takes no updates.
_POSTED_AT = "update billing.transfers set at = $1 where organisation_id = 'org_a'"


async def invoice_of(stage: Stage, month: str, caller: Caller = OWNER) -> rest.Invoice:
    async with stage.db.transaction() as tx:
        return await invoices.invoice(tx, caller, Directory(), month)


async def posted(stage: Stage, at: datetime) -> None:
    async with stage.db.transaction() as tx:
        await tx.execute("alter table billing.transfers disable trigger transfers_append_only")
        await tx.execute("grant update on billing.transfers to current_user")
        await tx.execute(_POSTED_AT, at)
        await tx.execute("alter table billing.transfers enable trigger transfers_append_only")


async def held(stage: Stage, amount: int) -> None:
    """A refund that was asked for."""
    entries = {Account.BALANCE.of("org_a"): -amount, Account.HOLDS.of("org_a"): amount}
    async with stage.db.transaction() as tx:
        await ledger.post(tx, Transfer(id="refund/rfd_1", kind=Kind.REFUND, organisation_id="org_a", entries=entries))


async def named(stage: Stage, organisation: str, project: str) -> None:
    async with stage.db.transaction() as tx:
        await tx.execute("insert into identity.organisations (id, name) values ('org_a', $1)", organisation)
        await tx.execute(
            "insert into identity.projects (id, organisation_id, name) values ($1, 'org_a', $2)", PROJECT, project
        )


async def test_lines_sum_to_the_usage_and_the_total_to_the_revenue(stage: Stage) -> None:
    await stage.customer(paid=10_000_000, granted=1_000_000)
    long_run = await stage.start(T0 + timedelta(seconds=7.3), end=T0 + 2 * HOUR, price=PRICE)
    await move(stage, long_run, project=PROJECT)
    await stage.start(T0, end=T0 + 17 * MINUTE, price=999_983)
    await stage.record(123_457, T0, price=7, per=1000)
    await stage.start(T0, end=T0 + HOUR, org="org_b")
    await stage.catch_up(T0 + 3 * HOUR)
    await named(stage, "Acme", "vision")
    found = await invoice_of(stage, "2026-01")
    assert sum(line.amount_microusd for line in found.lines) == found.usage_microusd
    assert found.total_microusd == found.usage_microusd == await stage.value(_REVENUE, "org_a", "2026-01")
    assert found.credit_used_microusd == 1_000_000
    assert found.balance_used_microusd == found.total_microusd - 1_000_000
    assert found.total_cents * 10_000 == found.total_microusd + found.rounding_microusd
    assert abs(found.rounding_microusd) <= 5_000
    assert found.organisation_name == "Acme"
    lines = {line.project_name: line for line in found.lines if line.sku == "g1.1"}
    assert lines["vision"].quantity_text == "1.99797222 h"
    assert lines["vision"].price_text == "$3.49 per h"
    assert lines["vision"].gpus == 1
    assert {line.gpus for line in found.lines if line.meter == "function.ms"} == {0}
    assert (found.number, found.issued_on) == ("2026-01/org_a", None)
    assert [line.quantity for line in found.lines if line.meter == "function.ms"] == [123_457]
    assert found.draft


async def test_a_month_is_a_draft_until_it_is_over_and_charged(database: Database) -> None:
    stage = Stage(database, window=timedelta(minutes=7))
    await stage.begin(FEBRUARY - HOUR)
    await stage.customer(paid=10_000_000)
    run = await stage.start(FEBRUARY - HOUR, end=FEBRUARY + HOUR, price=7_200_007)
    await stage.accrue(FEBRUARY - MINUTE)
    assert (await invoice_of(stage, "2026-01")).draft
    await stage.catch_up(FEBRUARY + 2 * HOUR)
    january, february = await invoice_of(stage, "2026-01"), await invoice_of(stage, "2026-02")
    assert (january.draft, february.draft) == (False, True)
    assert (january.issued_on, february.issued_on) == (FEBRUARY.date(), None)
    assert january.total_microusd + february.total_microusd == run.cost(FEBRUARY + HOUR)
    for month, found in (("2026-01", january), ("2026-02", february)):
        assert found.total_microusd == await stage.value(_REVENUE, "org_a", month)
    async with database.read() as conn:
        first = await invoices.listed(conn, OWNER, PageQuery(limit=1))
        second = await invoices.listed(conn, OWNER, PageQuery(limit=1, cursor=first.next_cursor))
    assert [(item.month, item.draft) for item in (*first.items, *second.items)] == [
        ("2026-02", True),
        ("2026-01", False),
    ]
    assert second.next_cursor is None


async def test_what_the_meter_and_operators_gave_back_is_on_it(stage: Stage) -> None:
    await stage.customer(paid=10_000_000, granted=20_000)
    run = await stage.start(T0, price=PRICE)
    await stage.accrue(T0 + 5 * MINUTE)
    await stage.end(run, T0 + 2 * MINUTE)
    await stage.accrue(T0 + 6 * MINUTE)
    async with stage.db.transaction() as tx:
        wanted = rest.CorrectionCreate(
            transfer_id="usage/org_a/2026-01-05T10:01:00Z", amount_microusd=1_001, memo="slow"
        )
        await adjust.correct(tx, OPERATOR, wanted)
    await stage.post(Kind.REFUND, "org_a", 2_000_000)
    await held(stage, 1_000_000)
    await posted(stage, T0)
    found = await invoice_of(stage, "2026-01")
    assert found.usage_microusd == run.price_microusd * 2 // 60
    assert found.corrections_microusd == -1_001
    assert [(each.amount_microusd, each.memo) for each in found.corrections] == [(-1_001, "slow")]
    assert found.total_microusd == await stage.value(_REVENUE, "org_a", "2026-01")
    assert (found.payments_microusd, found.refunds_microusd) == (10_000_000, -2_000_000)
    assert found.grants_microusd == 20_000
    assert sorted(each.kind for each in found.movements) == ["grant", "payment", "refund"], (
        "what is on hold is not gone"
    )
    # A correction of a later month stands on that month's invoice, and changes none that was sent.
    await posted(stage, T0 + timedelta(days=31))
    later = await invoice_of(stage, "2026-01")
    assert (later.total_microusd, later.corrections, later.movements) == (found.usage_microusd, [], [])


async def test_a_month_with_nothing_but_a_correction_has_an_invoice(stage: Stage) -> None:
    await stage.customer(paid=10_000_000)
    await stage.start(T0, end=T0 + MINUTE)
    await stage.accrue(T0 + 2 * MINUTE)
    wanted = rest.CorrectionCreate(transfer_id="usage/org_a/2026-01-05T10:00:00Z", amount_microusd=1_001, memo="slow")
    async with stage.db.transaction() as tx:
        await adjust.correct(tx, OPERATOR, wanted)
    await posted(stage, T0 + timedelta(days=31))
    found = await invoice_of(stage, "2026-02")
    assert (found.lines, found.usage_microusd, found.total_microusd) == ([], 0, -1_001)
    async with stage.db.read() as conn:
        listed = await invoices.listed(conn, OWNER, PageQuery())
    assert [each.month for each in listed.items] == ["2026-02", "2026-01"]


async def test_there_is_no_invoice_of_other_months_or_for_others(stage: Stage) -> None:
    await stage.customer(paid=10_000_000)
    await stage.start(T0, end=T0 + HOUR)
    await stage.catch_up(T0 + 2 * HOUR)
    for month in (
        "2026-02",
        "2026-13",
        "26-01",
        "2026-1",
        "2026-01-05",
        "9999-12",
        "1999-01",
        "",
        "\u0662\u0660\u0662\u0666-01",
    ):
        with pytest.raises(NotFound):
            await invoice_of(stage, month)
    with pytest.raises(NotFound):
        await invoice_of(stage, "2026-01", someone(Role.OWNER, org="org_b"))
    with pytest.raises(Denied):
        await invoice_of(stage, "2026-01", someone(Role.DEVELOPER))


async def test_the_page_escapes_what_people_wrote(stage: Stage) -> None:
    await stage.customer(paid=10_000_000)
    run = await stage.start(T0, end=T0 + HOUR)
    await move(stage, run, project=PROJECT)
    await stage.catch_up(T0 + 2 * HOUR)
    await named(stage, '<script>alert("x")</script>', "a & b\u202e")
    page = pages.invoice_page(await invoice_of(stage, "2026-01"))
    assert "<script" not in page
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in page
    assert "a &amp; b\\u202e" in page
    assert "$3.49" in page
    assert "http" not in page
