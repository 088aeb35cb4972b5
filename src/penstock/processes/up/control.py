"""Looks at and stops a supervisor from outside."""

import asyncio
import os
import select
import signal
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import Final
from urllib.parse import urlsplit

import msgspec

from penstock.kit.errors import Unavailable
from penstock.processes.up.folder import DataFolder, Status

_KILL_GRACE_S: Final = 10.0
_ANSWER_TIMEOUT_S: Final = 3.0


def status(folder: DataFolder) -> Status:
    """How things are; a supervisor that was killed left a file, but not its lock."""
    said = folder.status()
    if folder.holder() is None or said is None:
        return Status(ready=False, api="", gateway="", processes=[])
    return msgspec.structs.replace(said, ready=said.ready and _answers(said.api))


def _answers(api: str) -> bool:
    """A process that hangs is no less running: ask it."""
    parts = urlsplit(api)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def down(folder: DataFolder, *, timeout_s: float) -> bool:
    """Stop it and wait; whether there was anything to stop. After the time, everything is killed."""
    pid = folder.holder()
    if pid is None:
        return _clear_orphans(folder)
    with suppress(ProcessLookupError):
        # A handle on the process itself: its number may be another's by the time the signal is sent.
        handle = os.pidfd_open(pid)
        try:
            if folder.holder() == pid:
                _stop(handle, timeout_s)
        finally:
            os.close(handle)
    return True


def _stop(handle: int, timeout_s: float) -> None:
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    if _ended(handle, timeout_s):
        return
    # The second signal kills its children at once.
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    if not _ended(handle, _KILL_GRACE_S):
        raise Unavailable(f"the supervisor did not stop within {timeout_s + _KILL_GRACE_S:.0f} s")


def _ended(handle: int, timeout_s: float) -> bool:
    ready, _, _ = select.select([handle], [], [], timeout_s)
    return bool(ready)


def _clear_orphans(folder: DataFolder) -> bool:
    """What a killed supervisor left behind."""
    killed = asyncio.run(_end_everything(folder))
    folder.forget()
    return killed


async def _end_everything(folder: DataFolder) -> bool:
    # Here, because it knows of GPUs and units, which takes its time to import.
    from penstock.processes.up import leftovers

    processes = await leftovers.clear(folder.path, grace_s=0.0)
    return await leftovers.end_units(folder) > 0 or bool(processes)
