"""How GPUs are given out: what an operator may write, and what becomes of it."""

import pytest

from penstock.kit.errors import Invalid
from penstock.node import layout, nvml
from penstock.node.inventory import Simulated
from penstock.wire.tasks import Gpu, GpuKind

WHOLE = Gpu(uuid="GPU-a", index=0, model="H100", memory_bytes=80 << 30, nvlink_domain="x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("whole", "whole"),
        ("mps:4", "mps:4"),
        ("mig:1g.10gb", "mig:1g.10gb"),
        ("mig:1g.10gb, 3g.40gb,2g.20gb", "mig:3g.40gb,2g.20gb,1g.10gb"),
        ("mig:1g.5gb+me", "mig:1g.5gb+me"),
    ],
)
def test_a_layout_is_for_all_gpus_or_for_one(text: str, shown: str) -> None:
    assert str(layout.parse(text).of(7)) == shown
    assert str(layout.parse({"*": "mps:2", "3": text}).of(3)) == shown
    assert str(layout.parse({"*": "mps:2", "3": text}).of(4)) == "mps:2"


def test_without_a_layout_a_gpu_stays_as_it_is() -> None:
    assert layout.parse({}).of(0) is None
    assert layout.parse({"1": "mps:2"}).of(0) is None
    assert layout.parse("").of(0) is None


@pytest.mark.parametrize(
    "text",
    [
        "mig",
        "mig:",
        "mig:h100",
        "mig:9g.10gb",
        "mig:4g.40gb,4g.40gb",
        "mps",
        "mps:0",
        "mps:-1",
        "mps:49",
        "mps:²",
        "all",
    ],
)
def test_what_is_no_layout_is_refused_with_the_setting_named(text: str) -> None:
    with pytest.raises(Invalid, match=r"agent\.gpu_layout"):
        layout.parse(text)


@pytest.mark.parametrize("index", ["-1", "x", "1024", "", "٣"])
def test_an_index_is_a_number(index: str) -> None:
    with pytest.raises(Invalid, match="not the index of a GPU"):
        layout.parse({index: "whole"})


def test_simulated_gpus_are_split_like_real_ones() -> None:
    wanted = layout.parse({"0": "mps:3", "1": "mig:1g.10gb,2g.20gb"})
    listed = Simulated("nod_x", 3, wanted).listing()
    assert listed.simulated
    assert [(gpu.uuid, gpu.kind, gpu.profile, gpu.memory_bytes >> 30, gpu.threads_percent) for gpu in listed.gpus] == [
        ("SIM-nod_x-0/mps-0", GpuKind.MPS, "", 26, 33),
        ("SIM-nod_x-0/mps-1", GpuKind.MPS, "", 26, 33),
        ("SIM-nod_x-0/mps-2", GpuKind.MPS, "", 26, 33),
        ("SIM-nod_x-1/mig-0", GpuKind.MIG, "2g.20gb", 20, 100),
        ("SIM-nod_x-1/mig-1", GpuKind.MIG, "1g.10gb", 10, 100),
        ("SIM-nod_x-2", GpuKind.WHOLE, "", 80, 100),
    ]
    assert {gpu.parent_uuid for gpu in listed.gpus} == {"SIM-nod_x-0", "SIM-nod_x-1", ""}


def test_a_node_has_no_more_shares_than_the_fleet_takes() -> None:
    with pytest.raises(Invalid, match="at most 1024"):
        Simulated("nod_x", 64, layout.parse("mps:48"))


def test_a_unit_with_mps_shares_sees_the_gpu_and_its_limits() -> None:
    shares = layout.mps_shares(WHOLE, 4)
    assert layout.variables(shares[1:3], pipe="/run/p") == {
        "CUDA_VISIBLE_DEVICES": "GPU-a",
        "NVIDIA_VISIBLE_DEVICES": "GPU-a",
        "CUDA_MPS_PIPE_DIRECTORY": "/run/p",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=40960M",
    }
    assert "CUDA_MPS_PIPE_DIRECTORY" not in layout.variables([WHOLE], pipe="/run/p")
    assert all(share.nvlink_domain == "" for share in shares)


def test_a_mig_device_is_opened_by_its_capability_files() -> None:
    listed = "config 1\nmonitor 2\ngpu0/gi7/access 66\ngpu1/gi7/access 200\ngpu1/gi7/ci0/access 201\n"
    assert nvml.capabilities(listed, 1, 7, 0) == ["/dev/nvidia-caps/nvidia-cap200", "/dev/nvidia-caps/nvidia-cap201"]
    assert nvml.capabilities("", 1, 7, 0) == []
