"""The worker: sagas on Temporal, and the loops that keep rows and the world together. Composition root.

Any number of replicas may run. Postgres is the only thing that it cannot do without.
"""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from penstock.compute.model import Deadlines, Limits, Owner
from penstock.compute.references import References
from penstock.compute.service import resolutions, runtimes
from penstock.compute.service.advance import Advance
from penstock.compute.service.release import Release
from penstock.compute.service.stock import StockKeeper
from penstock.compute.service.waiting import Waiting
from penstock.compute.service.watch import Patience, Watch
from penstock.fleet import slots
from penstock.fleet.gpus import Prover
from penstock.fleet.model import Config
from penstock.fleet.pki import TaskSigner
from penstock.fleet.sweeper import Sweeper
from penstock.fleet.tasks import Tasks
from penstock.flows import history, hosting
from penstock.flows.activities import Activities, Timing
from penstock.flows.objects import ObjectBytes
from penstock.flows.outcomes import Outcomes
from penstock.flows.reconcile import NodeKeeper, SagaKeeper
from penstock.flows.releases import Releases
from penstock.flows.resolving import Resolving
from penstock.flows.sagas import Sagas
from penstock.identity.model import PLATFORM_ORGANISATION, PLATFORM_PROJECT
from penstock.kit import bus, db, process, settings
from penstock.kit.bus import Bus
from penstock.kit.db import Database
from penstock.kit.outward import Outward
from penstock.kit.process import every, woken
from penstock.notices.fanout import Fanout
from penstock.notices.model import Patience as WebhookPatience
from penstock.notices.sender import Sender
from penstock.notices.upkeep import Upkeep
from penstock.secrets.keyring import Keyring
from penstock.secrets.upkeep import Pruning
from penstock.secrets.vault import Vault
from penstock.serverless import schemas
from penstock.serverless.model import Limits as FunctionLimits
from penstock.serverless.schemas import Urls
from penstock.serverless.service.callbacks import Callbacks
from penstock.serverless.service.cancel import Cancel
from penstock.serverless.service.proofs import Keys
from penstock.serverless.service.schedules import Schedules
from penstock.serverless.service.telling import Teller
from penstock.serverless.upkeep import Metering as FunctionMetering
from penstock.serverless.upkeep import Upkeep as FunctionUpkeep
from penstock.storage import blobs
from penstock.storage.model import Limits as StorageLimits
from penstock.storage.service import Objects
from penstock.storage.sweeper import Sweeper as ObjectSweeper
from penstock.wire import subjects

_PLATFORM: Final = Owner(project_id=PLATFORM_PROJECT, organisation_id=PLATFORM_ORGANISATION)
_REFILL_PAUSE_S: Final = 0.5


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker needs to know."""

    database_url: str
    nats_url: str
    temporal_address: str
    pki_dir: str
    secrets_dir: str
    objects_url: str
    objects_endpoint: str = ""
    objects_region: str = ""
    objects_access_key_id: str = ""
    objects_secret_access_key: str = ""
    #: Named in what is sent to others.
    api_url: str = "http://127.0.0.1:8080"
    gateway_url: str = "http://127.0.0.1:8081"
    temporal_namespace: str = "default"
    database_connections_max: Annotated[int, Meta(ge=4, le=200)] = 20
    provisioning_deadline_s: Annotated[float, Meta(gt=0, le=86_400)] = 120
    releasing_deadline_s: Annotated[float, Meta(gt=0, le=86_400)] = 900
    #: At most what the saga gives any activity, with room to spare.
    runtime_build_s: Annotated[float, Meta(gt=0, le=1000)] = 600
    unit_start_s: Annotated[float, Meta(gt=0, le=3600)] = 60
    unit_stop_s: Annotated[float, Meta(gt=0, le=1000)] = 600
    heartbeat_s: Annotated[float, Meta(gt=0, le=300)] = 5
    node_lost_after_s: Annotated[float, Meta(gt=0, le=86_400)] = 600
    #: A GPU that failed is probed when it has been reported healthy for so long.
    gpu_settle_s: Annotated[float, Meta(ge=0, le=86_400)] = 600
    saga_idle_s: Annotated[float, Meta(gt=0, le=3600)] = 15
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9103

    @property
    def limits(self) -> Limits:
        """Compute's bounds."""
        deadlines = Deadlines(
            provisioning_s=self.provisioning_deadline_s,
            releasing_s=self.releasing_deadline_s,
            runtime_s=self.runtime_build_s,
        )
        return Limits(deadlines=deadlines)


