"""The ledger keeps itself: what does not sum to zero, and what would change the past, the database refuses."""

import asyncio
import os
from collections.abc import AsyncIterator

import asyncpg
import pytest

from conftest import Servers
from integration.billing.stage import T0, Stage, transfer
from penstock.billing.model import CLEARING, PROMOTIONS, REVENUE, Account, Kind, Transfer
from penstock.billing.service import checkpoints
from penstock.billing.store import ledger
from penstock.kit import db
from penstock.kit.db import Database, Tx
from penstock.kit.migrate import migrate

BALANCE = Account.BALANCE.of("org_a")
#: What nobody may do to the past.
CHANGES = [
    f"{change} billing.{table}{rest}"
    for table, column in (
        ("accounts", "currency"),
        ("transfers", "memo"),
        ("entries", "account_id"),
        ("usage", "quantity"),
    )
    for change, rest in (
        ("update", f" set {column} = {column}"),
        ("delete from", ""),
        ("truncate", " cascade"),
    )
]


async def _raw(stage: Stage, *entries: tuple[str, int]) -> None:
    async with stage.db.transaction() as tx:
        await tx.execute("insert into billing.transfers (id, kind, organisation_id) values ('raw', 'grant', 'org_a')")
        await tx.execute(
            "insert into billing.entries (transfer_id, account_id, amount_microusd)"
            " select 'raw', * from unnest($1::text[], $2::bigint[])",
            [account for account, _ in entries],
            [amount for _, amount in entries],
        )


@pytest.mark.parametrize(
    "entries",
    [
        [(BALANCE, 5)],
        [(BALANCE, 5), (CLEARING, -4)],
        [(BALANCE, 5), ("org_a/euros", -5)],
        [(BALANCE, 5), (CLEARING, -5), ("org_a/euros", 1)],
        [(BALANCE, 5), ("org_nobody/balance", -5)],
        [("org_nobody/balance", 5), ("org_nobody/credit", -5)],
    ],
    ids=["one-sided", "unequal", "two-currencies", "other-currency-alone", "no-such-account", "no-accounts"],
)
async def test_what_does_not_sum_to_zero_is_refused(stage: Stage, entries: list[tuple[str, int]]) -> None:
    await stage.customer()
    async with stage.db.transaction() as tx:
        await tx.execute("insert into billing.accounts values ('org_a/euros', 'org_a', 'holds', 'EUR')")
    with pytest.raises(asyncpg.CheckViolationError, match="transfer raw does not sum to zero"):
        await _raw(stage, *entries)
    assert await stage.value("select count(*) from billing.transfers") == 0
    assert await stage.value("select count(*) from billing.entries") == 0


async def test_zero_is_no_entry(stage: Stage) -> None:
    await stage.customer()
    with pytest.raises(asyncpg.CheckViolationError):
        await _raw(stage, (BALANCE, 0))


async def test_an_entry_without_a_transfer_is_refused(stage: Stage) -> None:
    await stage.customer()
    with pytest.raises(asyncpg.CheckViolationError, match="transfer none"):
        await stage.rows(
            "insert into billing.entries (transfer_id, account_id, amount_microusd)"
            " values ('none', 'org_a/balance', 7), ('none', 'platform/clearing', -7)"
        )


async def test_every_transfer_of_a_statement_is_looked_at(stage: Stage) -> None:
    await stage.customer()
    with pytest.raises(asyncpg.CheckViolationError, match=r"transfer (one|other)"):
        await stage.rows(
            "with t as (insert into billing.transfers (id, kind, organisation_id)"
            " values ('one', 'grant', 'org_a'), ('other', 'grant', 'org_a') returning id)"
            " insert into billing.entries (transfer_id, account_id, amount_microusd)"
            " values ('one', 'org_a/balance', 7), ('other', 'platform/clearing', -7)"
        )


async def test_a_correction_names_what_it_corrects_and_only_a_correction_does(stage: Stage) -> None:
    await stage.customer(paid=100)
    paid = await stage.value("select id from billing.transfers")
    async with stage.db.transaction() as tx:
        assert await ledger.post(tx, transfer(Kind.CORRECTION, "org_a", 1, corrects=paid))
        assert await ledger.remaining(tx, paid) == {BALANCE: 101, CLEARING: -100, REVENUE: -1}
    for kind, corrects in ((Kind.CORRECTION, None), (Kind.GRANT, paid)):
        with pytest.raises(asyncpg.CheckViolationError):
            async with stage.db.transaction() as tx:
                await ledger.post(tx, transfer(kind, "org_a", 1, corrects=corrects))
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        async with stage.db.transaction() as tx:
            await ledger.post(tx, transfer(Kind.CORRECTION, "org_a", 1, corrects="nothing"))


