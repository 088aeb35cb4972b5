"""The agent: one GPU host as a node. It dials out, runs units in sandboxes, and never listens but for its own health.

Units survive the agent: it takes them up again when it comes back. Only with `keep_units_on_stop` off does a clean stop
end them first.
"""

import asyncio
import ctypes
import fcntl
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Final

import aiohttp
import msgspec
import structlog
from msgspec import Meta
from prometheus_client import Counter, Gauge

from penstock.kit import process, settings
from penstock.kit.errors import Conflict, Invalid, Unauthenticated, Unavailable
from penstock.kit.full import is_full
from penstock.kit.telemetry import logger
from penstock.node import cgroups, handlers, identity, layout, renewal, runtimes, sandbox
from penstock.node.builder import Budget, Builder, shown
from penstock.node.codes import Codes, FromGateway
from penstock.node.environments import Environments
from penstock.node.health import Health, Monitor, Thresholds, open_health
from penstock.node.identity import Identity
from penstock.node.installer import Installer, find_installer, source_of
from penstock.node.inventory import Inventory, open_inventory, require_gpus
from penstock.node.journal import Journal, Unwritten
from penstock.node.link import Link, Outbox
from penstock.node.logs import Forwarder
from penstock.node.pace import Crowd
from penstock.node.resolver import Resolver
from penstock.node.room import wait_for_room
from penstock.node.secrets import Secrets
from penstock.node.serverclock import ServerClock
from penstock.node.serving import Workers
from penstock.node.sidecarlink import SidecarLink
from penstock.node.tasks import Executor, Verifier
from penstock.node.tunnel import NodeTunnel
from penstock.node.units import Units

_log = logger(__name__)
_PR_SET_CHILD_SUBREAPER: Final = 36
_REAP_S: Final = 1.0
_RUNBOOK: Final = "docs/runbooks/full-disk.md"
_units = Gauge("penstock_node_units", "Units on this node, in whatever state.")
_stages = Counter("penstock_node_unit_stages_total", "Steps of unit starts that were reached.", ("stage",))


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent needs to know. `runtimes` maps image names to environments; `tenant_dir` is `python:3`. `preload`
    maps image names to modules that stock of that image has imported."""

    data_dir: str
    api_url: str = ""
    link_url: str = ""
    enrolment_token: str = ""
    node_name: str = "local"
    tenant_dir: str = ""
    runtimes: dict[str, str] = {}
    preload: dict[str, list[str]] = {}
    #: Where there is no NVIDIA driver. With 0 such a host is refused.
    simulated_gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    #: How GPUs are given out, by index or for all (`*`): `whole`, `mig:PROFILE[,PROFILE…]`, `mps:N`.
    gpu_layout: dict[str, str] | str = {}
    #: Where a GPU counts as degraded; 0 stands for its own limit.
    gpu_temperature_max_c: Annotated[int, Meta(ge=0, le=200)] = 0
    gpu_power_max_w: Annotated[float, Meta(ge=0, le=100_000)] = 0.0
    #: In an hour.
    gpu_corrected_errors_max: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 1000
    #: So many good readings in a row make a degraded GPU healthy again.
    gpu_well_readings: Annotated[int, Meta(ge=1, le=1000)] = 3
    gpu_readings_every_s: Annotated[float, Meta(ge=0.1, le=300)] = 5.0
    #: Where packages of tenants' environments come from; by default as uv's own configuration has it. With `none` as
    #: the index only `package_find_links`, separated by commas, are left.
    package_index_url: str = ""
    package_find_links: str = ""
    #: One environment, and all of them.
    runtime_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 44)] = 32 << 30
    runtimes_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] = 256 << 30
    runtime_build_s: Annotated[float, Meta(gt=0, le=3600)] = 540
    production: bool = False
    keep_units_on_stop: bool = True
    stop_grace_s: Annotated[float, Meta(ge=0, le=300)] = 5.0
    uid_first: Annotated[int, Meta(ge=1000, le=4_000_000_000)] = 200_000
    uid_count: Annotated[int, Meta(ge=1, le=65536)] = 4096
    #: Where the sidecar listens; without one the node serves no functions. As root it must have a user of its own, and
    #: its group is that number too unless given.
    sidecar_socket: str = ""
    sidecar_uid: Annotated[int, Meta(ge=0, le=4_000_000_000)] = 0
    sidecar_gid: Annotated[int, Meta(ge=0, le=4_000_000_000)] = 0
    #: All archives of functions' code.
    codes_bytes_max: Annotated[int, Meta(ge=1 << 20, le=1 << 44)] = 2 << 30
    otlp_endpoint: str = ""
    log_level: str = "info"
    log_format: str = "json"
    ops_port: int = 9106


async def body(stack: AsyncExitStack, settings: Settings) -> None:
    """Run until cancelled."""
    layouts = layout.parse(settings.gpu_layout)
    folder = own_folder(stack, Path(settings.data_dir).absolute())
    await wait_for_room(folder)
    try:
        await _start(stack, settings, layouts, folder)
    except Unwritten as error:
        raise Unavailable(f"{error.detail}; `{_RUNBOOK}` says what to do", field="agent.data_dir") from error
    except OSError as error:
        if not is_full(error):
            raise
        raise Unavailable(f"the disk of {folder} is full: {error}", field="agent.data_dir") from error


async def _start(stack: AsyncExitStack, settings: Settings, layouts: layout.Layouts, folder: Path) -> None:
    _become_subreaper()
    who = await identify(settings, folder)
    structlog.contextvars.bind_contextvars(node_id=who.node_id)
    journal = Journal(folder / "journal.db")
    stack.callback(journal.close)
    inventory = await _look_for_gpus(settings, layouts, who, journal, folder)
    logs = Forwarder()

    def kill(unit_id: str, reason: str) -> None:
        units.kill(unit_id, reason)

    def tell() -> None:
        units.changed.set()

    sidecar = _open_sidecar(stack, settings, kill, tell)
    codes = Codes(folder / "codes", FromGateway(who).fetch, bytes_max=settings.codes_bytes_max)
    stack.push_async_callback(codes.close)
    workers = Workers(folder / "units", sidecar=sidecar, codes=codes)
    units, builder, resolver = await _open_units(stack, settings, folder, journal, inventory, logs, workers)
    health = await _open_health(stack, settings, inventory, units)
    await units.recover()
    await process.serve_ops(stack, settings.ops_port)
    clock, outbox, secrets = ServerClock(), Outbox(), Secrets()
    executor = Executor(
        verifier=Verifier(who.node_id, lambda: who.task_keys),
        journal=journal,
        clock=clock,
        handlers=handlers.catalogue(units, inventory, health, builder, resolver, folder),
        on_result=outbox.put,
        secrets=secrets.values,
        on_begin=workers.expect,
    )
    stack.push_async_callback(executor.close)
    await executor.resume()
    link = Link(
        identity=who,
        clock=clock,
        journal=journal,
        units=units,
        inventory=inventory,
        logs=logs,
        outbox=outbox,
        submit=executor.submit,
        version=version("penstock"),
        production=settings.production,
        serves_functions=lambda: sidecar is not None and sidecar.serves_functions,
        health=health,
        secrets=secrets,
        crowd=Crowd.kept_in(folder / "crowd.json"),
        trouble=lambda: journal.trouble,
    )
    await _run(who, clock, link, units, journal, sidecar)


async def _run(
    who: Identity, clock: ServerClock, link: Link, units: Units, journal: Journal, sidecar: SidecarLink | None
) -> None:
    """Everything that goes on until the agent ends."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        tasks.create_task(NodeTunnel(who, units, link.crowd).run())
        tasks.create_task(renewal.keep(who, clock, link))
        if sidecar is not None:
            tasks.create_task(sidecar.run())
        tasks.create_task(process.every(_REAP_S, lambda: _look_after(units, journal), name="reap"))


