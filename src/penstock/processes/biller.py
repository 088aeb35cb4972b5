"""The biller: usage windows → ledger; balance states; what payment providers tell. Composition root.

Any number of replicas may run. Postgres is the only thing that it cannot do without.
"""

import asyncio
import os
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Final

from msgspec import Meta

from penstock.billing import metrics
from penstock.billing.budgetmodel import BudgetTerms
from penstock.billing.model import Terms
from penstock.billing.providers import settings as payment_settings
from penstock.billing.providers.port import Provider
from penstock.billing.providers.settings import PaymentSettings
from penstock.billing.service import checkpoints
from penstock.billing.service.accrue import Accrue
from penstock.billing.service.metering import Metering
from penstock.billing.service.overspending import BudgetWatch
from penstock.billing.service.payments import Payments
from penstock.billing.service.standing import Standings
from penstock.compute.settlement import Settlement
from penstock.kit import bus, db, process, settings
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.process import every, woken
from penstock.kit.telemetry import logger, span
from penstock.wire import subjects

_log = logger(__name__)
#: A run over a million allocations is one statement.
_COMMAND_S: Final = 600.0


class Settings(PaymentSettings, frozen=True, kw_only=True):
    """What the biller needs to know."""

    database_url: str
    nats_url: str
    window_seconds: Annotated[int, Meta(ge=1, le=3600)] = 60
    low_balance_microusd: Annotated[int, Meta(ge=0, le=10**15)] = 5_000_000
    release_within_s: Annotated[float, Meta(ge=0, le=7 * 86_400)] = 300
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9105

    @property
    def terms(self) -> Terms:
        """When a balance is low, and when release is near."""
        return Terms(low_balance_microusd=self.low_balance_microusd, release_within_s=self.release_within_s)

    @property
    def budget_terms(self) -> BudgetTerms:
        """A budget's end is seen two windows ahead, and half a minute."""
        return BudgetTerms(release_lead_s=2 * self.window_seconds + 30)


@dataclass(frozen=True, slots=True)
class Meter:
    """Charges what is due, and looks at the balances after it."""

    db: Database
    metering: Metering
    accrue: Accrue
    standings: Standings

    async def run(self) -> None:
        """Until time is charged as far as it has passed. Facts are charged with the window in which they are taken in:
        they may come last, where they hold nothing up."""
        charged = await self._step()
        if charged:
            await self.standings.sweep()
        await self.metering.sweep()

    async def _step(self) -> bool:
        charged = False
        while True:
            started = time.perf_counter()
            with span("biller.accrue"):
                run = await self.accrue(self.db)
            if run is None:
                return charged
            charged = True
            metrics.ACCRUAL_S.observe(time.perf_counter() - started)
            metrics.CHARGED.inc(run.amount_microusd)
            metrics.WINDOWS.inc(run.windows)
            _log.info("accrued", until=run.until.isoformat(), windows=run.windows, transfers=run.transfers)
            if not run.behind:
                return charged


async def body(stack: AsyncExitStack, settings: Settings) -> None:
    """Run until cancelled."""
    nats_bus = await stack.enter_async_context(bus.connect(settings.nats_url, name="biller"))
    database = await stack.enter_async_context(
        db.connect(settings.database_url, nats_bus.hint, name="biller", command_timeout_s=_COMMAND_S)
    )
    await process.serve_ops(stack, settings.ops_port)
    await checkpoints.arrive(database)
    standings = Standings(database, settings.terms)
    accrue = Accrue(Settlement(), timedelta(seconds=settings.window_seconds))
    async with asyncio.TaskGroup() as group:
        group.create_task(every(1.0, Meter(database, Metering(database), accrue, standings).run, name="accrue"))
        group.create_task(every(5.0, lambda: accrue.watch(database), name="accrual_lag"))
        group.create_task(every(10.0, lambda: checkpoints.take(database), name="checkpoints"))
        _start_balances(group, nats_bus, standings)
        _start_budgets(group, BudgetWatch(database, settings.budget_terms))
        _start_payments(group, nats_bus, Payments(database, _provider(stack, settings), settings.payment_terms))


def _start_balances(group: asyncio.TaskGroup, nats_bus: Bus, standings: Standings) -> None:
    look = woken(nats_bus, [subjects.BILLING], standings.sweep, every_s=60.0, name="balances", pause_s=0.1)
    group.create_task(look)
    group.create_task(every(2.0, standings.sweep_burning, name="burning_balances"))


def _start_budgets(group: asyncio.TaskGroup, watch: BudgetWatch) -> None:
    group.create_task(every(2.0, watch.evaluate, name="budgets"))
    group.create_task(every(5.0, watch.sweep, name="expired_leases"))
    group.create_task(every(3600.0, watch.prune, name="old_budget_periods"))


def _start_payments(group: asyncio.TaskGroup, nats_bus: Bus, payments: Payments) -> None:
    for name, work in (("provider_events", payments.sweep_events), ("refunds", payments.sweep_refunds)):
        group.create_task(woken(nats_bus, [subjects.BILLING], work, every_s=2.0, name=name, queue=name, pause_s=0.02))


def _provider(stack: AsyncExitStack, settings: Settings) -> Provider | None:
    provider = payment_settings.make(settings)
    if provider is not None:
        stack.push_async_callback(provider.close)
    return provider


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "biller", os.environ)
    process.main(
        "biller",
        lambda stack: body(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )
