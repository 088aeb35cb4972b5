"""The activator: turns queued invocations into work for workers, owns the pool of workers, commits results.

Any number of replicas may run: whatever must happen once is decided by a row. NATS may be away or lose its store at any
time; streams and consumers are made again within seconds, and sweeps find what its messages would have said.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from penstock.billing.model import Terms
from penstock.billing.service.funds import Funds
from penstock.compute.model import Limits as ComputeLimits
from penstock.compute.service.create import Create
from penstock.compute.service.release import Release
from penstock.compute.units import Units
from penstock.fleet.pki import TaskSigner
from penstock.fleet.tasks import Tasks
from penstock.flows.handoffs import Handoffs
from penstock.flows.objects import ObjectBytes, ObjectSettings, open_objects
from penstock.flows.workers import Workers
from penstock.kit import bus, db, process, settings
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.process import every, woken
from penstock.kit.pull import InProgress, Pull
from penstock.kit.streamguard import StreamGuard
from penstock.secrets.keyring import Keyring
from penstock.secrets.service import Secrets
from penstock.serverless import queue, streams
from penstock.serverless.callout import Callout
from penstock.serverless.model import Limits, Worker
from penstock.serverless.service import burying
from penstock.serverless.service.calls import Calls
from penstock.serverless.service.consuming import BATCH_MAX, Consumer, Take
from penstock.serverless.service.dispatching import Dispatcher
from penstock.serverless.service.ingress import Ingress
from penstock.serverless.service.invoke import Invoker
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.reports import Reports
from penstock.serverless.service.results import Results
from penstock.serverless.service.sayings import Sayings
from penstock.serverless.service.scaling import Made, Scaler
from penstock.serverless.service.telling import Teller
from penstock.serverless.service.wardens import Warden
from penstock.wire import subjects

_SWEEP_S: Final = 1.0
_STREAMS_S: Final = 2.0
_PROBE_S: Final = 5.0
_MEASURE_S: Final = 10.0
_PARKED_S: Final = 0.5


class Settings(ObjectSettings, frozen=True, kw_only=True):
    """What the activator needs to know. `nats_issuer_seed_file` holds the key that sidecars' identities are signed
    with; without it none can connect through this process."""

    database_url: str
    nats_url: str
    pki_dir: str
    secrets_dir: str
    nats_issuer_seed_file: str = ""
    database_connections_max: Annotated[int, Meta(ge=4, le=200)] = 10
    handoff_s: Annotated[float, Meta(gt=0, le=3600)] = 30
    funds_minimum_s: Annotated[float, Meta(ge=0, le=30 * 86_400)] = 600
    gpus_max_default: Annotated[int, Meta(ge=0, le=1_000_000)] = 64
    #: A worker that is not heard of for so long is lost; its sidecar reports every few seconds.
    lease_s: Annotated[float, Meta(ge=1, le=3600)] = 15
    waiting_max_per_project: Annotated[int, Meta(ge=1, le=100_000_000)] = 200_000
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9108

    @property
    def limits(self) -> Limits:
        """The bounds of functions."""
        return Limits(lease_s=self.lease_s, waiting_max_per_project=self.waiting_max_per_project)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loops are made of."""

    dispatcher: Dispatcher
    scaler: Scaler
    warden: Warden
    ingress: Ingress
    results: Results
    reports: Reports
    sayings: Sayings


def compose(
    database: Database,
    hot: Database,
    nats_bus: Bus,
    keys: Keys,
    teller: Teller,
    pool: Workers,
    limits: Limits,
) -> Parts:
    """All parts, each given what it needs. `hot` is for the few statements that every invocation takes part in."""

    async def welcome(made: Made) -> None:
        await streams.ensure_worker(nats_bus, request=made.request, worker=made.worker, slots=made.slots)

    async def farewell(gone: Worker) -> None:
        await streams.forget_worker(nats_bus, gone.id)

    scaler = Scaler(database, pool, teller, limits, welcome=welcome)
    dispatcher = Dispatcher(hot, teller, scaler)
    warden = Warden(database, nats_bus, pool, teller, dispatcher, scaler, keys, limits, farewell=farewell)
    return Parts(
        dispatcher=dispatcher,
        scaler=scaler,
        warden=warden,
        ingress=Ingress(hot, nats_bus, dispatcher),
        results=Results(hot, nats_bus, teller, dispatcher, lost=warden.end),
        reports=Reports(hot, nats_bus, keys, warden, dispatcher, limits),
        sayings=Sayings(hot, nats_bus),
    )


