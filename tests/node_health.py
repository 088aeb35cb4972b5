"""The watch over GPUs in a process of its own, on the fake driver: one command a line, one answer each.

`look` answers what a heartbeat would say, `probe UUID` what the task would, `changes` how often a change was told,
`metrics` what is measured, `listed` which GPUs the inventory has.
"""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

from prometheus_client import generate_latest

from penstock.node.health import Monitor, Thresholds, open_health
from penstock.node.inventory import open_inventory
from penstock.wire.tasks import GpuProbe

_run = subprocess.run


def _with_libraries(*arguments: Any, env: dict[str, str], **options: Any) -> Any:
    """The scrubber's process gets a clean environment; here it needs the way to the fake driver."""
    return _run(*arguments, env=env | {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]}, **options)


def main() -> None:
    """Answer until the input ends. The log goes elsewhere."""
    answers, sys.stdout = sys.stdout, sys.stderr
    subprocess.run = _with_libraries
    changes: list[int] = []
    limits = Thresholds(well_readings=3, corrected_errors_max=100)
    inventory = open_inventory("nod_x", 0, production=True)
    monitor = open_health(inventory, limits, every_s=0.1, on_change=lambda: changes.append(1))
    assert isinstance(monitor, Monitor)
    monitor.start()
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        print(json.dumps(_answer(monitor, changes, word, rest)), file=answers, flush=True)
    monitor.close()


def _answer(monitor: Monitor, changes: list[int], word: str, rest: str) -> object:
    if word == "probe":
        probed = asyncio.run(monitor.probe(GpuProbe(gpu_uuid=rest)))
        return [probed.passed, probed.detail]
    if word == "listed":
        return [gpu.uuid for gpu in monitor._inventory.listing().gpus]
    if word == "changes":
        return len(changes)
    if word == "metrics":
        return generate_latest().decode()
    reports, readings = monitor.look()
    grades = {report.uuid: _grade(report.healthy, failed=report.failed) for report in reports}
    return {
        "grades": grades,
        "details": {report.uuid: report.detail for report in reports},
        "readings": {reading.uuid: [reading.temperature_c, reading.power_w, reading.faults] for reading in readings},
    }


def _grade(healthy: bool, *, failed: bool) -> str:
    return "healthy" if healthy else "failed" if failed else "degraded"


if __name__ == "__main__":
    main()
