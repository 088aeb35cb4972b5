"""No more GPUs than were approved, and those that have a slot keep it."""

import msgspec
import pytest

from penstock.fleet import inventory
from penstock.fleet.enrolment import Bucket
from penstock.fleet.errors import TooMany
from penstock.fleet.heartbeats import skew
from penstock.fleet.model import Slot, SlotHealth
from penstock.wire.tasks import Gpu, GpuKind, Inventory


def gpu(index: int) -> Gpu:
    return Gpu(uuid=f"GPU-{index}", index=index, model="Sim", memory_bytes=1)


def slot(index: int) -> Slot:
    return Slot(
        id=f"slt_{index}",
        node_id="nod",
        gpu_uuid=f"GPU-{index}",
        gpu_index=index,
        gpu_model="Sim",
        memory_bytes=1,
        simulated=True,
        health=SlotHealth.HEALTHY,
        health_detail="",
    )


def test_gpus_with_a_slot_come_first_then_by_index() -> None:
    found = Inventory(gpus=[gpu(3), gpu(2), gpu(1), gpu(0)], simulated=True)
    assert [chosen.index for chosen in inventory.approved(found, [slot(3)], 2)] == [3, 0]
    assert [chosen.index for chosen in inventory.approved(found, [], 2)] == [0, 1]
    assert inventory.approved(found, [slot(3)], 0) == []


def share(index: int, number: int) -> Gpu:
    return Gpu(
        uuid=f"GPU-{index}/mps-{number}",
        index=index,
        model="Sim",
        memory_bytes=1,
        kind=GpuKind.MPS,
        parent_uuid=f"GPU-{index}",
        threads_percent=50,
    )


def test_what_is_approved_are_gpus_however_they_are_split() -> None:
    found = Inventory(gpus=[share(0, 0), share(0, 1), gpu(1), share(2, 0), share(2, 1)], simulated=True)
    assert inventory.physical(found) == 3
    taken = [chosen.uuid for chosen in inventory.approved(found, [], 2)]
    assert taken == ["GPU-0/mps-0", "GPU-0/mps-1", "GPU-1"]
    # A GPU that has a slot keeps its place, also when it is split now.
    assert {chosen.index for chosen in inventory.approved(found, [slot(2)], 1)} == {2}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"parent_uuid": ""}, "gpu.parent_uuid"),
        ({"parent_uuid": "GPU-0/mps-0"}, "gpu.parent_uuid"),
        ({"parent_uuid": "a b"}, "gpu.parent_uuid"),
        ({"profile": "1g.10gb"}, "gpu.profile"),
        ({"kind": GpuKind.MIG}, "gpu.profile"),
        ({"kind": GpuKind.MIG, "profile": "big"}, "gpu.profile"),
        ({"kind": GpuKind.MIG, "profile": "1g.10gb"}, None),
        ({"kind": GpuKind.WHOLE}, "part of no other"),
        ({"threads_percent": 0}, "gpu.threads_percent"),
        ({"threads_percent": 101}, "gpu.threads_percent"),
        ({"nvlink_domain": "x" * 128}, "gpu.nvlink_domain"),
    ],
)
def test_a_share_names_its_gpu_and_its_size(changes: dict[str, object], problem: str | None) -> None:
    said = inventory.problem(Inventory(gpus=[msgspec.structs.replace(share(0, 0), **changes)], simulated=True))
    assert said is None if problem is None else problem in (said or "")


def test_a_gpu_is_never_listed_in_two_ways() -> None:
    said = inventory.problem(Inventory(gpus=[gpu(0), share(0, 0)], simulated=True))
    assert said == "inventory.gpus: a GPU is listed in two ways"


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    now = [0.0]
    bucket = Bucket(per_s=2, burst=3, clock=lambda: now[0])

    def passed() -> int:
        count = 0
        try:
            while True:
                bucket.take()
                count += 1
        except TooMany:
            return count

    assert passed() == 3
    now[0] = 1.0
    assert passed() == 2
    now[0] = 100.0
    assert passed() == 3


def test_skew_is_bounded_for_any_clock() -> None:
    from datetime import UTC, datetime, timedelta, timezone

    now = datetime(2030, 1, 1, tzinfo=UTC)
    assert skew(now + timedelta(hours=1), now) == 3600
    assert skew(datetime(2030, 1, 1), now) == 0  # noqa: DTZ001 (an agent may forget its zone)
    assert skew(datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), now) == -1e9
    assert skew(datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))), now) == 1e9