def own_folder(stack: AsyncExitStack, folder: Path) -> Path:
    """The data folder, for this agent alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = stack.enter_context((folder / "agent.lock").open("w"))
    except OSError as error:
        raise Invalid(f"cannot use the data folder {folder}: {error.strerror}", field="agent.data_dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(f"another agent runs on {folder}", field="agent.data_dir") from error
    return folder


def _become_subreaper() -> None:
    """What loses its parent below us becomes our child, so that it is reaped and cannot hide."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


async def identify(settings: Settings, folder: Path) -> Identity:
    """The identity that is kept, or a new one by a token that was not used before."""
    await asyncio.to_thread(require_gpus, settings.simulated_gpus)
    kept = identity.load(folder)
    token = settings.enrolment_token
    if token and not (kept and kept.came_from(token)):
        try:
            kept = await identity.enrol(folder, api_url=settings.api_url, token=token, node_name=settings.node_name)
        except Unauthenticated as error:
            if not identity.usable(kept):
                raise
            _log.warning("token_refused", detail=error.detail, note="going on with the identity that is kept")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Invalid(f"cannot reach {settings.api_url} to enrol: {error}", field="api_url") from error
    if kept is None:
        raise Invalid(
            "this host is not a node yet: give it the token of `penstock node enroll`",
            field="agent.enrolment_token",
        )
    if settings.link_url:
        kept.move(settings.link_url)
    return kept


async def _look_for_gpus(
    settings: Settings, layouts: layout.Layouts, who: Identity, journal: Journal, folder: Path
) -> Inventory:
    """The GPUs as they are to be given out; what units hold stays as it is."""
    return await asyncio.to_thread(
        open_inventory,
        who.node_id,
        settings.simulated_gpus,
        production=settings.production,
        layouts=layouts,
        held={uuid for record in await journal.units() for uuid in record.gpu_uuids},
        folder=folder / "work" / "mps",
    )


