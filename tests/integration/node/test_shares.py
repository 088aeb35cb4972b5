"""Shares of GPUs: MIG, NVLink and MPS through the real NVML binding onto a driver of the test's own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SOURCE = Path(__file__).with_name("fake_nvidia.c")
_PREAMBLE = """
import asyncio, json, sys
from pathlib import Path
from penstock.kit.errors import PenstockError
from penstock.node import layout, scrub
from penstock.node.inventory import open_inventory

scrubbed = []
scrub.run = lambda uuid: scrubbed.append(uuid) or True

def opened(setting, held=(), folder=None):
    return open_inventory("n", 4, production=False, layouts=layout.parse(setting), held=held, folder=folder)

def seen(inventory):
    return [[g.uuid, g.kind, g.profile, g.memory_bytes >> 20, g.parent_uuid, g.index] for g in inventory.listing().gpus]

def ill(inventory):
    return {r.uuid: r.detail for r in inventory.health() if not r.healthy and "errors" not in r.detail}
"""
_MPS_CONTROL = """#!/bin/sh
# A stand-in for the daemon's program: it notes what it was asked, and answers as the real one does.
dir=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
    echo "start $CUDA_VISIBLE_DEVICES $*" >> "$FAKE_MPS_LOG"
    touch "$dir/running" /dev/shm/cuda-mps-mark
    echo 4242 > "$dir/servers"
    exit 0
fi
[ -e "$dir/running" ] || exit 1
read -r word pid rest
echo "$word $pid $rest" >> "$FAKE_MPS_LOG"
case $word in
    get_server_list) cat "$dir/servers" ;;
    shutdown_server) : > "$dir/servers" ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the fake driver")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver."""
    folder = tmp_path_factory.mktemp("driver")
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, _SOURCE], check=True)
    return folder


def run(driver: Path, script: str, **environment: str) -> Any:
    """What a script prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", _PREAMBLE + script],
        env={"LD_LIBRARY_PATH": str(driver), "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_gpu_is_split_by_mig_and_listed_as_its_devices(driver: Path) -> None:
    found = run(driver, "print(json.dumps(seen(opened({'0': 'mig:1g.10gb,3g.40gb,2g.20gb'}))))")
    assert found == [
        ["MIG-0-1", "mig", "3g.40gb", 40192, "GPU-aaaa", 0],
        ["MIG-0-2", "mig", "2g.20gb", 19968, "GPU-aaaa", 0],
        ["MIG-0-3", "mig", "1g.10gb", 9856, "GPU-aaaa", 0],
        ["GPU-bbbb", "gpu", "", 1024, "", 1],
    ]


def test_a_layout_that_is_there_already_stays_and_another_replaces_it(driver: Path) -> None:
    first, again, other, whole, found = run(
        driver,
        """
steps = [seen(opened({"0": text})) for text in ("mig:1g.10gb,1g.10gb", "mig:1g.10gb,1g.10gb", "mig:7g.80gb", "whole")]
opened({"0": "mig:2g.20gb"})
print(json.dumps([*steps, seen(opened({}))]))
""",
    )
    assert first == again
    assert [gpu[0] for gpu in first] == ["MIG-0-1", "MIG-0-2", "GPU-bbbb"]
    assert [gpu[:3] for gpu in other][:1] == [["MIG-0-3", "mig", "7g.80gb"]]
    assert [gpu[0] for gpu in whole] == ["GPU-aaaa", "GPU-bbbb"]
    # What an operator split by hand is given out as it is found.
    assert [gpu[2] for gpu in found] == ["2g.20gb", ""]


@pytest.mark.parametrize(
    ("held", "environment", "reason"),
    [
        ('["GPU-aaaa"]', {}, "a unit is on GPU-aaaa"),
        ("[]", {"FAKE_BUSY": "1"}, "a process is on GPU-aaaa"),
        ("[]", {"FAKE_MIG_RESET": "1"}, "changes with its next reset"),
    ],
)
def test_a_gpu_in_use_is_left_alone_and_gets_no_work(
    driver: Path, held: str, environment: dict[str, str], reason: str
) -> None:
    listed, problems = run(
        driver,
        f"found = opened({{'0': 'mig:1g.10gb'}}, held={held}); print(json.dumps([seen(found), ill(found)]))",
        **environment,
    )
    assert listed[0][:2] == ["GPU-aaaa", "gpu"]
    assert reason in problems["GPU-aaaa"]
    assert problems["GPU-aaaa"].startswith("layout mig:1g.10gb: ")


def test_a_held_mig_device_keeps_its_gpu_as_it_is(driver: Path) -> None:
    listed, problems = run(
        driver,
        """
opened({"0": "mig:1g.10gb,1g.10gb"})
found = opened({"0": "mig:7g.80gb"}, held=["MIG-0-2"])
print(json.dumps([seen(found), ill(found)]))
""",
    )
    assert [gpu[0] for gpu in listed][:2] == ["MIG-0-1", "MIG-0-2"]
    assert set(problems) == {"MIG-0-1", "MIG-0-2"}


def test_a_profile_that_the_gpu_does_not_have_is_named_and_changes_nothing(driver: Path) -> None:
    fresh, kept, listed = run(
        driver,
        """
