"""A node's parts on this machine, with real sandboxes, in a folder that only its owner can enter."""

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from node_host import Host, tenant_folder


@pytest.fixture
def node_folder() -> Iterator[Path]:
    """A data folder of mode 0700, as a home is."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-node-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def host(node_folder: Path) -> AsyncIterator[Host]:
    """A node that can start units; all of them are stopped at the end."""
    host = Host.open(node_folder, tenant_folder())
    yield host
    await host.units.stop_all(0)
    await host.close()