async def test_the_past_cannot_be_changed_even_by_a_superuser(stage: Stage) -> None:
    await stage.customer(paid=100)
    await stage.start(T0)
    assert await stage.value("select usesuper from pg_user where usename = current_user")
    for change in CHANGES:
        with pytest.raises(asyncpg.RaiseError, match="append-only"):
            await stage.rows(change)


@pytest.fixture
async def owned(servers: Servers) -> AsyncIterator[Database]:
    """A database whose tables belong to an ordinary role, which made them, and which is connected."""
    role = f"ordinary_{os.urandom(4).hex()}"
    admin = await asyncpg.connect(servers.admin_url)
    await admin.execute(f"create role {role} login password 'plain'")
    await admin.execute(f"create database {role} owner {role}")
    url = f"postgresql://{role}:plain@{servers.admin_url.rsplit('@', 1)[1].rsplit('/', 1)[0]}/{role}"
    try:
        await asyncio.to_thread(migrate, url)
        async with db.connect(url, lambda _, __: None, name="ordinary") as connected:
            yield connected
    finally:
        await admin.execute(f"drop database {role} with (force)")
        await admin.execute(f"drop role {role}")
        await admin.close()


async def test_an_ordinary_owner_can_add_and_has_no_permission_to_change(owned: Database) -> None:
    stage = Stage(owned)
    await stage.begin()
    assert not await stage.value("select usesuper from pg_user where usename = current_user")
    await stage.customer(paid=1_000, granted=1_000)
    run = await stage.start(T0)
    await stage.accrue(T0.replace(minute=5))
    await stage.end(run, T0.replace(minute=2))
    await stage.accrue(T0.replace(minute=6))
    async with owned.transaction() as tx:
        assert await ledger.take_checkpoints(tx, entries_min=1)
    await stage.holds(T0.replace(minute=6))
    for change in CHANGES:
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="permission denied"):
            await stage.rows(change)


async def test_the_same_id_is_one_transfer(stage: Stage) -> None:
    await stage.customer()
    assert await stage.post(Kind.PAYMENT, "org_a", 70, key="payment/1")
    assert not await stage.post(Kind.PAYMENT, "org_a", 70, key="payment/1")
    assert await stage.balance() == 70


async def test_racers_with_one_id_post_one_transfer(stage: Stage) -> None:
    await stage.customer()
    done = await asyncio.gather(*(stage.post(Kind.PAYMENT, "org_a", 70, key="payment/1") for _ in range(10)))
    assert sorted(done) == [False] * 9 + [True]
    assert await stage.balance() == 70
    assert await stage.value("select count(*) from billing.entries") == 2


async def test_racers_with_their_own_ids_all_post(stage: Stage) -> None:
    organisations = [f"org_{number}" for number in range(4)]
    for organisation in organisations:
        await stage.customer(organisation)
    posts = [stage.post(Kind.PAYMENT, organisations[number % 4], number + 1) for number in range(100)]
    takes = [_checkpoint(stage) for _ in range(10)]
    await asyncio.gather(*posts, *takes)
    for number, organisation in enumerate(organisations):
        assert await stage.balance(organisation) == sum(range(number + 1, 101, 4))
    assert await stage.value("select billing.balance_of($1)", CLEARING) == -5050
    await stage.holds(T0)


async def _checkpoint(stage: Stage, entries_min: int = 1) -> int:
    async with stage.db.transaction() as tx:
        return await ledger.take_checkpoints(tx, entries_min=entries_min)


async def test_a_balance_is_the_same_with_and_without_a_checkpoint(stage: Stage) -> None:
    await stage.customer(paid=1_000, granted=300)
    await stage.post(Kind.REFUND, "org_a", 40)
    before = await stage.balance(), await stage.balance(account=Account.CREDIT)
    assert await _checkpoint(stage) == 4
    assert (await stage.balance(), await stage.balance(account=Account.CREDIT)) == before == (960, 300)
    taken = await stage.rows("select account_id, balance_microusd, entries from billing.checkpoints order by 1")
    assert {row["account_id"]: (row["balance_microusd"], row["entries"]) for row in taken} == {
        BALANCE: (960, 2),
        Account.CREDIT.of("org_a"): (300, 1),
        CLEARING: (-960, 2),
        PROMOTIONS: (-300, 1),
    }
    await stage.post(Kind.PAYMENT, "org_a", 5)
    assert await stage.balance() == 965
    assert await _checkpoint(stage, entries_min=2) == 0
    assert await _checkpoint(stage) == 2
    assert await stage.balance() == 965
    await stage.holds(T0)


