"""Figures of the benchmarks: which hold, and how they are printed."""

import json

from bench.figures import bound, fact, rate, unmeasured


def test_a_reference_that_could_not_be_had_misses_its_bar() -> None:
    line = json.loads(unmeasured("invoke_vs_peer", "per s", 1.0).line())
    assert (line["holds"], line["bar"]) == (False, ">= 1.0")


def test_a_bar_of_zero_is_missed_too_when_nothing_was_measured() -> None:
    assert not unmeasured("peer_per_s", "per s", 0.0).holds


def test_bars_hold_by_their_ratio() -> None:
    assert rate("a", 75, "per s", 100, 0.75).holds
    assert not rate("a", 74, "per s", 100, 0.75).holds
    assert not bound("a", 11, "ms", 10).holds
    assert fact("a", 1, "ms").holds
