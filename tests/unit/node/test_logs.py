"""Lines of output: whole, bounded, flagged; and held to a rate."""

from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.node import logs
from penstock.node.logs import Forwarder, Lines
from penstock.wire.link import FRAME_BYTES_MAX, LOG_LINE_BYTES_MAX, LogLine, LogLines

_AT = datetime(2030, 1, 1, tzinfo=UTC)


def _lines() -> Lines:
    return Lines("alc_x", "stdout", lambda: _AT)


def _line(text: str, unit_id: str = "alc_x") -> LogLine:
    return LogLine(unit_id=unit_id, stream="stdout", at=_AT, text=text)


def test_a_line_comes_when_it_is_complete() -> None:
    lines = _lines()
    assert lines.feed(b"one\ntw") == [_line("one")]
    assert [line.text for line in lines.feed(b"o\n\n")] == ["two", ""]
    assert lines.end() == []


def test_the_rest_comes_at_the_end() -> None:
    lines = _lines()
    assert lines.feed(b"no newline") == []
    assert [line.text for line in lines.end()] == ["no newline"]


def test_ten_megabytes_without_a_newline_are_split_and_flagged() -> None:
    lines = _lines()
    made = [line for _ in range(160) for line in lines.feed(b"x" * (64 << 10))]
    made += lines.feed(b"end\n")
    assert sum(len(line.text) for line in made) == (10 << 20) + 3
    assert all(line.split and len(line.text) <= LOG_LINE_BYTES_MAX for line in made)
    assert not lines.feed(b"short\n")[0].split


def test_bytes_that_are_no_text_are_replaced_and_flagged() -> None:
    good, bad = _lines().feed("gut\u00e9\n".encode() + b"\xff\xfe\n")
    assert (good.text, good.lossy) == ("gut\u00e9", False)
    assert (bad.text, bad.lossy) == ("\ufffd\ufffd", True)


@given(st.lists(st.text(max_size=100), max_size=6), st.integers(1, 2000))
def test_text_is_never_lost_or_cut_within_a_character(parts: list[str], times: int) -> None:
    lines = _lines()
    content = "".join(parts).replace("\r", "") * times
    raw = content.encode()
    made = [line for at in range(0, len(raw), 30_000) for line in lines.feed(raw[at : at + 30_000])]
    made += lines.end()
    assert "".join(line.text for line in made) == content.replace("\n", "")
    assert all(len(line.text.encode()) <= LOG_LINE_BYTES_MAX and not line.lossy for line in made)


async def test_one_noisy_unit_is_held_to_its_rate_and_others_are_not() -> None:
    now = 0.0
    forwarder = Forwarder(lambda: now)
    for _ in range(100):
        forwarder.put(_line("x" * 60_000, "alc_noisy"))
    forwarder.put(_line("quiet", "alc_quiet"))
    kept: list[LogLine] = []
    while "alc_quiet" not in {line.unit_id for line in kept}:
        kept += await forwarder.take()
    noisy = sum(line.unit_id == "alc_noisy" for line in kept)
    assert noisy == logs._BURST_BYTES // 60_000
    now = 1.0
    forwarder.put(_line("again", "alc_noisy"))
    told, line = await forwarder.take()
    assert f"{100 - noisy} lines dropped" in told.text
    assert line.text == "again"


@pytest.mark.parametrize("text", ["", "ü" * 100])
async def test_short_and_wide_lines_are_bounded_too(text: str) -> None:
    forwarder = Forwarder(lambda: 0.0)
    lines = 100_000
    for number in range(lines):
        forwarder.put(_line(text, f"alc_{number % 4}"))
    batch = await forwarder.take()
    assert len(msgspec.msgpack.encode(LogLines(lines=batch))) <= FRAME_BYTES_MAX
    assert len(batch) + len(forwarder._queue) < lines


async def test_batches_fit_a_frame() -> None:
    forwarder = Forwarder(lambda: 0.0)
    for number in range(60):
        forwarder.put(_line("x" * 60_000, f"alc_{number % 4}"))
    while forwarder._queue:
        batch = await forwarder.take()
        assert sum(len(line.text) for line in batch) < 2 << 20


@pytest.mark.parametrize("size", [0, 1])
def test_an_empty_line_is_a_line(size: int) -> None:
    assert [line.text for line in _lines().feed(b"x" * size + b"\n")] == ["x" * size]


def test_a_flood_of_empty_lines_is_cut_and_counted() -> None:
    found = [line.text for line in _lines().feed(b"\n" * 30_000 + b"after")]
    assert len(found) == logs._CHUNK_LINES_MAX + 1
    assert found[-1] == f"[{30_000 - logs._CHUNK_LINES_MAX} lines dropped]"
