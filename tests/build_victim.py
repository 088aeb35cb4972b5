"""A builder that stops dead at a stage of a build, to be killed there. Arguments: folder, packages, lock, stage."""

import asyncio
import sys
import time
from pathlib import Path

from node_host import Host, tenant_folder


def _stop_at(wanted: str, stage: str) -> None:
    if stage == wanted:
        print(stage, flush=True)
        time.sleep(600)


async def main(folder: Path, packages: Path, lock: str, wanted: str) -> None:
    """Build; the whole process halts at the stage."""
    host = Host.open(folder, tenant_folder(), packages=packages, on_stage=lambda stage: _stop_at(wanted, stage))
    await host.build(lock)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