async def test_entries_of_transactions_that_commit_after_a_checkpoint_are_neither_lost_nor_counted_twice(
    stage: Stage,
) -> None:
    await stage.customer(paid=1)
    async with stage.db.transaction() as older:
        await ledger.post(older, transfer(Kind.PAYMENT, "org_a", 10))
        await stage.post(Kind.PAYMENT, "org_a", 100)  # a later transaction that commits before
        async with stage.db.transaction() as oldest_but_idle:
            await oldest_but_idle.execute("select pg_current_xact_id()")
            await stage.post(Kind.PAYMENT, "org_a", 1_000)
            await _checkpoint(stage)
            assert await stage.balance() == 1_101
            assert (
                await stage.value("select balance_microusd from billing.checkpoints where account_id = $1", BALANCE)
                == 1
            )
    for _ in range(2):
        assert await stage.balance() == 1_111
        await _checkpoint(stage)
    assert await stage.value("select balance_microusd from billing.checkpoints where account_id = $1", BALANCE) == 1_111
    await stage.holds(T0)


@pytest.mark.parametrize("foreign", ["cluster = cluster + 1", "tx = '9000000000000000'"])
async def test_a_checkpoint_from_another_cluster_is_ignored_and_replaced(stage: Stage, foreign: str) -> None:
    await stage.customer(paid=500)
    await _checkpoint(stage)
    async with stage.db.transaction() as tx:
        await tx.execute(f"update billing.checkpoints set balance_microusd = 77, {foreign}")
    await stage.post(Kind.PAYMENT, "org_a", 1)
    assert await stage.balance() == 501
    # However few the entries are: when transaction ids have come so far, it would count again.
    assert await _checkpoint(stage, entries_min=1_000_000) == 2
    taken = await stage.rows("select account_id, balance_microusd from billing.checkpoints order by 1")
    assert [tuple(row) for row in taken] == [(BALANCE, 501), (CLEARING, -501)]
    assert await stage.balance() == 501
    await stage.holds(T0)


async def test_whoever_starts_in_another_cluster_forgets_the_checkpoints_of_the_one_before(stage: Stage) -> None:
    await stage.customer(paid=500)
    async with stage.db.transaction() as tx:
        # As a dump of another cluster brings them: both say the same, and it is not here.
        await tx.execute("update billing.here set cluster = cluster + 1")
    await _checkpoint(stage)
    async with stage.db.transaction() as tx:
        await tx.execute("update billing.checkpoints set balance_microusd = 77")
    assert await stage.balance() == 77
    await checkpoints.arrive(stage.db)
    assert await stage.balance() == 500


async def test_a_run_that_is_rolled_back_leaves_no_entry_in_a_checkpoint(stage: Stage) -> None:
    await stage.customer(paid=5)

    async def fail(tx: Tx) -> None:
        await ledger.post(tx, transfer(Kind.PAYMENT, "org_a", 1_000))
        await ledger.take_checkpoints(tx, entries_min=1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with stage.db.transaction() as tx:
            await fail(tx)
    await _checkpoint(stage)
    assert await stage.balance() == 5
    await stage.holds(T0)


async def test_a_transaction_sees_its_own_entries_beside_its_checkpoint(stage: Stage) -> None:
    await stage.customer(paid=5)
    async with stage.db.transaction() as tx:
        await ledger.post(tx, transfer(Kind.PAYMENT, "org_a", 10))
        await ledger.take_checkpoints(tx, entries_min=1)
        assert await ledger.balance(tx, BALANCE) == 15
    assert await stage.balance() == 15


async def test_an_amount_that_would_overflow_is_refused_whole(stage: Stage) -> None:
    await stage.customer()
    huge = Transfer(
        id="huge",
        kind=Kind.PAYMENT,
        organisation_id="org_a",
        entries={BALANCE: 2**62, Account.CREDIT.of("org_a"): 2**62, CLEARING: -(2**63)},
    )
    async with stage.db.transaction() as tx:
        assert await ledger.post(tx, huge)
    with pytest.raises(asyncpg.NumericValueOutOfRangeError):
        await _overflow(stage)
    assert await stage.balance() == 2**62


async def _overflow(stage: Stage) -> None:
    async with stage.db.transaction() as tx:
        for number in (1, 2):
            await ledger.post(tx, transfer(Kind.PAYMENT, "org_a", 2**62, key=f"again/{number}"))
        await ledger.balance(tx, BALANCE)
