"""Faults, each of which sees that it happened: kill -9, a process that stands still, a store that is gone."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nats.errors import Error as NatsError

from chaos.invariants import sandboxes
from e2e.cloud import Cloud
from penstock.kit.bus import Bus

_DEADLINE_S = 60


def watched(cloud: Cloud) -> dict[str, Any]:
    """What the supervisor last said of each process."""
    status = json.loads((cloud.data / "status.json").read_text())
    return {entry["name"]: entry for entry in status["processes"]}


async def kill(cloud: Cloud, kind: str) -> None:
    """Kill the process that runs now, and see that another took its place."""
    before = await _ready(cloud, kind)
    os.kill(before["pid"], signal.SIGKILL)
    await _started_again(cloud, kind, before)


async def kill_unit(unit: str) -> None:
    """Everything in a unit, at once."""
    pids = sandboxes({unit})
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _DEADLINE_S
    while any(_state(pid) not in ("", "Z") for pid in pids):
        assert time.monotonic() < deadline, f"unit {unit} lives on"
        await asyncio.sleep(0.02)


async def freeze(cloud: Cloud, kind: str, seconds: float) -> None:
    """A process of the cloud stands still; Postgres with all who serve its clients."""
    pid = (await _ready(cloud, kind))["pid"]
    await freeze_all([pid, *(_children(pid) if kind == "postgres" else ())], seconds)


async def freeze_all(pids: Sequence[int], seconds: float) -> None:
    """These processes stand still for so long; at least one of them is seen to."""
    handles: list[int] = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    try:
        _signal(handles, signal.SIGSTOP)
        deadline = time.monotonic() + _DEADLINE_S
        while not any(_state(pid) == "T" for pid in pids):
            # Killed in the meantime is as good.
            assert time.monotonic() < deadline, f"{pids} did not stop"
            if not any(_state(pid) for pid in pids):
                return
            await asyncio.sleep(0.005)
        await asyncio.sleep(seconds)
    finally:
        _signal(handles, signal.SIGCONT)
        for handle in handles:
            os.close(handle)


async def lose_store(cloud: Cloud, bus: Bus) -> None:
    """NATS is killed and finds nothing of what it kept; its streams are made again."""
    created = await _created(bus)
    before = await _ready(cloud, "nats")
    os.kill(before["pid"], signal.SIGSTOP)
    # Away before the next one can start.
    lost = (cloud.data / "nats").rename(cloud.data / "nats.lost")
    os.kill(before["pid"], signal.SIGKILL)
    await _started_again(cloud, "nats", before)
    await asyncio.to_thread(shutil.rmtree, lost)
    deadline = time.monotonic() + _DEADLINE_S
    while await _created(bus) == created:
        assert time.monotonic() < deadline, f"the stream was not made again\n{cloud.logs()}"
        await asyncio.sleep(0.1)


async def _created(bus: Bus) -> object:
    """When the stream of work was made, as soon as there is one."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        try:
            return json.loads((await bus.client.request("$JS.API.STREAM.INFO.WORK", timeout=1)).data)["created"]
        except (NatsError, KeyError):
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _ready(cloud: Cloud, kind: str) -> Any:
    deadline = time.monotonic() + _DEADLINE_S
    while (found := watched(cloud)[kind])["state"] != "ready" or not found["pid"]:
        assert time.monotonic() < deadline, f"{kind} is not ready\n{cloud.logs()}"
        await asyncio.sleep(0.05)
    return found


async def _started_again(cloud: Cloud, kind: str, before: Any) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while watched(cloud)[kind]["restarts"] <= before["restarts"]:
        assert time.monotonic() < deadline, f"{kind} was not started again\n{cloud.logs()}"
        await asyncio.sleep(0.05)


def _signal(handles: Iterable[int], number: signal.Signals) -> None:
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


def _children(pid: int) -> list[int]:
    found = [int(pid) for task in Path(f"/proc/{pid}/task").glob("*/children") for pid in task.read_text().split()]
    return sorted(found)


def _state(pid: int) -> str:
    """One letter, or nothing where there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""
