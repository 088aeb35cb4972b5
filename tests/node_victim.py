"""An agent's unit part that stops dead at a stage of a start or a handoff, to be killed there.

Arguments: folder, unit, stage; a handoff comes as a task on standard input, in place of the start.
"""

import asyncio
import sys
import time
from pathlib import Path

import msgspec

from node_executor import Desk
from node_host import Host, request, tenant_folder
from penstock.wire.tasks import SignedTask


def _stop_at(wanted: str, stage: str) -> None:
    if stage == wanted:
        print(stage, flush=True)
        time.sleep(600)


async def main(folder: Path, unit_id: str, wanted: str, handoff: bytes) -> None:
    """Start the unit or hand it over; the whole process halts at the stage."""
    host = Host.open(folder, tenant_folder(), on_stage=lambda stage: _stop_at(wanted, stage))
    await host.units.recover()
    if handoff:
        await Desk(host).ask(msgspec.msgpack.decode(handoff, type=SignedTask))
    else:
        await host.units.start(request(unit_id, gpu_uuids=["SIM-nod_test-5"]))
    _stop_at(wanted, "done")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.stdin.buffer.read()))
