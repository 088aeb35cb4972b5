"""The catalogue of what this node does when asked: one handler per task type of `wire/tasks.py`, each idempotent."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from penstock.node.builder import Builder
from penstock.node.health import Health
from penstock.node.inventory import Inventory
from penstock.node.resolver import Resolver
from penstock.node.tasks import Handler
from penstock.node.units import Units
from penstock.wire.tasks import (
    GPU_PROBE,
    HEALTH_PROBE,
    RUNTIME_BUILD,
    RUNTIME_RESOLVE,
    TOPOLOGY_DISCOVER,
    UNIT_HANDOFF,
    UNIT_START,
    UNIT_STOP,
    HealthProbe,
    HealthReport,
    TopologyDiscover,
)
from penstock.wire.tasks import Inventory as Listing


def catalogue(
    units: Units, inventory: Inventory, health: Health, builder: Builder, resolver: Resolver, folder: Path
) -> Mapping[str, Handler]:
    """Type → handler."""

    async def discover(_: TopologyDiscover) -> Listing:
        return await asyncio.to_thread(inventory.listing)

    async def probe(_: HealthProbe) -> HealthReport:
        return await asyncio.to_thread(_report, units, folder)

    return {
        UNIT_START: units.start,
        UNIT_HANDOFF: units.handoff,
        UNIT_STOP: units.stop,
        RUNTIME_BUILD: builder.build,
        RUNTIME_RESOLVE: resolver.resolve,
        TOPOLOGY_DISCOVER: discover,
        GPU_PROBE: health.probe,
        HEALTH_PROBE: probe,
    }


def _report(units: Units, folder: Path) -> HealthReport:
    disk = os.statvfs(folder)
    return HealthReport(
        sandbox=units.sandbox,
        units=[report.unit_id for report in units.reports()],
        disk_free_bytes=disk.f_bavail * disk.f_frsize,
        memory_free_bytes=_memory_free(),
    )


def _memory_free() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