async def body(stack: AsyncExitStack, settings: Settings) -> None:
    """Run until cancelled."""
    nats_bus = await stack.enter_async_context(bus.connect(settings.nats_url, name="worker"))
    database = await stack.enter_async_context(
        db.connect(
            settings.database_url,
            nats_bus.hint,
            connections_max=settings.database_connections_max,
            name="worker",
        )
    )
    await process.serve_ops(stack, settings.ops_port)
    tasks = Tasks(TaskSigner.load(Path(settings.pki_dir)))
    outcomes, sagas = Outcomes(), Sagas()
    await outcomes.watch(nats_bus)
    await sagas.watch(nats_bus)
    await history.answer(nats_bus, sagas)
    activities = Activities(
        database,
        Advance(slots, settings.limits),
        tasks,
        outcomes,
        Timing(start_s=settings.unit_start_s, stop_s=settings.unit_stop_s, runtime_s=settings.runtime_build_s),
    )
    watch = Watch(database, Patience(idle_s=settings.saga_idle_s))
    async with asyncio.TaskGroup() as group:
        group.create_task(hosting.host(settings.temporal_address, settings.temporal_namespace, sagas, activities.all()))
        _start_object_loops(group, ObjectSweeper(database, blobs.connect(_objects(settings))))
        group.create_task(every(60.0, Pruning(database, References()).sweep, name="prune_secrets"))
        vault, outward = Vault(Keyring(Path(settings.secrets_dir))), Outward()
        stack.callback(outward.close)
        _start_webhooks(group, stack, database, vault, outward)
        _start_functions(group, stack, database, vault, outward, settings)
        cancel = Cancel(database, Teller(nats_bus, Keys(database)))
        group.create_task(every(5.0, cancel.sweep, name="sweep_deleted_functions"))
        group.create_task(Sweeper(database, _fleet_config(settings)).run())
        group.create_task(every(1.0, Prover(database, tasks, _fleet_config(settings)).sweep, name="gpu_proofs"))
        _start_waiting(group, nats_bus, Waiting(database, settings.limits))
        group.create_task(every(600.0, lambda: runtimes.sweep(database), name="sweep_locks"))
        group.create_task(every(600.0, lambda: resolutions.sweep(database), name="sweep_resolutions"))
        resolve = Resolving(database, tasks).sweep
        group.create_task(woken(nats_bus, [subjects.RESOLUTIONS], resolve, every_s=0.5, name="resolve"))
        stock = StockKeeper(database, _PLATFORM, Release(settings.limits), settings.limits)
        _start_stock(group, nats_bus, stock)
        releases = Releases(database, Release(settings.limits)).sweep
        group.create_task(woken(nats_bus, [subjects.RELEASES], releases, every_s=2.0, name="releases"))
        _start_saga_loops(group, SagaKeeper(watch, sagas), watch)
        _start_node_loops(group, NodeKeeper(database, watch, Release(settings.limits), tasks))


def _fleet_config(settings: Settings) -> Config:
    return Config(
        heartbeat_s=settings.heartbeat_s,
        lost_after_s=settings.node_lost_after_s,
        gpu_settle_s=settings.gpu_settle_s,
    )


def _objects(settings: Settings) -> blobs.Access:
    return blobs.Access(
        url=settings.objects_url,
        endpoint=settings.objects_endpoint,
        region=settings.objects_region,
        access_key_id=settings.objects_access_key_id,
        secret_access_key=settings.objects_secret_access_key,
    )


