"""Verdicts over time, without a driver."""

import pytest

from penstock.node import xids
from penstock.node.health import WELL, Grade, Monitor, Record, Thresholds, Unwatched, Verdict, judge
from penstock.node.inventory import Simulated
from penstock.node.sensors import Sample
from penstock.wire.tasks import GpuProbe

LIMITS = Thresholds(well_readings=3)
HOT = Verdict(Grade.DEGRADED, "too hot")
LOST = Verdict(Grade.FAILED, "lost")


def test_worse_counts_at_once_and_better_only_after_three_in_a_row() -> None:
    record = Record(LIMITS)
    record.see(HOT)
    assert record.verdict == HOT
    for now in (WELL, WELL, HOT, WELL, WELL):
        record.see(now)
        assert record.verdict == HOT
    record.see(WELL)
    assert record.verdict == WELL


def test_the_words_stay_while_the_grade_does() -> None:
    record = Record(LIMITS)
    record.see(HOT)
    record.see(Verdict(Grade.DEGRADED, "something else"))
    assert record.verdict == HOT


def test_a_failure_ends_as_what_is_left_of_it() -> None:
    record = Record(LIMITS)
    record.see(LOST)
    for _ in range(3):
        record.see(HOT)
    assert record.verdict == HOT


@pytest.mark.parametrize("number", sorted(xids.FAULTS))
def test_a_lasting_fault_outlives_good_readings(number: int) -> None:
    record = Record(LIMITS)
    record.fault(number)
    for _ in range(10):
        record.see(WELL)
    assert (record.verdict.grade is Grade.FAILED) == xids.FAULTS[number].lasting
    record.acquit()
    assert record.verdict == WELL


def test_application_errors_are_no_faults() -> None:
    assert not set(xids.APPLICATION) & set(xids.FAULTS)
    assert {13, 31, 43, 45, 68} <= set(xids.APPLICATION)
    assert {48, 63, 64, 74, 79, 92, 94, 95, 119, 120} <= set(xids.FAULTS)


def test_own_limits_come_before_the_gpus() -> None:
    sample = Sample(temperature_c=80, slowdown_c=90, power_w=300.0, power_limit_w=700.0)
    assert judge(sample, Thresholds()) == WELL
    assert judge(sample, Thresholds(temperature_max_c=80)).grade is Grade.DEGRADED
    assert judge(sample, Thresholds(power_max_w=299)).grade is Grade.DEGRADED


def test_a_gpu_without_sensors_is_well() -> None:
    assert judge(Sample(), Thresholds()) == WELL


def test_corrected_errors_count_within_an_hour() -> None:
    record = Record(Thresholds(corrected_errors_max=10))
    assert record.measure(Sample(ecc_corrected=1000), 0.0) == WELL
    assert record.measure(Sample(ecc_corrected=1011), 60.0).grade is Grade.DEGRADED
    assert record.measure(Sample(ecc_corrected=1012), 3700.0) == WELL


def test_a_watch_that_stands_still_says_nothing_good() -> None:
    now = 0.0
    monitor = Monitor(Simulated("nod_x", 1), LIMITS, monotonic=lambda: now)
    monitor._find_gpus()
    assert [report.healthy for report in monitor.look()[0]] == [True]
    now = 100.0
    [report] = monitor.look()[0]
    assert (report.healthy, report.failed) == (False, False)
    assert "has not answered" in report.detail


async def test_simulated_gpus_pass_a_probe_and_unknown_ones_do_not() -> None:
    health = Unwatched(Simulated("nod_x", 1))
    assert (await health.probe(GpuProbe(gpu_uuid="SIM-nod_x-0"))).passed
    assert not (await health.probe(GpuProbe(gpu_uuid="SIM-nod_x-1"))).passed
