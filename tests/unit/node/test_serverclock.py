"""Expiry by the server's clock alone."""

from datetime import UTC, datetime, timedelta

from penstock.node.serverclock import ServerClock

_NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def test_time_goes_on_with_the_monotonic_clock() -> None:
    passed = 100.0
    clock = ServerClock(lambda: passed)
    clock.tell(_NOON)
    passed = 130.0
    assert clock.now() == _NOON + timedelta(seconds=30)
    assert not clock.expired(_NOON + timedelta(seconds=31))
    assert clock.expired(_NOON + timedelta(seconds=30))


def test_without_a_servers_time_everything_is_too_old() -> None:
    clock = ServerClock()
    assert clock.now() is None
    assert clock.expired(datetime(9999, 1, 1, tzinfo=UTC))