async def body(stack: AsyncExitStack, settings: Settings) -> None:
    """Run until cancelled."""
    nats_bus = await stack.enter_async_context(bus.connect(settings.nats_url, name="activator"))
    opened = partial(
        db.connect,
        settings.database_url,
        nats_bus.hint,
        connections_max=settings.database_connections_max,
        name="activator",
    )
    database = await stack.enter_async_context(opened())
    hot = await stack.enter_async_context(opened(plan_once=True))
    await process.serve_ops(stack, settings.ops_port, healthy=lambda: nats_bus.client.is_connected)
    keys = Keys(database)
    teller = Teller(nats_bus, keys)
    parts = compose(database, hot, nats_bus, keys, teller, _pool(settings), settings.limits)
    invoker = Invoker(database, nats_bus, ObjectBytes(open_objects(database, settings)), settings.limits)
    await invoker.start()
    calls = Calls(database, nats_bus, invoker, teller, keys)
    if settings.nats_issuer_seed_file:
        seed = await asyncio.to_thread(Path(settings.nats_issuer_seed_file).read_text)
        await Callout(database, nats_bus, seed.strip()).serve()
    process.settle_memory()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(calls.run())
        await _consume(tasks, nats_bus, parts)
        await _watch(tasks, nats_bus, database, parts)


def _pool(settings: Settings) -> Workers:
    limits = ComputeLimits(gpus_max_default=settings.gpus_max_default)
    handoffs = Handoffs(Tasks(TaskSigner.load(Path(settings.pki_dir))), settings.handoff_s)
    funds = Funds(Terms(funds_minimum_s=settings.funds_minimum_s))
    secrets = Secrets(Keyring(Path(settings.secrets_dir)))
    return Workers(Create(funds, secrets, handoffs, limits), Release(limits), Units())


async def _consume(tasks: asyncio.TaskGroup, nats_bus: Bus, parts: Parts) -> None:
    """A loop for each consumer; each takes whatever has come together."""

    async def ensure() -> None:
        await streams.ensure(nats_bus)

    async def loop(stream: str, consumer: str, take: Take) -> None:
        async with (
            InProgress() as progress,
            Pull(nats_bus, stream=stream, consumer=consumer, batch=2 * BATCH_MAX, ensure=ensure) as pull,
        ):
            await every(0, Consumer(nats_bus, pull, progress, take).turn, name=consumer)

    tasks.create_task(loop(streams.WORK, streams.ACTIVATOR, parts.ingress.take))
    tasks.create_task(loop(streams.OUT, streams.RESULTS, parts.results.take))
    tasks.create_task(loop(streams.OUT, streams.METRICS, parts.reports.take))
    tasks.create_task(loop(streams.OUT, streams.OUTPUTS, parts.sayings.take))


async def _watch(tasks: asyncio.TaskGroup, nats_bus: Bus, database: Database, parts: Parts) -> None:
    """The rounds of dispatching, and everything that looks by itself."""
    changed: set[str] = set()

    async def allocation_changed(subject: str, _: bytes) -> None:
        changed.add(subjects.last_token(subject))

    async def look_at_changed() -> None:
        taken = list(changed)
        changed.clear()
        if taken:
            await parts.warden.look_at(taken)

    async def function_changed(_: str, payload: bytes) -> None:
        parts.ingress.forget()
        if payload:
            parts.scaler.look(payload.decode())
            parts.dispatcher.point([payload.decode()])

    async def exhausted(found: streams.Exhausted) -> None:
        await burying.exhausted(nats_bus, found)
        await parts.dispatcher.sweep()

    async def ensure_streams() -> None:
        if nats_bus.client.is_connected:
            await streams.keep(nats_bus, database)

    tasks.create_task(every(_MEASURE_S, lambda: queue.measure(database), name="measure"))
    for config in streams.STREAMS:
        guard = StreamGuard(nats_bus, database, config, ensure_streams)
        tasks.create_task(every(_PROBE_S, guard.probe, name=f"probe {config.name}"))
    await nats_bus.on_hint(subjects.ALL_ALLOCATIONS, allocation_changed)
    await nats_bus.on_hint(subjects.FUNCTIONS, function_changed)
    await streams.on_exhausted(nats_bus, exhausted)
    tasks.create_task(every(_STREAMS_S, ensure_streams, name="streams"))
    tasks.create_task(every(0, parts.dispatcher.run, name="dispatch"))
    tasks.create_task(parts.dispatcher.progress.run())
    tasks.create_task(every(0, parts.scaler.run, name="scale"))
    tasks.create_task(every(_PARKED_S, parts.dispatcher.sweep, name="parked"))
    tasks.create_task(every(_SWEEP_S, parts.scaler.sweep, name="unsettled"))
    tasks.create_task(every(_SWEEP_S, parts.warden.sweep, name="workers"))
    tasks.create_task(every(_SWEEP_S, parts.ingress.publish_again, name="unpublished"))
    tasks.create_task(every(30, parts.warden.look_at_all, name="allocations"))
    tasks.create_task(
        woken(nats_bus, [subjects.ALL_ALLOCATIONS], look_at_changed, every_s=5, name="changed", pause_s=0.02)
    )


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "activator", os.environ)
    process.main(
        "activator",
        lambda stack: body(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )
