"""GPUs: through the real NVML binding onto a driver of the test's own, and simulated ones without a driver."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kit.errors import Unavailable
from penstock.node.inventory import Simulated, open_inventory

_SOURCE = Path(__file__).with_name("fake_nvidia.c")
_LOOK = """
import json
from penstock.node.inventory import open_inventory
found = open_inventory("nod_x", 4, production=False)
listing = found.listing()
print(json.dumps({
    "simulated": listing.simulated,
    "driver": listing.driver_version,
    "gpus": [(g.uuid, g.index, g.model, g.memory_bytes, g.pci_address) for g in listing.gpus],
    "health": [(r.uuid, r.healthy, r.detail) for r in found.health()],
    "idle": [found.idle(["GPU-aaaa"]), found.idle(["GPU-bbbb"])],
    "devices": found.devices(["GPU-bbbb"]),
}))
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the fake driver")


@pytest.fixture
def driver(tmp_path: Path) -> Callable[..., Path]:
    """Builds the fake driver."""

    def build(*flags: str) -> Path:
        for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
            subprocess.run(["cc", "-shared", "-fPIC", *flags, "-o", tmp_path / name, _SOURCE], check=True)
        return tmp_path

    return build


def _python(libraries: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={"LD_LIBRARY_PATH": str(libraries), "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_real_gpus_are_listed_judged_and_found_busy(driver: Callable[..., Path]) -> None:
    done = _python(driver(), "-c", _LOOK, FAKE_BUSY="1")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert not seen["simulated"]
    assert seen["driver"] == "999.1"
    assert seen["gpus"][1] == ["GPU-bbbb", 1, "Fake H100", 1 << 30, "00000000:11:00.0"]
    assert seen["health"] == [["GPU-aaaa", True, ""], ["GPU-bbbb", False, "3 uncorrected memory errors"]]
    assert seen["idle"] == [False, True]


def test_memory_is_overwritten_and_a_broken_overwrite_is_noticed(driver: Callable[..., Path]) -> None:
    assert _python(driver(), "-m", "penstock.node.scrub").returncode == 0
    assert _python(driver("-DBROKEN"), "-m", "penstock.node.scrub").returncode == 1


def test_without_a_driver_memory_is_not_called_scrubbed(tmp_path: Path) -> None:
    assert _python(tmp_path, "-m", "penstock.node.scrub").returncode != 0


def test_without_a_driver_gpus_are_simulated_and_say_so() -> None:
    found = open_inventory("nod_x", 3, production=False)
    if not isinstance(found, Simulated):
        pytest.skip("this host has GPUs")
    listing = found.listing()
    assert listing.simulated
    assert [gpu.uuid for gpu in listing.gpus] == ["SIM-nod_x-0", "SIM-nod_x-1", "SIM-nod_x-2"]
    assert {gpu.model for gpu in listing.gpus} == {"Simulated GPU"}


def test_a_production_node_never_simulates() -> None:
    with pytest.raises(Unavailable, match="NVIDIA driver"):
        open_inventory("nod_x", 3, production=True)
