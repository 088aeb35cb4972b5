"""A small world for tests of the meter: allocations as rows, runs at times of our choice, and what must hold."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from penstock.billing.model import (
    CLEARING,
    PROMOTIONS,
    REVENUE,
    US_PER_HOUR,
    Account,
    Accrued,
    Kind,
    Transfer,
    rated,
)
from penstock.billing.service.accrue import Accrue
from penstock.billing.store import accrual, ledger
from penstock.compute.settlement import Settlement
from penstock.fleet.store import links
from penstock.fleet.store.links import Beat, UnitRow
from penstock.kit.db import Database, Tx
from penstock.kit.ids import new_id

#: When tests begin.
T0: Final = datetime(2026, 1, 5, 10, tzinfo=UTC)
MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
PRICE: Final = 3_490_000

_ALLOCATION: Final = """
    insert into compute.allocations (id, project_id, organisation_id, purpose, key_id, sku, gpus, image, labels, env,
        command, ports, state, reason, unit_id, price_microusd_per_hour, memory_bytes, cpus, processes_max,
        scratch_bytes, wait_s, correlation_id, active_at, billing_ended_at, ended_at, timeline)
    select $1, $2, $3, $4, $5, name, 1, 'python:3', '{}', '{}', '[]', '{}', 'active', '', $1,
        coalesce($6, price_microusd_per_gpu_hour), 0, 1, 1, 0, 0, '', $7, $8, $8, '[]'
    from compute.skus where name = 'g1.1'
"""
_SERIES: Final = """
    insert into billing.series (id, organisation_id, project_id, resource_kind, resource_id, meter, price_microusd, per)
    values ($1, $2, $3, 'function', 'fn', 'function.ms', $4, $5) on conflict do nothing
"""
_RECORDED: Final = """
    insert into billing.recorded (key, organisation_id, project_id, series_id, meter, quantity, occurred_at,
        recorded_at, state) values ($1, $2, $3, $4, 'function.ms', $5, $6, $6, 'pending')
"""
#: A node with a link, as after its first connection, and nothing on it.
_NODE: Final = """
    with node as (
        insert into fleet.nodes (id, name, state, gpus_approved) values ('nod_off', 'off', 'ready', 8)
        on conflict (id) do nothing
    ), certificate as (
        insert into fleet.certificates (serial, node_id, not_after) values ('off', 'nod_off', 'infinity')
        on conflict (serial) do nothing
    ), link as (
        insert into fleet.links (node_id, link_id, gateway_id, address, serial)
        values ('nod_off', 'lnk_off', 'g', 'a', 'off') on conflict (node_id) do nothing
    )
    delete from fleet.unit_reports where node_id = 'nod_off'
"""
_AGO: Final = """
    update fleet.heartbeats set at = clock_timestamp() - make_interval(secs => $1),
        listed_at = clock_timestamp() - make_interval(secs => $1) where node_id = 'nod_off' returning listed_at
"""
_HEARD: Final = """
    insert into fleet.heartbeats (node_id, at, listed_at) select 'nod_off', heard, heard
    from (select coalesce($1, timestamptz 'infinity') as heard) h
    on conflict (node_id) do update set at = excluded.at, listed_at = excluded.listed_at
"""
#: What each series was charged and how long for, from the usage rows and from the days.
_CHARGED: Final = """
    select s.id, coalesce(u.amount, 0)::bigint as amount, coalesce(u.quantity, 0)::bigint as quantity,
        coalesce(d.amount, 0)::bigint as daily_amount, coalesce(d.quantity, 0)::bigint as daily_quantity
    from unnest($1::text[]) s (id)
    left join lateral (select sum(amount_microusd) as amount, sum(quantity) as quantity
        from billing.usage where series_id = s.id) u on true
    left join lateral (select sum(amount_microusd) as amount, sum(quantity) as quantity
        from billing.daily where series_id = s.id) d on true
"""
#: Transfers that are not what they should be: of these organisations, or of all.
_UNBALANCED: Final = """
    select t.id from billing.transfers t left join billing.entries e on e.transfer_id = t.id
    where $1::text[] is null or t.organisation_id = any($1)
    group by t.id having coalesce(sum(e.amount_microusd), 0) <> 0 or count(e.seq) < 2
