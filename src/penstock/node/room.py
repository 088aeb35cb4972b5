"""Room on the disk of the node's data folder, before anything is begun there."""

import asyncio
import os
from pathlib import Path
from typing import Final

from penstock.kit.full import FULL, is_full
from penstock.kit.telemetry import logger

_log = logger(__name__)
#: Enough for the journal and what an agent writes while it starts.
_BYTES: Final = 1 << 20
_NAME: Final = ".room"


async def wait_for_room(folder: Path, *, every_s: float = 5.0) -> None:
    """Return when the folder's disk takes a few bytes. Meanwhile it is said once, and counted."""
    told = False
    while not await asyncio.to_thread(_has_room, folder):
        FULL.labels("agent").inc()
        if not told:
            _log.error("disk_full", folder=str(folder), note="the agent waits until there is space, then it starts")
        told = True
        await asyncio.sleep(every_s)
    if told:
        _log.info("disk_has_room", folder=str(folder))


def _has_room(folder: Path) -> bool:
    file = folder / _NAME
    try:
        with file.open("wb") as output:
            output.write(bytes(_BYTES))
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        if not is_full(error):
            raise
        return False
    finally:
        file.unlink(missing_ok=True)
    return True
