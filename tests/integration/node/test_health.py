"""GPU health through the real NVML binding, on a driver of the test's own that is told how its GPUs are."""

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from integration.node.test_agent import Agent
from integration.node.test_link import _listening
from node_gateway import Gateway
from penstock.wire.tasks import GPU_PROBE, GpuProbe, GpuProbed

_SOURCE = Path(__file__).with_name("fake_nvidia.c")
_TESTS = Path(__file__).parents[2]
A, B = "GPU-aaaa", "GPU-bbbb"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the fake driver")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver."""
    folder = tmp_path_factory.mktemp("driver")
    for name in ("libnvidia-ml.so.1", "libcuda.so.1"):
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, _SOURCE], check=True)
    return folder


@dataclass
class Node:
    """A watch in a process of its own, and the state of its driver."""

    folder: Path
    process: "subprocess.Popen[str]"
    state: dict[tuple[int, str], int] = field(default_factory=dict)

    def set(self, gpu: int, name: str, value: int) -> None:
        """From now on this is what the driver says."""
        self.state[gpu, name] = value
        text = "".join(f"{gpu} {name} {value}\n" for (gpu, name), value in self.state.items())
        (self.folder / "gpus.new").write_text(text)
        (self.folder / "gpus.new").replace(self.folder / "gpus")

    def xid(self, gpu: int, number: int) -> None:
        """The driver tells of an error."""
        with (self.folder / "xids").open("a") as file:
            file.write(f"{gpu} {number}\n")

    def ask(self, question: str) -> Any:
        """One question, one answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def until(self, gpu: str, grade: str) -> Any:
        """What is said once the GPU has this grade."""
        return self.when(lambda seen: seen["grades"][gpu] == grade)

    def when(self, true: Callable[[Any], bool]) -> Any:
        """What is said once this holds."""
        deadline = time.monotonic() + 20
        while not true(seen := self.ask("look")):
            assert time.monotonic() < deadline, seen
            time.sleep(0.02)
        return seen


@pytest.fixture
def node(libraries: Path, tmp_path: Path) -> Iterator[Node]:
    """Two GPUs that are well."""
    (tmp_path / "gpus").write_text("1 uncorrected 0\n")
    (tmp_path / "xids").touch()
    process = subprocess.Popen(
        [sys.executable, _TESTS / "node_health.py"],
        env={
            "LD_LIBRARY_PATH": str(libraries),
            "PATH": "/usr/bin:/bin",
            "FAKE_GPUS": str(tmp_path / "gpus"),
            "FAKE_XIDS": str(tmp_path / "xids"),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    node = Node(tmp_path, process, {(1, "uncorrected"): 0})
    assert node.ask("look")["grades"] == {A: "healthy", B: "healthy"}
    yield node
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.wait(timeout=20) == 0
    process.stdout.close()


def test_a_hot_gpu_gets_no_work_until_it_has_been_cool_for_some_readings(node: Node) -> None:
    node.set(0, "temperature", 95)
    seen = node.until(A, "degraded")
    assert seen["grades"][B] == "healthy"
    assert seen["details"][A] == "too hot: 90 °C or more"
    assert seen["readings"][A] == [95, 70.5, 0]
    node.set(0, "temperature", 50)
    cooled = node.when(lambda seen: seen["readings"][A][0] == 50)
    assert cooled["grades"][A] == "degraded"
    assert node.until(A, "healthy")["details"][A] == ""
    assert node.ask("changes") == 2


def test_only_errors_of_the_hardware_count_and_are_told_at_once(node: Node) -> None:
    for number in (13, 31, 43, 45, 68, 999):
        node.xid(0, number)
    node.xid(1, 79)
    told = time.monotonic()
    seen = node.until(B, "failed")
    assert time.monotonic() - told < 1
    assert seen["details"][B] == "XID 79: the GPU has fallen off the bus"
    assert seen["grades"][A] == "healthy"
    metrics = node.ask("metrics")
    assert f'penstock_gpu_xids_total{{gpu="{A}",xid="31"}} 1.0' in metrics
    assert f'penstock_gpu_health{{gpu="{B}"}} 2.0' in metrics
    assert f'penstock_gpu_temperature_celsius{{gpu="{A}"}} 40.0' in metrics


def test_a_fault_that_passes_is_over_after_some_readings_and_one_that_lasts_only_after_a_probe(node: Node) -> None:
    node.xid(0, 94)
    node.xid(1, 48)
    node.until(A, "failed")
    node.until(B, "failed")
    node.until(A, "healthy")
    assert node.ask("look")["grades"][B] == "failed"
    assert node.ask(f"probe {B}") == [True, ""]
    assert node.ask("look")["grades"] == {A: "healthy", B: "healthy"}


def test_a_lost_gpu_has_failed_and_no_probe_passes_while_it_is_lost(node: Node) -> None:
    node.set(0, "lost", 15)
    seen = node.until(A, "failed")
    assert seen["details"][A] == "the GPU is lost: the driver cannot reach it"
    assert A not in seen["readings"]
    assert seen["grades"][B] == "healthy"
    assert node.ask("listed") == [B]
    assert node.ask(f"probe {A}") == [False, "the GPU is lost: the driver cannot reach it"]
    node.set(0, "lost", 0)
    node.until(A, "healthy")
    assert node.ask(f"probe {A}") == [True, ""]


@pytest.mark.parametrize(
    ("name", "value", "grade", "detail"),
    [
        ("uncorrected", 2, "failed", "uncorrected memory errors since the driver was loaded"),
        ("remap_failed", 1, "failed", "its memory cannot be repaired any more: no spare rows are left"),
        ("remap_pending", 1, "degraded", "a memory repair waits for a reset of the GPU"),
        ("corrected", 101, "degraded", "more than 100 corrected memory errors in an hour"),
        ("milliwatts", 800_000, "degraded", "draws more than 770 W"),
        ("throttle", 0x40, "degraded", "slowed down: hardware thermal slowdown"),
    ],
)
def test_each_sensor_has_its_verdict(node: Node, name: str, value: int, grade: str, detail: str) -> None:
    node.set(0, name, value)
    assert node.until(A, grade)["details"][A] == detail
    if name != "corrected":
        assert node.ask(f"probe {A}") == [False, detail]


async def test_an_agent_tells_of_an_error_at_once_and_proves_the_gpu_when_asked(
    libraries: Path, node_folder: Path
) -> None:
    (node_folder / "gpus").write_text("1 uncorrected 0\n")
    (node_folder / "xids").touch()
    async with _listening(Gateway(node_folder)) as gateway:
        gateway.heartbeat_s = 60
        agent = Agent(node_folder, gateway)
        agent.environment = {
            "LD_LIBRARY_PATH": str(libraries),
            "FAKE_GPUS": str(node_folder / "gpus"),
            "FAKE_XIDS": str(node_folder / "xids"),
        }
        await agent.start()
        try:
            first = await asyncio.wait_for(gateway.heartbeats.get(), 60)
            assert [report.healthy for report in first.gpus] == [True, True]
            assert [reading.temperature_c for reading in first.readings] == [40, 40]
            with (node_folder / "xids").open("a") as file:
                file.write("0 79\n")
            told = time.monotonic()
            second = await asyncio.wait_for(gateway.heartbeats.get(), 20)
            assert time.monotonic() - told < 5
            assert [report.failed for report in second.gpus] == [True, False]
            [result] = await gateway.ask(gateway.task(GPU_PROBE, GpuProbe(gpu_uuid=B)))
            found = msgspec.msgpack.decode(result.answer, type=GpuProbed)
            # The scrubber's own process finds no CUDA here, and says so rather than nothing.
            assert (found.passed, found.detail) == (False, "its memory could not be written and read back")
        finally:
            await agent.end()


def test_a_probe_of_a_gpu_that_is_not_there_does_not_pass(node: Node) -> None:
    assert node.ask("probe GPU-cccc") == [False, "this node has no such GPU"]