def _open_sidecar(
    stack: AsyncExitStack, settings: Settings, on_kill: Callable[[str, str], None], on_reach: Callable[[], None]
) -> SidecarLink | None:
    """The way to the sidecar, if there is to be one. Without a uid it is one of our own user."""
    if not settings.sidecar_socket:
        return None
    uid = settings.sidecar_uid or None
    if os.geteuid() != 0 and uid not in (None, os.geteuid()):
        raise Invalid("only an agent of root's can have a sidecar of another user", field="agent.sidecar_uid")
    if os.geteuid() == 0 and uid is None and settings.production:
        raise Invalid("as root, the sidecar of a production node has a user of its own", field="agent.sidecar_uid")
    if uid is not None and settings.uid_first <= uid <= settings.uid_first + settings.uid_count:
        raise Invalid("the sidecar's user must be none of the units'", field="agent.sidecar_uid")
    link = SidecarLink(Path(settings.sidecar_socket), uid=uid, on_kill=on_kill, on_reach=on_reach)
    stack.callback(link.close)
    return link


async def _open_units(
    stack: AsyncExitStack,
    settings: Settings,
    folder: Path,
    journal: Journal,
    inventory: Inventory,
    logs: Forwarder,
    workers: Workers,
) -> tuple[Units, Builder, Resolver]:
    units_folder = folder / "units"
    units_folder.mkdir(exist_ok=True)
    units_folder.chmod(0o711)
    built = Environments(folder / "runtimes", bytes_max=settings.runtimes_bytes_max)
    await asyncio.to_thread(built.clear)
    images = await asyncio.to_thread(
        runtimes.prepare, _images(settings), folder / "work", settings.preload, built=built
    )
    uv = find_installer()
    source = source_of(os.environ, index_url=settings.package_index_url, find_links=settings.package_find_links)
    uids = range(settings.uid_first, settings.uid_first + settings.uid_count) if os.geteuid() == 0 else None
    driver = await asyncio.to_thread(
        sandbox.open_driver,
        folder / "work",
        units_folder,
        images,
        uid=uids[0] if uids else None,
        production=settings.production,
        shown=shown(built, uv, source),
    )
    stack.callback(driver.close)
    units = Units(
        folder=units_folder,
        journal=journal,
        driver=driver,
        runtimes=images,
        inventory=inventory,
        groups=cgroups.find(),
        logs=logs,
        uids=uids,
        workers=workers,
        sidecar_gid=settings.sidecar_gid or settings.sidecar_uid or None,
        on_stage=lambda stage: _stages.labels(stage).inc(),
    )
    stack.push_async_callback(units.close)
    if not settings.keep_units_on_stop:
        stack.push_async_callback(units.stop_all, settings.stop_grace_s)
    _units.set_function(lambda: len(units.reports()))
    built.in_use = units.runtimes_in_use
    # The installer's user is nobody else's: units have those before it.
    installer = Installer(uv=uv, driver=driver, source=source, uid=uids.stop if uids else None)
    budget = Budget(seconds=settings.runtime_build_s, bytes_max=settings.runtime_bytes_max)
    builder = Builder(images=images, environments=built, installer=installer, budget=budget)
    stack.push_async_callback(builder.close)
    return units, builder, Resolver(images=images, environments=built, installer=installer)


async def _open_health(stack: AsyncExitStack, settings: Settings, inventory: Inventory, units: Units) -> Health:
    """The watch over the GPUs. What changes is told with a heartbeat at once."""
    loop = asyncio.get_running_loop()
    limits = Thresholds(
        temperature_max_c=settings.gpu_temperature_max_c,
        power_max_w=settings.gpu_power_max_w,
        corrected_errors_max=settings.gpu_corrected_errors_max,
        well_readings=settings.gpu_well_readings,
    )

    def told() -> None:
        loop.call_soon_threadsafe(units.changed.set)

    opened = open_health(inventory, limits, every_s=settings.gpu_readings_every_s, on_change=told)
    if isinstance(opened, Monitor):
        await asyncio.to_thread(opened.start)
        stack.callback(opened.close)
    return opened


def _images(settings: Settings) -> dict[str, str]:
    """The environment that `make install` puts beside our own is what `python:3` means by default."""
    tenant = settings.tenant_dir or str(Path(sys.prefix).parent / ".tenant")
    return {"python:3": tenant, **settings.runtimes}


async def _look_after(units: Units, journal: Journal) -> None:
    units.reap()
    await journal.settle()


def main() -> None:
    """Run the process."""
    loaded = settings.load(Settings, "agent", os.environ)
    process.main(
        "agent",
        lambda stack: body(stack, loaded),
        level=loaded.log_level,
        log_format=loaded.log_format,
        otlp_endpoint=loaded.otlp_endpoint,
    )


if __name__ == "__main__":
    main()
