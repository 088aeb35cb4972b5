"""A biller against an exact model: random sequences of everything that happens to money, and what must hold of them.

The model keeps each allocation's price, beginning and end, and every quantity that was recorded; it knows no windows
and no runs. Whatever the order, the crashes and the clock, the ledger must say what the model says, to the
micro-dollar.
"""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from fractions import Fraction
from math import floor
from typing import Any, ClassVar, Final

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from integration.billing.stage import T0, Run, Stage, transfer, turn
from penstock.billing.model import US_PER_HOUR, Account, Kind
from penstock.billing.store import ledger
from penstock.kit.db import Row, Tx

ORGANISATIONS: Final = ("org_a", "org_b")
#: Prices of a unit as (micro-dollars, per so many units), most of them below one micro-dollar.
TARIFFS: Final = ((7, 1000), (1, 3), (999_983, 1_000_003), (12, 1))
_MS: Final = timedelta(milliseconds=1)
_US: Final = timedelta(microseconds=1)
_LATE: Final = timedelta(seconds=15)
_STATE: Final = """
    select (select coalesce(json_agg(u), '[]') from billing.usage u) as usage,
        (select coalesce(json_agg(d), '[]') from (select series_id, sum(amount_microusd)::bigint as amount,
            sum(quantity)::bigint as quantity from billing.daily group by 1) d) as daily,
        (select coalesce(json_agg(t), '[]') from (select t.id, t.kind, t.organisation_id, t.corrects, t.window_start,
            e.account_id, e.amount_microusd as amount
            from billing.transfers t join billing.entries e on e.transfer_id = t.id) t) as entries,
        (select json_object_agg(id, billing.balance_of(id)) from billing.accounts) as balances
"""
_FORGET: Final = ("usage", "daily", "entries", "transfers", "recorded", "series", "checkpoints")

organisation = st.sampled_from(ORGANISATIONS)
amount = st.integers(1, 2_000_000)
ago_ms = st.one_of(st.just(0), st.integers(0, 300_000))
picked = st.integers(0, 99)
later_ms = st.integers(60_000, 400_000)
window_s = st.sampled_from((60, 60, 60, 30, 7))


class Crashed(Exception):
    """The biller died here."""


class DyingTx(Tx):
    """A transaction whose process dies before its n-th statement."""

    def __init__(self, tx: Tx, statements: int) -> None:
        super().__init__(tx.conn)
        self.left = statements

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crashed

    async def fetch(self, query: str, *args: object) -> list[Row]:
        """All rows, if it lives."""
        self._step()
        return await super().fetch(query, *args)

    async def fetchrow(self, query: str, *args: object) -> Row | None:
        """The first row, if it lives."""
        self._step()
        return await super().fetchrow(query, *args)

    async def fetchval(self, query: str, *args: object) -> Any:
        """The first value, if it lives."""
        self._step()
        return await super().fetchval(query, *args)

    async def execute(self, query: str, *args: object) -> str:
        """The status, if it lives."""
        self._step()
        return await super().execute(query, *args)


@dataclass
class Money:
    """What an organisation was given, and what of its credit was there at the last look."""

    paid: int = 0
    granted: int = 0
    credit: int = 0


@dataclass
class Book:
    """The database's side, read at once."""

    usage: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    daily: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    transfers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    balances: dict[str, int] = field(default_factory=dict[str, int])

    def taken(self, transfer_id: str, account: str) -> int:
        """What a transfer and its corrections left on an account."""
        return sum(
            each["entries"].get(account, 0)
            for id_, each in self.transfers.items()
            if transfer_id in (id_, each["corrects"])
        )


