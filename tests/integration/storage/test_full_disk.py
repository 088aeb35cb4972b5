"""Objects in a folder whose disk is full."""

import subprocess
import sys
from pathlib import Path

_WRITES_TOO_MUCH = """
import asyncio, sys
from pathlib import Path
from penstock.kit.errors import StorageFull
from penstock.storage.blobs import Access, connect

async def main():
    folder = Path(sys.argv[1])
    blobs = connect(Access(url=folder.as_uri()))
    for size, full in ((12 << 20, True), (1 << 10, False)):
        try:
            async with blobs.writer("blb_" + "0" * 26) as write:
                for _ in range(size >> 10):
                    await write(bytes(1 << 10))
        except StorageFull as error:
            assert full, error
            print(error.code, error.kind.value)
        else:
            assert not full

asyncio.run(main())
"""
_MOUNTED = 'mount -t tmpfs -o size=4m small "$1" && exec "$2" -c "$3" "$1"'


def test_no_space_is_said_and_later_writes_work(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _MOUNTED, "sh", str(tmp_path)]
    done = subprocess.run(
        [*command, sys.executable, _WRITES_TOO_MUCH], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["storage_full", "unavailable"]
