"""An agent's unit part that stops dead at a stage of a start, to be killed there. Arguments: folder, unit, stage."""

import asyncio
import sys
import time
from pathlib import Path

from node_host import Host, request, tenant_folder


def _stop_at(wanted: str, stage: str) -> None:
    if stage == wanted:
        print(stage, flush=True)
        time.sleep(600)


async def main(folder: Path, unit_id: str, wanted: str) -> None:
    """Start the unit; the whole process halts at the stage."""
    host = Host.open(folder, tenant_folder(), on_stage=lambda stage: _stop_at(wanted, stage))
    await host.units.recover()
    await host.units.start(request(unit_id, gpu_uuids=["SIM-nod_test-5"]))
    _stop_at(wanted, "done")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
