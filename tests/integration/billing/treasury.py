"""Budgets and leases for tests: set, leased and looked at at times of our choice."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from penstock.billing.budgetmodel import Action, Budget, BudgetTerms, Lease, Period, Setting
from penstock.billing.service.tranches import Budgets
from penstock.billing.store import budgets as store
from penstock.kit.db import Database
from penstock.kit.ids import new_id

PROJECT: Final = "prj_org_a"
KEY: Final = "key_" + "0" * 26
OTHER_KEY: Final = "key_" + "1" * 26

#: Reject budgets of which more is spent and promised than their limit, in any period. A lease that was seen to be over
#: promises nothing any more.
OVERDRAWN: Final = """
    select b.id, p.settled_microusd, p.reserved_microusd, b.limit_microusd
    from billing.budget_periods p join billing.budgets b on b.id = p.budget_id
    left join billing.spending s on s.budget_id = p.budget_id and s.period_start = p.period_start
    where b.action = 'reject' and b.limit_microusd
        < coalesce(s.spent_microusd, 0) + p.settled_microusd + p.reserved_microusd - coalesce((
            select sum(l.amount_microusd) from billing.lease_parts o join billing.leases l on l.id = o.lease_id
            where o.budget_id = p.budget_id and o.period_start = p.period_start and l.lapsed_at is not null), 0)
"""
#: Periods whose counters are not the sums of the leases under them.
MISCOUNTED: Final = """
    select p.budget_id, p.period_start, p.reserved_microusd, coalesce(l.amount, 0) as leased
    from billing.budget_periods p left join (
        select l.budget_id, l.period_start, sum(l.amount_microusd) as amount
        from billing.lease_parts l group by 1, 2
    ) l using (budget_id, period_start)
    where p.reserved_microusd <> coalesce(l.amount, 0)
"""


@dataclass
class Treasury:
    """The budgets of one database."""

    db: Database
    budgets: Budgets = field(default_factory=lambda: Budgets(BudgetTerms(tranche_min_microusd=10)))

    async def set(
        self,
        limit: int,
        *,
        period: Period = Period.MONTHLY,
        key: str | None = None,
        action: Action = Action.REJECT,
        project: str = PROJECT,
        at: datetime | None = None,
    ) -> str:
        """A budget, made at this time; its id."""
        to = Setting(
            organisation_id="org_a",
            project_id=project,
            key_id=key,
            period=period,
            limit_microusd=limit,
            action=action,
        )
        async with self.db.transaction() as tx:
            if (found := await store.change(tx, to)) is not None:
                return found
            await store.await_meter(tx)
            await store.lock_project(tx, project)
            budget_id = new_id("bdg")
            await store.insert(tx, budget_id, to, at=at)
        return budget_id

    async def lease(
        self,
        amount: int,
        *,
        key: str | None = None,
        ttl_s: float = 60,
        needed: int = 1,
        at: datetime | None = None,
        project: str = PROJECT,
    ) -> Lease | None:
        """One tranche."""
        async with self.db.transaction() as tx:
            return await self.budgets.reserve(
                tx,
                project_id=project,
                key_id=key,
                amount_microusd=amount,
                needed_microusd=needed,
                holder="gateway-1",
                ttl_s=ttl_s,
                at=at,
            )

    async def settle(self, lease: Lease | None, spent: int, *, at: datetime | None = None) -> None:
        """Its end."""
        assert lease is not None
        async with self.db.transaction() as tx:
            await self.budgets.settle(tx, lease.id, spent, at=at)

    async def expire(self, *, at: datetime | None = None) -> int:
        """A sweep."""
        async with self.db.transaction() as tx:
            return await self.budgets.expire(tx, at=at)

    async def delete(self, budget_id: str, *, project: str = PROJECT) -> bool:
        """It applies no more."""
        async with self.db.transaction() as tx:
            return await store.delete(tx, project, budget_id)

    async def look(self, budget_id: str, *, at: datetime | None = None, project: str = PROJECT) -> Budget:
        """As it stands."""
        async with self.db.read() as conn:
            found = await store.find(conn, project, budget_id, at=at)
        assert found is not None
        return found

    async def figures(self, budget_id: str, *, at: datetime | None = None) -> tuple[int, int]:
        """What is spent and reserved."""
        found = await self.look(budget_id, at=at)
        return found.spent_microusd, found.reserved_microusd

    async def rows(self, query: str, *args: object) -> list[Mapping[str, Any]]:
        """Rows as they are."""
        async with self.db.read() as conn:
            return [dict(row) for row in await conn.fetch(query, *args)]

    async def facts(self, budget_id: str) -> list[str]:
        """What was told of it, in order; versions have no gap."""
        rows = await self.rows(
            "select type, version from kit.outbox where aggregate_id = $1 order by version", budget_id
        )
        assert [row["version"] for row in rows] == list(range(1, len(rows) + 1))
        return [row["type"] for row in rows]
