"""Watches budgets: what is told once in each period, and what has to go before it would overspend.

Looking changes nothing, so any number of billers look as often as they like; what they find is judged again under the
budgets' locks, and marked there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from penstock.billing.budgetmodel import EXHAUSTED_FACT, WARNING_FACT, Budget, BudgetTerms, budget_payload, refusal
from penstock.billing.service import releases
from penstock.billing.service.tranches import BATCH, Budgets
from penstock.billing.store import accrual, verdicts
from penstock.billing.store import budgets as store
from penstock.billing.store.verdicts import Verdict
from penstock.kit import audit, outbox
from penstock.kit.db import Database, Tx
from penstock.kit.ids import new_id
from penstock.kit.outbox import Event
from penstock.kit.telemetry import correlated

_ACTOR: Final = audit.system("biller")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MOMENT: Final = timedelta(microseconds=1)
_BATCHES_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class BudgetWatch:
    """The biller's part of budgets."""

    db: Database
    terms: BudgetTerms = field(default_factory=BudgetTerms)

    async def sweep(self) -> None:
        """Take back leases that are over."""
        for _ in range(_BATCHES_MAX):
            async with self.db.transaction() as tx:
                if await Budgets(self.terms).expire(tx) < BATCH:
                    return

    async def prune(self) -> None:
        """Forget what nobody asks for any more, unless the meter is running just now."""
        async with self.db.transaction() as tx:
            if await accrual.lock_progress(tx):
                await store.prune(tx)

    async def evaluate(self, at: datetime | None = None) -> None:
        """Look at all budgets: in the period that runs, and in that of the time that was charged last."""
        async with self.db.read() as conn:
            now, charged = await verdicts.clock(conn)
        now = at or now
        await self._look(now, current=True)
        if charged <= now:
            await self._look(charged - _MOMENT, current=False)

    async def _look(self, at: datetime, *, current: bool) -> None:
        foreseen = self._foreseen(at)
        async with self.db.read() as conn:
            found = await verdicts.judge(conn, at=at, foreseen=foreseen, budget_ids=None, current=current)
        for batch in _batches([verdict.budget.id for verdict in found]):
            with correlated(new_id("cor")):
                async with self.db.transaction() as tx:
                    await verdicts.lock(tx, batch)
                    due = await verdicts.judge(tx, at=at, foreseen=foreseen, budget_ids=batch, current=current)
                    await _act(tx, due, at)

    def _foreseen(self, at: datetime) -> datetime:
        """Until when time is counted as spent. It moves in steps, so that not every look has something to write."""
        lead = timedelta(seconds=self.terms.release_lead_s)
        step = max(lead / 4, timedelta(seconds=1))
        return at + step - (at - _EPOCH) % step + lead


def _batches(budget_ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(budget_ids), BATCH):
        yield list(budget_ids[start : start + BATCH])


def _once_for_each_subject(due: Sequence[Verdict]) -> Iterator[Verdict]:
    """Budgets of several periods may end at once: one request is enough for what runs under them."""
    asked: set[tuple[str, str | None]] = set()
    for verdict in due:
        subject = verdict.budget.project_id, verdict.budget.key_id
        yield replace(verdict, asks=verdict.asks and subject not in asked)
        if verdict.asks:
            asked.add(subject)


async def _act(tx: Tx, due: Sequence[Verdict], at: datetime) -> None:
    await verdicts.mark(tx, due, at)
    telling = [verdict for verdict in _once_for_each_subject(due) if verdict.facts]
    if not telling:
        return
    first = await verdicts.number(tx, {verdict.budget.id: verdict.facts for verdict in telling})
    events: list[Event] = []
    for verdict in telling:
        budget, version = verdict.budget, first[verdict.budget.id]
        told = [WARNING_FACT] * verdict.warns + [EXHAUSTED_FACT] * verdict.exhausts
        events += [_fact(budget, fact, version + number) for number, fact in enumerate(told)]
        if verdict.asks:
            events.append(await _ask_for_release(tx, verdict, version + len(told)))
    await outbox.append(tx, *events)


def _fact(budget: Budget, fact: str, version: int) -> Event:
    return Event(
        type=fact,
        aggregate_id=budget.id,
        version=version,
        organisation_id=budget.organisation_id,
        project_id=budget.project_id,
        payload=budget_payload(budget),
    )


async def _ask_for_release(tx: Tx, verdict: Verdict, version: int) -> Event:
    budget = replace(verdict.budget, held_microusd=verdict.held_microusd)
    asked = await releases.request(
        tx,
        organisation_id=budget.organisation_id,
        project_id=budget.project_id,
        key_id=budget.key_id,
        reason=refusal(budget),
        aggregate_id=budget.id,
        version=version,
    )
    await audit.record(
        tx,
        _ACTOR,
        "billing.force_release",
        budget.id,
        organisation_id=budget.organisation_id,
        project_id=budget.project_id,
    )
    return asked
