import msgspec
import pytest

from penstock.sdk.errors import BadAnswer, Unreachable
from penstock.sdk.sse import Follower


def event(number: int) -> bytes:
    data = {
        "cursor": f"c{number}",
        "event_id": f"evt_{number}",
        "event_type": "provisioning.active",
        "aggregate_id": "alc_x",
        "version": number,
        "project_id": None,
        "correlation_id": "cor",
        "occurred_at": "2026-01-01T00:00:00Z",
        "payload": {"n": number},
    }
    return b"id: c%d\nevent: provisioning.active\ndata: %s\n\n" % (number, msgspec.json.encode(data))


@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_whole_however_the_bytes_are_cut(size: int, line_end: bytes) -> None:
    data = (b": connected\n\n" + event(1) + b": keep-alive\n\n" + event(2)).replace(b"\n", line_end)
    follower = Follower(None)
    got = [item for start in range(0, len(data), size) for item in follower.feed(data[start : start + size])]
    assert [item.version for item in got] == [1, 2]


def test_a_new_connection_resumes_after_the_last_event() -> None:
    follower = Follower("c0")
    assert follower.request().headers["Last-Event-ID"] == "c0"
    follower.feed(event(1) + event(2)[:20])
    assert follower.request().headers["Last-Event-ID"] == "c1"
    assert [item.version for item in follower.feed(event(2))] == [2], "half an event of the old connection is dropped"


def test_an_event_without_end_is_refused() -> None:
    follower = Follower(None)
    for _ in range(3):
        assert follower.feed(b"data: " + b"x" * (1 << 20)) == []
    with pytest.raises(BadAnswer, match="larger than"):
        follower.feed(b"x" * (1 << 20))


def test_failures_in_a_row_end_it_and_data_starts_the_count_over() -> None:
    follower = Follower(None)
    broken = Unreachable("gone", sent=True)
    for _ in range(3):
        for _ in range(8):
            assert follower.lost(broken) > 0
        follower.feed(b": keep-alive\n\n")
    for _ in range(8):
        follower.lost(broken)
    with pytest.raises(Unreachable):
        follower.lost(broken)
