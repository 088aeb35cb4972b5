"""Operators' hands on the ledger: grants, corrections, terms, prices, and its verification."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from integration.billing.people import OPERATOR, OWNER, days, someone
from integration.billing.stage import HOUR, MINUTE, T0, Stage
from penstock.billing.errors import CorrectionTooLarge, MeterBusy, NotCorrectable
from penstock.billing.model import Account, Kind
from penstock.billing.service import adjust, checkpoints, prices, verify
from penstock.billing.service.adjust import Adjust
from penstock.billing.store import accrual, adjustments
from penstock.identity.directory import Directory
from penstock.identity.model import Role
from penstock.kit.errors import Denied, Invalid, NotFound
from penstock.kit.paging import PageQuery
from penstock.wire import rest

FIRST = "usage/org_a/2026-01-05T10:00:00Z"
ORG = f"org_{'a' * 26}"
_AUDIT = "select action, target_id, organisation_id from kit.audit order by at"


class Undone(Exception):
    """Ends a transaction that shall have done nothing, with what was seen in it."""

    def __init__(self, report: rest.LedgerReport) -> None:
        self.report = report


async def correct(stage: Stage, transfer_id: str, amount: int) -> rest.LedgerTransfer:
    async with stage.db.transaction() as tx:
        wanted = rest.CorrectionCreate(transfer_id=transfer_id, amount_microusd=amount, memo="sorry")
        return await adjust.correct(tx, OPERATOR, wanted)


async def grant(stage: Stage, amount: int, *, org: str = ORG) -> rest.LedgerTransfer:
    async with stage.db.transaction() as tx:
        wanted = rest.GrantCreate(organisation_id=org, amount_microusd=amount, memo="welcome")
        return await Adjust(Directory()).grant(tx, OPERATOR, wanted)


async def report_of(stage: Stage, org: str | None = None) -> rest.LedgerReport:
    async with stage.db.transaction() as tx:
        return await verify.verify(tx, OPERATOR, org, None)


async def add_organisation(stage: Stage) -> None:
    async with stage.db.transaction() as tx:
        await tx.execute("insert into identity.organisations (id, name) values ($1, 'acme')", ORG)


def entries(transfer: rest.LedgerTransfer) -> dict[str, int]:
    return {entry.account_id: entry.amount_microusd for entry in transfer.entries}


async def test_a_grant_is_credit_and_is_taken_back_as_far_as_it_is_there(stage: Stage) -> None:
    await add_organisation(stage)
    made = await grant(stage, 500)
    assert entries(made) == {"platform/promotions": -500, f"{ORG}/credit": 500}
    assert (made.kind, made.memo) == ("grant", "welcome")
    await stage.start(T0, end=T0 + HOUR, org=ORG, price=200)
    await stage.catch_up(T0 + HOUR)
    with pytest.raises(CorrectionTooLarge, match="at most 300 "):
        await correct(stage, made.id, 301)
    taken = await correct(stage, made.id, 300)
    assert entries(taken) == {f"{ORG}/credit": -300, "platform/promotions": 300}
    assert taken.corrects == made.id
    assert await stage.balance(ORG, Account.CREDIT) == 0
    audited = [tuple(row) for row in await stage.rows(_AUDIT)]
    assert audited == [("billing.grant", made.id, ORG), ("billing.correct", taken.id, ORG)]


async def test_a_charge_is_given_back_to_where_it_came_from_and_never_more(stage: Stage) -> None:
    await stage.customer(paid=10_000_000, granted=400)
    await stage.start(T0, end=T0 + HOUR, price=60_000)
    await stage.accrue(T0 + MINUTE)
    assert entries(await correct(stage, FIRST, 550)) == {"org_a/balance": 550, "platform/revenue": -550}
    second = entries(await correct(stage, FIRST, 200))
    assert second == {"org_a/balance": 50, "org_a/credit": 150, "platform/revenue": -200}
    with pytest.raises(CorrectionTooLarge, match="at most 250 "):
        await correct(stage, FIRST, 251)
    assert entries(await correct(stage, FIRST, 250)) == {"org_a/credit": 250, "platform/revenue": -250}
    with pytest.raises(CorrectionTooLarge, match="at most 0 "):
        await correct(stage, FIRST, 1)
    assert await stage.balance() == 10_000_000
    assert await stage.balance(account=Account.CREDIT) == 400
    assert (await report_of(stage)).holds


async def test_racing_corrections_never_give_back_more_than_was_taken(stage: Stage) -> None:
    await stage.customer(paid=10_000_000)
    await stage.start(T0, end=T0 + HOUR, price=60_000)
    await stage.accrue(T0 + MINUTE)
    tried = await asyncio.gather(*(correct(stage, FIRST, 300) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(each, rest.LedgerTransfer) for each in tried) == 3
    assert sum(isinstance(each, CorrectionTooLarge) for each in tried) == 5
    assert await stage.balance() == 10_000_000 - 100


async def test_the_meter_gives_back_only_what_an_operator_left(stage: Stage) -> None:
    await stage.customer(paid=10_000_000)
    run = await stage.start(T0, price=60_000)
    await stage.accrue(T0 + MINUTE)
    await correct(stage, FIRST, 900)
    await stage.end(run, T0 + timedelta(seconds=30))
    await stage.accrue(T0 + 2 * MINUTE)
    assert await stage.balance() == 10_000_000
    report = await report_of(stage)
    assert report.holds, report.problems


async def test_other_transfers_cannot_be_corrected(stage: Stage) -> None:
    await stage.customer(paid=10)
    await stage.post(Kind.REFUND, "org_a", 1, key="refund/r1")
    for transfer_id, error in (("refund/r1", NotCorrectable), ("payment/none", NotFound)):
        with pytest.raises(error):
            await correct(stage, transfer_id, 1)
    assert await stage.value("select count(*) from billing.transfers where kind = 'correction'") == 0


async def test_a_correction_waits_for_the_meter(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjustments, "_WAIT", "50ms")
    await stage.customer(paid=10_000_000)
    await stage.start(T0, end=T0 + HOUR, price=60_000)
    await stage.accrue(T0 + MINUTE)
    async with stage.db.transaction() as tx:
        await accrual.lock_progress(tx)
        with pytest.raises(MeterBusy):
            await correct(stage, FIRST, 1)


async def test_terms_are_an_existing_organisations(stage: Stage) -> None:
    await add_organisation(stage)
    body = rest.BillingTermsPut(credit_limit_microusd=7_000_000)
    async with stage.db.transaction() as tx:
        assert (await Adjust(Directory()).set_terms(tx, OPERATOR, ORG, body)).credit_limit_microusd == 7_000_000
        for unknown in (f"org_{'b' * 26}", "nonsense", "org_\0"):
            with pytest.raises(NotFound):
                await Adjust(Directory()).set_terms(tx, OPERATOR, unknown, body)
    with pytest.raises(Invalid, match="organisation_id"):
        await grant(stage, 1, org=f"org_{'b' * 26}")
    assert await stage.value("select credit_limit_microusd from billing.customers") == 7_000_000


async def test_prices_have_versions_and_a_history(stage: Stage) -> None:
    now = await stage.value("select clock_timestamp()")
    async with stage.db.transaction() as tx:
        first = await prices.put(tx, OPERATOR, "tokens.output", rest.PricePut(price_microusd=200_000, per=1_000_000))
        later = rest.PricePut(price_microusd=1, per=1, effective_at=now + timedelta(days=3))
        second = await prices.put(tx, OPERATOR, "tokens.output", later)
        await prices.put(tx, OPERATOR, "function.ms", rest.PricePut(price_microusd=4, per=10))
    assert (first.version, first.in_force, second.version, second.in_force) == (1, True, 2, False)
    viewer = someone(Role.VIEWER)
    async with stage.db.read() as conn:
        listed = await prices.listed(conn, viewer, PageQuery(limit=1))
        rest_of_them = await prices.listed(conn, viewer, PageQuery(cursor=listed.next_cursor))
        history = await prices.history(conn, viewer, "tokens.output", PageQuery())
        for unknown in ("none", "UPPER", "a\0b"):
            with pytest.raises(NotFound):
                await prices.history(conn, viewer, unknown, PageQuery())
    meters = [price.meter for price in (*listed.items, *rest_of_them.items)]
    assert meters == ["function.invocation_ms", "function.invocations", "function.ms", "tokens.output"]
    assert rest_of_them.items[-1] == first
    assert history.items == [second, first]


async def test_other_prices_are_refused(stage: Stage) -> None:
    now = await stage.value("select clock_timestamp()")
    good = rest.PricePut(price_microusd=1, per=1)
    past = rest.PricePut(price_microusd=1, per=1, effective_at=now - MINUTE)
    cases = {"allocation.interactive": good, "Tokens": good, "a" * 64: good, "tokens": past}
    async with stage.db.transaction() as tx:
        for meter, body in cases.items():
            with pytest.raises(Invalid):
                await prices.put(tx, OPERATOR, meter, body)
        with pytest.raises(Denied):
            await prices.put(tx, OWNER, "tokens", good)
    assert await stage.value("select count(*) from billing.prices where created_by <> 'system:billing'") == 0


async def test_only_operators_touch_the_ledger(stage: Stage) -> None:
    async with stage.db.transaction() as tx:
        with pytest.raises(Denied):
            await verify.verify(tx, OWNER, None, None)
        with pytest.raises(Denied):
            await adjust.correct(tx, OWNER, rest.CorrectionCreate(transfer_id=FIRST, amount_microusd=1, memo="m"))
        with pytest.raises(Denied):
            await Adjust(Directory()).set_terms(tx, OWNER, ORG, rest.BillingTermsPut(credit_limit_microusd=1))
        with pytest.raises(Denied):
            await Adjust(Directory()).grant(
                tx, OWNER, rest.GrantCreate(organisation_id=ORG, amount_microusd=1, memo="m")
            )


#: What somebody with all rights could do to the tables, and the check that finds it.
DAMAGE: dict[str, Sequence[str]] = {
    "update billing.checkpoints set balance_microusd = balance_microusd + 1 where account_id = 'org_a/balance'": (
        "checkpoints",
    ),
    "update billing.entries set amount_microusd = amount_microusd + 1"
    f" where transfer_id = '{FIRST}' and account_id = 'platform/revenue'": ("zero_sum", "charges"),
    "update billing.daily set amount_microusd = amount_microusd - 1": ("days",),
    "update billing.usage set amount_microusd = amount_microusd + 1 where nth = 0": ("days", "charges"),
    "delete from billing.usage where nth = 1": ("days",),
    "update billing.entries set amount_microusd = amount_microusd * 100 where transfer_id like 'correction/%'": (
        "given_back",
        "corrections",
    ),
}


async def test_verification_finds_every_damage(stage: Stage) -> None:
    await stage.customer(paid=10_000_000, granted=100)
    await stage.customer("org_b", paid=1)
    run = await stage.start(T0, price=60_000)
    await stage.accrue(T0 + 3 * MINUTE)
    await stage.end(run, T0 + timedelta(seconds=150))
    await stage.accrue(T0 + 4 * MINUTE)
    async with stage.db.transaction() as tx:
        for number in range(checkpoints.ENTRIES_MIN):
            await tx.execute(
                "with t as (insert into billing.transfers (id, kind, organisation_id) values ($1, 'payment', 'org_a')"
                " returning id) insert into billing.entries (transfer_id, account_id, amount_microusd)"
                " select id, a, n from t, (values ('org_a/balance', 1), ('platform/clearing', -1)) e (a, n)",
                f"payment/{number}",
            )
    await checkpoints.take(stage.db)
    whole = await report_of(stage)
    assert whole.holds, whole.problems
    assert all(check.looked_at > 0 for check in whole.checks), whole.checks
    for damage, found_by in DAMAGE.items():
        report = await damaged(stage, damage)
        assert {check.name for check in report.checks if check.problems} >= set(found_by), (damage, report.problems)
        assert not report.holds
    async with stage.db.transaction() as tx:
        other = await verify.verify(tx, OPERATOR, "org_b", days(T0.date(), T0.date()))
    assert other.holds


async def damaged(stage: Stage, statement: str) -> rest.LedgerReport:
    """The report of a ledger to which this was done, which is undone again."""
    try:
        async with stage.db.transaction() as tx:
            for table in ("entries", "usage"):
                await tx.execute(f"alter table billing.{table} disable trigger user")
                await tx.execute(f"grant update, delete on billing.{table} to current_user")
            await tx.execute(statement)
            raise Undone(await verify.look(tx, None, None))
    except Undone as undone:
        return undone.report