"""
#: Accounts whose balance is not the sum of their entries.
_MISCOUNTED: Final = """
    select a.id from billing.accounts a
    where ($1::text[] is null or a.organisation_id = any($1)) and billing.balance_of(a.id) <> (
        select coalesce(sum(e.amount_microusd), 0) from billing.entries e where e.account_id = a.id)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """An allocation as the model sees it."""

    id: str
    organisation_id: str
    price_microusd: int
    active_at: datetime
    ended_at: datetime | None = None
    #: When its node was last heard of, while the node is silent.
    heard_at: datetime | None = None

    def cost(self, until: datetime) -> int:
        """The closed form: what it must have been charged when everything is charged until then."""
        return rated(self.paid_us(until), price_microusd=self.price_microusd, per=US_PER_HOUR)

    def paid_us(self, until: datetime) -> int:
        """For how long, in microseconds."""
        end = until if self.ended_at is None else min(self.ended_at, until)
        return max((end - self.active_at) // timedelta(microseconds=1), 0)


@dataclass
class Stage:
    """One database with a meter of its own time."""

    db: Database
    window: timedelta = MINUTE
    runs: dict[str, Run] = field(default_factory=dict[str, Run])

    async def begin(self, at: datetime = T0) -> None:
        """Time is charged until here."""
        async with self.db.transaction() as tx:
            await accrual.advance(tx, at)

    async def customer(self, organisation_id: str = "org_a", *, paid: int = 0, granted: int = 0) -> str:
        """An organisation with accounts, and with money in them."""
        async with self.db.transaction() as tx:
            await ledger.open_customer(tx, organisation_id)
        if paid:
            await self.post(Kind.PAYMENT, organisation_id, paid)
        if granted:
            await self.post(Kind.GRANT, organisation_id, granted)
        return organisation_id

    async def post(self, kind: Kind, organisation_id: str, amount: int, *, key: str = "") -> bool:
        """A payment, a refund or a grant."""
        async with self.db.transaction() as tx:
            return await ledger.post(tx, transfer(kind, organisation_id, amount, key=key))

    async def start(
        self,
        at: datetime,
        *,
        org: str = "org_a",
        price: int | None = None,
        end: datetime | None = None,
        purpose: str = "interactive",
        tx: Tx | None = None,
    ) -> Run:
        """An allocation that became active then; at the list's price unless told."""
        if tx is None:
            async with self.db.transaction() as own:
                return await self.start(at, org=org, price=price, end=end, purpose=purpose, tx=own)
        allocation_id = new_id("alc")
        await tx.execute(_ALLOCATION, allocation_id, f"prj_{org}", org, purpose, None, price, at, end)
        paid = await tx.fetchval("select price_microusd_per_hour from compute.allocations where id = $1", allocation_id)
        self.runs[allocation_id] = Run(allocation_id, org, paid, at, end)
        return self.runs[allocation_id]

    async def end(self, run: Run, at: datetime, *, state: str = "released", tx: Tx | None = None) -> Run:
        """Its end, as compute notes it."""
        if tx is None:
            async with self.db.transaction() as own:
                return await self.end(run, at, state=state, tx=own)
        await tx.execute(
            "update compute.allocations set state = $2, billing_ended_at = $3, ended_at = $3 where id = $1",
            run.id,
            state,
            at,
        )
        self.runs[run.id] = replace(run, ended_at=at)
        return self.runs[run.id]

    async def off(self, runs: Sequence[Run], seconds: float, *, survives: bool) -> dict[str, timedelta]:
        """All of the cloud is off for so long, together with the node that these run on; then the node comes back, with
        its units or without. For each that ended, how long after the node was last heard of the fleet says it did."""
        async with self.db.transaction() as tx:
            await tx.execute(_NODE)
            units = [UnitRow("nod_off", run.id, "running", None, "") for run in runs]
            key = [Beat(node_id="nod_off", link_id="lnk_off")]
            await links.beat(tx, key, listed=True)
            await links.replace_units(tx, ["nod_off"], units)
            heard_at = await tx.fetchval(_AGO, seconds)
            # So a node comes back: a sign of life, and its list with the next heartbeat.
            await links.beat(tx, key, listed=False)
            await links.beat(tx, key, listed=True)
            await links.replace_units(tx, ["nod_off"], units if survives else [])
            ends = await tx.fetch("select unit_id, ran_until from fleet.unit_ends where node_id = 'nod_off'")
        return {row["unit_id"]: row["ran_until"] - heard_at for row in ends}

    async def hear(self, runs: Sequence[Run], at: datetime | None) -> list[Run]:
        """Their node named them last at this time and has been silent since; at none, it is back with its units."""
        async with self.db.transaction() as tx:
            await tx.execute(_NODE)
            await tx.execute(_HEARD, at)
            await tx.execute(
                "update compute.allocations set node_id = 'nod_off' where id = any($1)", [run.id for run in runs]
            )
        self.runs |= {run.id: replace(run, heard_at=at) for run in runs}
        return [self.runs[run.id] for run in runs]

    async def record(
        self, quantity: int, at: datetime, *, org: str = "org_a", price: int, per: int, resource: str = "fn"
    ) -> str:
        """Usage that another domain metered, as it is taken in; the series."""
        series_id = f"{org}/{resource}/{price}/{per}"
        async with self.db.transaction() as tx:
            await tx.execute(_SERIES, series_id, org, f"prj_{org}", price, per)
            await tx.execute(_RECORDED, new_id("use"), org, f"prj_{org}", series_id, quantity, at)
        return series_id

    async def accrue(self, now: datetime, *, window: timedelta | None = None) -> Accrued | None:
        """A run at this time."""
        async with self.db.transaction() as tx:
            return await turn(tx, now, window or self.window)

    async def catch_up(self, now: datetime) -> list[Accrued]:
        """Runs until nothing is left to charge."""
        done: list[Accrued] = []
        while (accrued := await self.accrue(now)) is not None:
            done.append(accrued)
        return done

    async def charged(self, *series: str) -> int:
        """The sum of the usage rows; the days must say the same."""
        rows = await self.sums(series)
        assert all(row["amount"] == row["daily_amount"] and row["quantity"] == row["daily_quantity"] for row in rows)
        return sum(row["amount"] for row in rows)

    async def sums(self, series: Sequence[str]) -> list[Any]:
        """What was charged by series."""
        return await self.rows(_CHARGED, list(series))

    async def balance(self, organisation_id: str = "org_a", account: Account = Account.BALANCE) -> int:
        """An account's balance."""
        async with self.db.read() as conn:
            return await ledger.balance(conn, account.of(organisation_id))

    async def rows(self, query: str, *args: object) -> list[Any]:
        """Rows as they are."""
        async with self.db.read() as conn:
            return await conn.fetch(query, *args)

    async def value(self, query: str, *args: object) -> Any:
        """One value."""
        async with self.db.read() as conn:
            return await conn.fetchval(query, *args)

    async def holds(self, until: datetime) -> None:
        """Every allocation is charged exactly what it should be, every transfer sums to zero, and balances are sums."""
        rows = {row["id"]: row for row in await self.sums(list(self.runs))}
        for run in self.runs.values():
            row = rows[run.id]
            assert (row["amount"], row["quantity"]) == (run.cost(until), run.paid_us(until)), run
            assert (row["daily_amount"], row["daily_quantity"]) == (row["amount"], row["quantity"]), run
        assert await self.rows(_UNBALANCED, None) == []
        assert await self.rows(_MISCOUNTED, None) == []


async def turn(tx: Tx, now: datetime, window: timedelta) -> Accrued | None:
    """One run of a biller whose clock says `now`; none when another has the turn."""
    progress = await accrual.lock_progress(tx)
    return progress and await Accrue(Settlement(), window).until(tx, progress.accrued_until, now)


def transfer(kind: Kind, organisation_id: str, amount: int, *, key: str = "", corrects: str | None = None) -> Transfer:
    """Money that comes to an organisation; a refund's goes."""
    account = Account.CREDIT if kind is Kind.GRANT else Account.BALANCE
    source = {Kind.GRANT: PROMOTIONS, Kind.CORRECTION: REVENUE}.get(kind, CLEARING)
    signed = -amount if kind is Kind.REFUND else amount
    return Transfer(
        id=key or f"{kind}/{new_id('tst')}",
        kind=kind,
        organisation_id=organisation_id,
        entries={account.of(organisation_id): signed, source: -signed},
        corrects=corrects,
    )


async def unbalanced(stage: Stage, organisations: Sequence[str]) -> list[Any]:
    """Transfers of these that do not sum to zero, and accounts whose balance is not their sum."""
    return [*await stage.rows(_UNBALANCED, list(organisations)), *await stage.rows(_MISCOUNTED, list(organisations))]