fresh = ill(opened({"1": "mig:1g.99gb"}))
opened({"0": "mig:2g.20gb"})
found = opened({"0": "mig:1g.99gb"})
print(json.dumps([fresh, ill(found), seen(found)]))
""",
    )
    reason = "layout mig:1g.99gb: it has no MIG profile 1g.99gb; there are: 1g.10gb, 2g.20gb, 3g.40gb, 7g.80gb"
    assert fresh == {}, "a GPU with memory errors has those as its reason"
    assert kept == {"MIG-0-1": reason}
    assert listed[0][2] == "2g.20gb"


def test_a_mig_device_is_judged_and_opened_by_itself(driver: Path) -> None:
    idle, done = run(
        driver,
        """
found = opened({"0": "mig:1g.10gb,1g.10gb"})
idle = [found.idle([uuid], held=["MIG-0-1", "MIG-0-2"]) for uuid in ("MIG-0-1", "MIG-0-2")]
asyncio.run(found.scrub(["MIG-0-1"], held=["MIG-0-2"]))
print(json.dumps([idle, scrubbed]))
""",
        FAKE_BUSY_MIG="MIG-0-2",
    )
    assert idle == [True, False]
    assert done == ["MIG-0-1"]


@pytest.mark.parametrize(
    ("links", "domains"),
    [("direct", ["GPU-aaaa", "GPU-aaaa"]), ("switch", ["GPU-aaaa", "GPU-aaaa"]), ("alone", ["", ""]), ("", ["", ""])],
)
def test_gpus_that_reach_one_another_by_nvlink_are_one_domain(driver: Path, links: str, domains: list[str]) -> None:
    environment = {"FAKE_NVLINK": links} if links else {}
    found = run(driver, "print(json.dumps([g.nvlink_domain for g in opened({}).listing().gpus]))", **environment)
    assert found == domains


def test_mps_without_its_program_is_refused_in_words(driver: Path, tmp_path: Path) -> None:
    said = run(
        driver,
        f"""
try:
    opened("mps:4", folder=Path({str(tmp_path)!r}))
except PenstockError as error:
    print(json.dumps(error.detail))
""",
    )
    assert said == "agent.gpu_layout: mps needs the program nvidia-cuda-mps-control, which is not on this host"


@pytest.fixture
def service(tmp_path: Path) -> dict[str, str]:
    """A stand-in for the program of MPS on the path."""
    program = tmp_path / "bin" / "nvidia-cuda-mps-control"
    program.parent.mkdir()
    # The daemon's environment is ours to choose, so the log's place is written into the program.
    program.write_text(_MPS_CONTROL.replace("$FAKE_MPS_LOG", str(tmp_path / "mps.log")))
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin", "LOG": str(tmp_path / "mps.log")}


@pytest.mark.skipif(os.geteuid() != 0, reason="MPS needs root")
def test_a_gpu_shared_by_mps_has_a_daemon_of_its_own(driver: Path, service: dict[str, str], tmp_path: Path) -> None:
    listed, access, problems = run(
        driver,
        f"""
folder = Path({str(tmp_path / "mps")!r})
found = opened({{"1": "mps:3"}}, folder=folder)
opened({{"1": "mps:3"}}, held=["GPU-bbbb/mps-2"], folder=folder)
changed = opened({{"1": "mps:2"}}, held=["GPU-bbbb/mps-2"], folder=folder)
access = found.mps(["GPU-bbbb/mps-0"])
shares = [g.threads_percent for g in found.listing().gpus if g.kind == "mps"]
print(json.dumps([[seen(found), shares], [str(access.pipe), found.mps(["GPU-aaaa"])], changed.problem("GPU-bbbb")]))
""",
        PATH=service["PATH"],
    )
    assert listed[0][1:] == [[f"GPU-bbbb/mps-{n}", "mps", "", 341, "GPU-bbbb", 1] for n in range(3)]
    assert listed[1] == [33, 33, 33]
    assert access == [str(tmp_path / "mps" / "GPU-bbbb" / "pipe"), None]
    assert "a unit is on GPU-bbbb/mps-2" in problems
    log = Path(service["LOG"]).read_text().splitlines()
    assert [line for line in log if line.startswith("start")] == ["start GPU-bbbb -d -multiuser-server"]
    # The daemon's shared memory is the folder that its clients get, not the host's.
    assert (tmp_path / "mps" / "GPU-bbbb" / "shm" / "cuda-mps-mark").exists()
    assert not Path("/dev/shm/cuda-mps-mark").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="MPS needs root")
def test_the_last_share_of_a_gpu_is_idle_and_scrubbed_for_all(
    driver: Path, service: dict[str, str], tmp_path: Path
) -> None:
    idle, done, log = run(
        driver,
        f"""
found = opened({{"0": "mps:2"}}, folder=Path({str(tmp_path / "mps")!r}))
shares = ["GPU-aaaa/mps-0", "GPU-aaaa/mps-1"]
first = [asyncio.run(found.scrub(shares[:1], held=[shares[1]])), *scrubbed]
before = Path({service["LOG"]!r}).read_text()
idle = [found.idle(shares[:1], held=[shares[1]]), found.idle(shares[:1])]
last = [asyncio.run(found.scrub(shares[:1])), *scrubbed]
print(json.dumps([idle, [first, last, found.idle(shares[:1])], before]))
""",
        PATH=service["PATH"],
        FAKE_BUSY="1",
    )
    # The one process on the GPU is the server, until that is told to end; from then on it would be a tenant's.
    assert idle == [True, True]
    assert done == [[True], [True, "GPU-aaaa"], False]
    assert "shutdown_server" not in log
    assert "shutdown_server 4242 -f" in Path(service["LOG"]).read_text()