class MeterMachine(RuleBasedStateMachine):
    """One sequence. The database and the loop are shared by all."""

    stage: ClassVar[Stage]
    runner: ClassVar[asyncio.Runner]
    #: How often each thing was seen, so that a test can say that it was.
    seen: ClassVar[dict[str, int]] = defaultdict(int)

    @initialize(price=st.integers(1, 10_000_000), ago=ago_ms)
    def begin(self, price: int, ago: int) -> None:
        """A clean database at ten o'clock, in which something runs."""
        self.now: datetime = T0
        self.until: datetime = T0
        self.money = {name: Money() for name in ORGANISATIONS}
        self.recorded: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
        self.slow: tuple[Any, str, int] | None = None
        self.known: set[str] = set()
        self.charged_until: dict[str, datetime] = {}
        self.stage.runs.clear()
        self.runner.run(self._forget(price))
        self.runner.run(self.stage.start(self.now - ago * _MS))

    async def _forget(self, price: int) -> None:
        async with self.stage.db.transaction() as tx:
            await tx.execute("set local session_replication_role = replica")
            for table in _FORGET:
                await tx.execute(f"delete from billing.{table}")
            await tx.execute("delete from compute.allocations")
            await tx.execute("update billing.progress set accrued_until = $1", T0)
        await self._set_price(price)
        for name in ORGANISATIONS:
            await self.stage.customer(name)

    async def _set_price(self, price: int) -> None:
        async with self.stage.db.transaction() as tx:
            await tx.execute("update compute.skus set price_microusd_per_gpu_hour = $1", price)

    @rule(seconds=st.integers(-600, 1800))
    def step_clock(self, seconds: int) -> None:
        """The clock is set."""
        self.seen["back" if seconds < 0 else "forth"] += 1
        self.now += timedelta(seconds=seconds)

    @rule(org=organisation, ago=ago_ms, us=st.integers(0, 999))
    def start(self, org: str, ago: int, us: int) -> None:
        """An allocation that became active now, or whose activation commits only now."""
        self.runner.run(self.stage.start(self.now - ago * _MS + us * _US, org=org))

    @precondition(lambda self: self._running())
    @rule(pick=picked, ago=ago_ms, state=st.sampled_from(("released", "release_failed")))
    def stop(self, pick: int, ago: int, state: str) -> None:
        """Its release, perhaps committed late."""
        run = self._running()[pick % len(self._running())]
        self.runner.run(self.stage.end(run, max(run.active_at, self.now - ago * _MS), state=state))

    @precondition(lambda self: self.until > T0 and self._running())
    @rule(pick=picked, ago=st.integers(1, 400_000))
    def lose(self, pick: int, ago: int) -> None:
        """The loss of its node, which ended it at the last heartbeat, before what is charged."""
        run = self._running()[pick % len(self._running())]
        self.runner.run(self.stage.end(run, max(run.active_at, self.until - ago * _MS)))

    @precondition(lambda self: self._running())
    @rule(seconds=st.integers(5, 900), survives=st.booleans(), late=st.booleans())
    def everything_off(self, seconds: int, survives: bool, late: bool) -> None:
        """The whole cloud is off for a while, and its node with it. Units that the node comes back without ended when
        it was last heard of, whether the biller charges the time of the outage before that is known or after."""
        runs, heard_at = self._running(), self.now
        self.now += timedelta(seconds=seconds)
        if late:
            self._accrue(timedelta(seconds=60))
        ended = self.runner.run(self.stage.off(runs, seconds, survives=survives))
        for run in runs:
            if run.id in ended:
                self.runner.run(self.stage.end(run, max(run.active_at, heard_at + ended[run.id])))
            if not survives:
                # The model does not ask the fleet.
                self.stage.runs[run.id] = replace(run, ended_at=max(run.active_at, heard_at))
        self.seen["survived" if survives else "off"] += 1

    @precondition(lambda self: self._running())
    @rule(seconds=st.integers(90, 900), survives=st.booleans(), window=window_s)
    def node_silent(self, seconds: int, survives: bool, window: int) -> None:
        """Their node is not heard of for a while, and the biller runs on. Nothing of the silence is charged until the
        node is back with its units; what it comes back without ended when it was last heard of."""
        runs, heard_at = self._running(), self.now
        self.runner.run(self.stage.hear(runs, heard_at))
        self.now += timedelta(seconds=seconds)
        self._accrue(timedelta(seconds=window))
        heard = self.runner.run(self.stage.hear(runs, None))
        for run in heard if not survives else ():
            self.runner.run(self.stage.end(run, max(run.active_at, heard_at)))
        self.seen["silent"] += 1

    def _running(self) -> list[Run]:
        return [run for run in self.stage.runs.values() if run.ended_at is None]

    @rule(price=st.integers(0, 10_000_000))
    def change_price(self, price: int) -> None:
        """For what starts from now on."""
        self.runner.run(self._set_price(price))

    @rule(org=organisation, moved=amount, kind=st.sampled_from((Kind.PAYMENT, Kind.REFUND)))
    def pay(self, org: str, moved: int, kind: Kind) -> None:
        """Money comes or goes."""
        self.runner.run(self.stage.post(kind, org, moved))
        self.money[org].paid += moved if kind is Kind.PAYMENT else -moved

    @rule(org=organisation, granted=st.integers(1, 20_000))
    def grant(self, org: str, granted: int) -> None:
        """Promotional credit."""
        self.runner.run(self.stage.post(Kind.GRANT, org, granted))
        self.money[org].granted += granted
        self.money[org].credit += granted

    @rule(org=organisation, tariff=st.sampled_from(TARIFFS), quantity=st.integers(0, 5_000), ago=ago_ms)
    def record(self, org: str, tariff: tuple[int, int], quantity: int, ago: int) -> None:
        """Usage of another domain."""
        at = self.now - ago * _MS
        series = self.runner.run(self.stage.record(quantity, at, org=org, price=tariff[0], per=tariff[1]))
        self.recorded[series].append((at, quantity))

    @precondition(lambda self: self.slow is None)
    @rule(org=organisation, paid=amount)
    def top_up_slowly(self, org: str, paid: int) -> None:
        """A transaction that began earlier than others and commits after them."""
        self.slow = (self.stage.db.transaction(), org, paid)
        tx = self.runner.run(self.slow[0].__aenter__())
        self.runner.run(ledger.post(tx, transfer(Kind.PAYMENT, org, paid)))

    @precondition(lambda self: self.slow is not None)
    @rule()
    def finish_slow(self) -> None:
        """It commits."""
        assert self.slow is not None
        opened, org, paid = self.slow
        self.slow = None
        self.runner.run(opened.__aexit__(None, None, None))
        self.money[org].paid += paid

    @rule(entries_min=st.integers(1, 3))
    def take_checkpoints(self, entries_min: int) -> None:
        """Whoever is open meanwhile."""
        self.runner.run(self._take_checkpoints(entries_min))
        book = self.runner.run(self._read())
        self._balances_are_sums(book)

    async def _take_checkpoints(self, entries_min: int) -> None:
        async with self.stage.db.transaction() as tx:
            self.seen["checkpoints"] += await ledger.take_checkpoints(tx, entries_min=entries_min)

    @rule(statements=st.integers(0, 10), window=window_s, later=later_ms)
    def crash(self, statements: int, window: int, later: int) -> None:
        """The biller dies within a run, at the latest before its commit."""
        self.now += later * _MS
        self.runner.run(self._crash(statements, timedelta(seconds=window)))

    async def _crash(self, statements: int, window: timedelta) -> None:
        try:
            async with self.stage.db.transaction() as tx:
                dying = DyingTx(tx, statements)
                ran = await turn(dying, self.now, window)
                self.seen["crashed_at_the_end"] += ran is not None
                raise Crashed
        except Crashed:
            self.seen["crashed"] += 1

    @rule(window=window_s, billers=st.sampled_from((1, 1, 2, 3)), later=later_ms)
    def accrue(self, window: int, billers: int, later: int) -> None:
        """One run, or several at once."""
        self.now += later * _MS
        self._accrue(timedelta(seconds=window), billers)

    def _accrue(self, window: timedelta, billers: int = 1) -> bool:
        done = [each for each in self.runner.run(self._billers(window, billers)) if each is not None]
        # Who is behind leaves windows for the others; in which order they had their turns, the answers do not say.
        for until in sorted(accrued.until for accrued in done):
            assert until > self.until
            self.until = until
        if done:
            self.seen["runs"] += len(done)
            self._compare()
        return bool(done)

    async def _billers(self, window: timedelta, billers: int) -> list[Any]:
        return await asyncio.gather(*(self.stage.accrue(self.now, window=window) for _ in range(billers)))

    async def _read(self) -> Book:
        """Everything, from one snapshot."""
        row = (await self.stage.rows(_STATE))[0]
        book = Book(balances=msgspec.json.decode(row["balances"]))
        for used in msgspec.json.decode(row["usage"]):
            book.usage[used["series_id"]].append(used)
        for day in msgspec.json.decode(row["daily"]):
            book.daily[day["series_id"]] = (day["amount"], day["quantity"])
        for entry in msgspec.json.decode(row["entries"]):
            moved = book.transfers.setdefault(entry["id"], {**entry, "entries": {}})
            moved["entries"][entry["account_id"]] = entry["amount"]
        return book

    def _compare(self) -> None:
        book = self.runner.run(self._read())
        costs = {run.id: self._compare_run(run, book) for run in self.stage.runs.values()}
        spent = {
            name: sum(costs[run.id] for run in self.stage.runs.values() if run.organisation_id == name)
            + sum(self._compare_recorded(series, book) for series in self.recorded if series.startswith(name))
            for name in ORGANISATIONS
        }
        assert set(book.usage) <= set(costs) | set(self.recorded)
        self._balances_are_sums(book)
        for name, money in self.money.items():
            self._compare_money(name, money, spent[name], book)
        self.known = set(book.transfers)

    def _compare_run(self, run: Run, book: Book) -> int:
        """Its seconds are covered once, none outside, and cost what they cost."""
        rows = sorted(book.usage.get(run.id, []), key=lambda row: (row["nth"], row["from_at"]))
        charged = [(_at(row["from_at"]), _at(row["until_at"])) for row in rows if row["nth"] == 0]
        given_back = [(_at(row["from_at"]), _at(row["until_at"])) for row in rows if row["nth"] == 1]
        expected = _covered(run, self.until)
        left = _subtract(charged, given_back)
        end = left[0][1] if left else run.active_at
        if run.heard_at is not None:
            # Until a list is late, it counts as one that has come; then its whole seconds do. Before the silence,
            # everything may have been charged.
            assert end <= max(run.heard_at + _LATE, self.charged_until.get(run.id, run.active_at)), (run, left)
            assert end >= min(run.heard_at.replace(microsecond=0), self.until), (run, left)
            expected = [(run.active_at, end)] if left else []
        assert left == expected, (run, charged, given_back)
        self.charged_until[run.id] = end
        exact = sum(
            (Fraction((end - begin) // _US * run.price_microusd, US_PER_HOUR) for begin, end in expected), Fraction()
        )
        self.seen["corrections"] += len(given_back)
        return self._compare_sums(
            run.id, rows, floor(exact), sum((end - begin) // _US for begin, end in expected), book
        )

    def _compare_recorded(self, series: str, book: Book) -> int:
        """What was recorded before the last window ended is rated, as one sum."""
        price, per = (int(part) for part in series.split("/")[2:])
        quantity = sum(quantity for at, quantity in self.recorded[series] if at < self.until)
        return self._compare_sums(
            series, book.usage.get(series, []), floor(Fraction(quantity * price, per)), quantity, book
        )

    def _compare_sums(self, series: str, rows: list[dict[str, Any]], cost: int, quantity: int, book: Book) -> int:
        sums = (sum(row["amount_microusd"] for row in rows), sum(row["quantity"] for row in rows))
        assert sums == (cost, quantity), series
        assert book.daily.get(series, (0, 0)) == sums, series
        return cost

    def _compare_money(self, name: str, money: Money, spent: int, book: Book) -> None:
        balance, credit = Account.BALANCE.of(name), Account.CREDIT.of(name)
        mine = {id_: each for id_, each in book.transfers.items() if each["organisation_id"] == name}
        assert book.balances[balance] + book.balances[credit] == money.paid + money.granted - spent
        assert sum(each["entries"].get("platform/revenue", 0) for each in mine.values()) == spent
        new = [each for id_, each in mine.items() if id_ not in self.known]
        owed = -sum(
            each["entries"].get(account, 0) for each in new if each["kind"] == "usage" for account in (balance, credit)
        )
        returned = sum(each["entries"].get(credit, 0) for each in new if each["kind"] == "correction")
        # Credit is spent first and never below nothing; what comes back never exceeds what was taken.
        money.credit = max(0, money.credit + returned - owed)
        assert book.balances[credit] == money.credit
        for id_ in {each["corrects"] for each in mine.values()} - {None}:
            assert max(book.taken(id_, balance), book.taken(id_, credit)) <= 0, id_
        starts = [each["window_start"] for each in new if each["kind"] == "usage"]
        assert len(starts) == len(set(starts))

    def _balances_are_sums(self, book: Book) -> None:
        sums: dict[str, int] = defaultdict(int)
        for id_, each in book.transfers.items():
            assert sum(each["entries"].values()) == 0, id_
            for account, moved in each["entries"].items():
                sums[account] += moved
        assert {account: balance for account, balance in book.balances.items() if balance} == {
            account: total for account, total in sums.items() if total
        }

    def teardown(self) -> None:
        """In the end everything is charged, and what was charged beyond an end is corrected."""
        if not hasattr(self, "slow"):
            return
        if self.slow is not None:
            self.finish_slow()
        self._catch_up()
        if self._running():
            self.lose(0, 95_500)
        self._catch_up()
        self.seen["sequences"] += 1

    def _catch_up(self) -> None:
        self.now = max(self.now, self.until) + timedelta(minutes=2)
        while self._accrue(timedelta(seconds=60)):
            pass
        assert self.until > self.now - timedelta(minutes=2)


def _at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _covered(run: Run, until: datetime) -> list[tuple[datetime, datetime]]:
    """The time that must be paid for, as one interval or none."""
    end = until if run.ended_at is None else min(until, run.ended_at)
    return [(run.active_at, end)] if end > run.active_at else []


def _subtract(
    charged: list[tuple[datetime, datetime]], given_back: list[tuple[datetime, datetime]]
) -> list[tuple[datetime, datetime]]:
    """What is left of intervals whose ends were given back, joined. Intervals that overlap stay two, and so differ."""
    ends = {end: begin for begin, end in given_back}
    assert len(ends) == len(given_back)
    left = [(begin, ends.pop(end, end)) for begin, end in charged]
    assert not ends, "time was given back that was not charged"
    joined: list[tuple[datetime, datetime]] = []
    for begin, end in left:
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
