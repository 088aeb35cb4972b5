"""No more GPUs than were approved, and those that have a slot keep it."""

from penstock.fleet import inventory
from penstock.fleet.enrolment import Bucket
from penstock.fleet.errors import TooMany
from penstock.fleet.heartbeats import skew
from penstock.fleet.model import Slot, SlotHealth
from penstock.wire.tasks import Gpu, Inventory


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
