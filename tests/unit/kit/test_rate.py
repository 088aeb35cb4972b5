"""The rate at which a door lets connections in."""

import pytest

from penstock.kit.door import Rate


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_passes_and_the_rest_queues_at_the_rate() -> None:
    rate = Rate(per_s=10, burst=3, clock=Clock())
    waits = [rate.wait_s() for _ in range(6)]
    assert waits == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])


def test_idle_time_refills_the_burst_and_no_more() -> None:
    clock = Clock()
    rate = Rate(per_s=10, burst=3, clock=clock)
    for _ in range(3):
        rate.wait_s()
    clock.now = 1000.0
    assert [rate.wait_s() for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])