def _start_object_loops(group: asyncio.TaskGroup, sweeper: ObjectSweeper) -> None:
    group.create_task(every(30.0, sweeper.sweep, name="sweep_objects"))
    group.create_task(every(6 * 3600.0, sweeper.sweep_strays, name="sweep_stray_objects"))


def _start_webhooks(
    group: asyncio.TaskGroup, stack: AsyncExitStack, database: Database, vault: Vault, outward: Outward
) -> None:
    patience = WebhookPatience()
    sender = Sender(database, outward, vault, patience)
    stack.push_async_callback(sender.close)
    group.create_task(every(0.5, Fanout(database, patience, sender.wake).spread, name="spread_events"))
    group.create_task(every(0.0, sender.keep, name="send_webhooks"))
    group.create_task(every(60.0, Upkeep(database, patience).sweep, name="sweep_deliveries"))


def _start_functions(
    group: asyncio.TaskGroup,
    stack: AsyncExitStack,
    database: Database,
    vault: Vault,
    outward: Outward,
    settings: Settings,
) -> None:
    """What functions need besides an activator: schedules, callbacks, facts of what was used, retention."""
    urls = Urls(api_url=settings.api_url, gateway_url=settings.gateway_url)
    callbacks = Callbacks(database, outward, vault, lambda shown: schemas.invocation(shown, urls))
    stack.push_async_callback(callbacks.close)
    objects = Objects(database, blobs.connect(_objects(settings)), StorageLimits())
    upkeep = FunctionUpkeep(database, ObjectBytes(objects), FunctionLimits())
    group.create_task(every(0.5, Schedules(database).fire, name="fire_schedules"))
    group.create_task(every(0.5, callbacks.send, name="send_callbacks"))
    group.create_task(every(10.0, FunctionMetering(database).meter, name="meter_functions"))
    group.create_task(every(60.0, upkeep.sweep, name="sweep_invocations"))


def _start_waiting(group: asyncio.TaskGroup, nats_bus: Bus, waiting: Waiting) -> None:
    offer = woken(nats_bus, [subjects.CAPACITY], waiting.place_all, every_s=2.0, name="place_waiting", queue="worker")
    group.create_task(offer)
    group.create_task(every(1.0, waiting.expire, name="expire_requests"))


def _start_stock(group: asyncio.TaskGroup, nats_bus: Bus, keeper: StockKeeper) -> None:
    """Refill when some was handed over or capacity came back. The pause lets the handoff itself go first."""
    keep = woken(
        nats_bus,
        [subjects.STOCK, subjects.CAPACITY],
        keeper.keep,
        every_s=2.0,
        name="keep_stock",
        queue="stock",
        pause_s=_REFILL_PAUSE_S,
    )
    group.create_task(keep)


def _start_saga_loops(group: asyncio.TaskGroup, keeper: SagaKeeper, watch: Watch) -> None:
    group.create_task(every(1.0, keeper.undriven, name="undriven_sagas"))
    group.create_task(every(1.0, keeper.overdue, name="overdue_sagas"))
    group.create_task(every(5.0, watch.count, name="count_allocations"))


def _start_node_loops(group: asyncio.TaskGroup, keeper: NodeKeeper) -> None:
    group.create_task(every(2.0, keeper.lost_nodes, name="lost_nodes"))
    group.create_task(every(2.0, keeper.draining_nodes, name="draining_nodes"))
    group.create_task(every(1.0, keeper.exited_units, name="exited_units"))
    group.create_task(every(1.0, keeper.failed_gpus, name="failed_gpus"))
    group.create_task(every(5.0, keeper.missing_units, name="missing_units"))
    group.create_task(every(5.0, keeper.unheard_ends, name="unheard_ends"))
    group.create_task(every(5.0, keeper.failed_releases, name="failed_releases"))
    group.create_task(every(5.0, keeper.orphan_units, name="orphan_units"))
    group.create_task(every(5.0, keeper.blocked_slots, name="blocked_slots"))


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "worker", os.environ)
    process.main(
        "worker",
        lambda stack: body(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )
