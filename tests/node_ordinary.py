"""A unit's whole life under whatever user runs this; says what it saw as JSON. Argument: a data folder."""

import asyncio
import json
import os
import sys
from pathlib import Path

from node_host import Host, tenant_folder
from penstock.wire.tasks import UnitStop
from wheels import wheel


async def main(folder: Path) -> None:
    """Start, look around, stop."""
    (folder / "packages").mkdir()
    host = Host.open(folder, tenant_folder(), packages=folder / "packages")
    built = await host.build(wheel(folder / "packages"))
    unit_id = await host.start(runtime=built.digest)
    imported = await host.python(unit_id, "import tiny; print(tiny.VERSION)")
    status = (await host.run(unit_id, "cat", "/proc/self/status")).out
    await host.run(unit_id, "touch", "/home/unit/made")
    owner = (folder / "units" / unit_id / "home" / "made").stat().st_uid
    outside = await host.run(unit_id, "cat", str(folder / "journal.db"))
    proof = await host.units.stop(UnitStop(unit_id=unit_id, gpu_uuids=[]))
    await host.close()
    seen = {
        "euid": os.geteuid(),
        "sandbox": host.units.sandbox,
        "no_capabilities": "CapEff:\t0000000000000000" in status,
        "owner": owner,
        "outside": outside.code,
        "clean": proof.clean,
        "imported": imported.out,
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
