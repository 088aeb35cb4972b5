"""The whole cloud, started once for all tests that drive it from outside."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cloud import Cloud, processes_of

#: Time is charged every other second, and a few seconds' worth is enough to start something.
_QUICK_BILLING = {"PENSTOCK_BILLER_WINDOW_SECONDS": "2", "PENSTOCK_API_FUNDS_MINIMUM_S": "5"}


@pytest.fixture(scope="session")
def stack() -> Iterator[Cloud]:
    """A running cloud with 64 simulated GPUs. Tests share it: they release what they take."""
    with tempfile.TemporaryDirectory(prefix="penstock-e2e-") as folder:
        cloud = Cloud(Path(folder) / "data", env=_only_packages_in(Path(folder) / "packages") | _QUICK_BILLING)
        cloud.up()
        try:
            yield cloud
        finally:
            cloud.down()


def _only_packages_in(folder: Path) -> dict[str, str]:
    """Environments are built from this folder alone: no test needs a network."""
    folder.mkdir()
    return {"PENSTOCK_AGENT_PACKAGE_INDEX_URL": "none", "PENSTOCK_AGENT_PACKAGE_FIND_LINKS": str(folder)}


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """An install of a test's own, not started; stopped at the end."""
    made = Cloud(tmp_path / "data")
    yield made
    made.run("down", "--timeout", "20", timeout_s=120)
    left = processes_of(made.data)
    for pid in left:
        os.kill(pid, 9)
    assert left == {}
