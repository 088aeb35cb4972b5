"""When nodes dial again."""

import random
from pathlib import Path

import pytest

from penstock.node.pace import Crowd, Pace


def longest(low: float, high: float) -> float:
    """The worst draw."""
    return max(low, high)


def pace(spread_s: float = 0.0, *, second: bool = False) -> Pace:
    """One that always draws the longest pause."""
    crowd = Crowd()
    crowd.tell(spread_s)
    return Pace(crowd, second=second, uniform=longest)


def test_a_node_alone_comes_back_at_once() -> None:
    assert pace().pause_s(stood_s=60) == pytest.approx(0.1)


def test_the_first_attempt_is_soon_in_any_fleet() -> None:
    assert pace(spread_s=30).pause_s(stood_s=60) == pytest.approx(1.0)


def test_a_small_fleet_is_back_within_two_seconds_however_long_its_gateway_was_away() -> None:
    """Of the links; the tunnels come right after them."""
    links, tunnels = pace(spread_s=10 / 200), pace(spread_s=10 / 200, second=True)
    for _ in range(50):
        assert max(links.pause_s(stood_s=0), tunnels.pause_s(stood_s=0)) < 1.5


def test_a_large_fleet_stays_spread() -> None:
    dialled = pace(spread_s=5)
    assert max(dialled.pause_s(stood_s=0) for _ in range(20)) == 10.0


def test_the_range_doubles_with_each_failure_up_to_a_cap() -> None:
    dialled = pace(spread_s=1.2)
    pauses = [dialled.pause_s(stood_s=0) for _ in range(9)]
    assert pauses == pytest.approx([1.2, 1.2, 1.2, 1.6, 3.2, 4.8, 4.8, 4.8, 4.8])


def test_a_node_that_was_never_told_of_others_dials_as_one_of_few() -> None:
    dialled = Pace(Crowd(), uniform=longest)
    pauses = [dialled.pause_s(stood_s=0) for _ in range(9)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1, 1, 1, 1, 1, 1])


def test_an_agent_that_starts_while_its_gateway_is_away_dials_as_before(tmp_path: Path) -> None:
    file = tmp_path / "crowd.json"
    for spread_s in (5.0, 0.05):
        Crowd.kept_in(file).tell(spread_s)
        assert Crowd.kept_in(file).cap_s == Crowd(spread_s=spread_s).cap_s


@pytest.mark.parametrize("content", [b"", b"\xff", b'"many"', b"1e9", b"-3", b"[]"])
def test_a_file_that_cannot_be_read_is_as_none(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "crowd.json"
    file.write_bytes(content)
    assert 0 <= Crowd.kept_in(file).spread_s <= 60


def test_a_disk_that_is_full_keeps_no_node_from_its_gateway(tmp_path: Path) -> None:
    crowd = Crowd.kept_in(tmp_path / "gone" / "crowd.json")
    crowd.tell(7)
    assert crowd.spread_s == 7


def test_after_a_failure_the_range_is_what_the_gateway_needs_for_all() -> None:
    assert pace(spread_s=5).pause_s(stood_s=0) == 5.0


def test_second_connections_come_after_the_first_ones() -> None:
    crowd = Crowd(spread_s=5)
    first, second = Pace(crowd), Pace(crowd, second=True)
    assert all(first.pause_s(stood_s=0) <= 5 <= second.pause_s(stood_s=0) for _ in range(5))


def test_a_sound_connection_begins_anew() -> None:
    dialled = Pace(Crowd(), uniform=longest)
    for _ in range(9):
        dialled.pause_s(stood_s=0)
    assert dialled.pause_s(stood_s=11) == pytest.approx(0.1)


def test_a_busy_gateway_is_left_alone_for_as_long_as_it_says_and_only_once() -> None:
    dialled = Pace(Crowd())
    dialled.busy(3)
    assert 3 <= dialled.pause_s(stood_s=0) <= 6
    assert dialled.pause_s(stood_s=0) < 1


@pytest.mark.parametrize("told_s", [1e9, float("inf"), -5.0])
def test_no_gateway_can_send_a_node_away_for_long(told_s: float) -> None:
    dialled = pace(spread_s=told_s)
    dialled.busy(told_s)
    assert 0 <= dialled.pause_s(stood_s=0) <= 120
    assert 0 <= dialled.pause_s(stood_s=0) <= 120


def test_a_thousand_nodes_never_come_as_one() -> None:
    """No tenth of the range sees more than twice its share."""
    seeded = random.Random(1)
    crowd = Crowd(spread_s=5)
    pauses = [Pace(crowd, uniform=seeded.uniform).pause_s(stood_s=0) for _ in range(1000)]
    tenths = [sum(at <= pause < at + 0.5 for pause in pauses) for at in (tenth * 0.5 for tenth in range(10))]
    assert max(tenths) < 200
