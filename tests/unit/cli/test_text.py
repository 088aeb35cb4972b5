from datetime import UTC, datetime, timedelta, timezone

import pytest
import typer

from penstock.cli import text
from penstock.cli.allocations import pairs
from penstock.cli.errors import CliError
from penstock.cli.skus import microusd
from penstock.cli.text import Count, Hours, Money, cell, clean, clean_json, csv_cell, decimal, dollars, size


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain \u00fcml\u00e4ut \u65e5\u672c", "plain \u00fcml\u00e4ut \u65e5\u672c"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("a\nb\rc\td\x00", "a\\x0ab\\x0dc\\x09d\\x00"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("safe\u202egnp.exe", "safe\\u202egnp.exe"),
        ("\u2066hidden\u2069\u200b", "\\u2066hidden\\u2069\\u200b"),
        ("\ud800", "\\ud800"),
    ],
)
def test_no_character_steers_the_terminal(given: str, shown: str) -> None:
    assert clean(given) == shown


def test_json_keeps_its_meaning_and_loses_its_tricks() -> None:
    assert clean_json('{\n "a": "\x9b\u202e"\n}') == '{\n "a": "\\u009b\\u202e"\n}'


@pytest.mark.parametrize("start", list("=+-@\t\r"))
def test_no_cell_is_a_formula(start: str) -> None:
    assert csv_cell(f"{start}cmd()").startswith("'")


def test_values_are_shown_as_people_read_them() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    shown = [cell(value) for value in (None, True, False, 3, noon, {"a": 1, "b": None}, [1, 2], noon.astimezone(UTC))]
    assert shown == ["", "yes", "no", "3", "2026-01-01 10:00:00Z", "a=1 b=", "1 2", "2026-01-01 10:00:00Z"]


@pytest.mark.parametrize(
    ("amount", "shown"), [(0, "$0.00"), (3_490_000, "$3.49"), (1, "$0.000001"), (12_500_000, "$12.50")]
)
def test_money_is_exact(amount: int, shown: str) -> None:
    assert dollars(amount) == shown
    assert microusd(shown) == amount
    assert text.microusd(shown, field="amount") == amount
    assert dollars(-amount) == (f"-{shown}" if amount else shown)
    assert csv_cell(decimal(-amount)) == decimal(-amount)


@pytest.mark.parametrize("bad", ["", "-1", "1.2.3", "1e3", "0.0000001", "\u0663", "1_0", "9999999"])
def test_other_prices_are_refused(bad: str) -> None:
    with pytest.raises(typer.BadParameter):
        microusd(bad)
    with pytest.raises(CliError):
        text.microusd(bad, field="amount")


@pytest.mark.parametrize(
    ("value", "shown", "bare"),
    [
        (Money(-1_234_567_890_000), "-$1,234,567.89", "-1234567.89"),
        (Hours(3_600_000_000), "1.0000 h", "1.0000"),
        (Hours(120_469_862), "0.03346385 h", "0.03346385"),
        (Hours(3_600_000_000_000), "1,000.0000 h", "1000.0000"),
        (Count(1_234_567), "1,234,567", "1234567"),
        ({"a": Count(1000)}, "a=1,000", "a=1000"),
    ],
)
def test_numbers_have_units_for_people_only(value: object, shown: str, bare: str) -> None:
    assert cell(value) == shown
    assert cell(value, bare=True) == bare


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        ("-5", "amount must be $0.00 to $1,000,000.00, not '-5'"),
        ("99999999999", "amount must be $0.00 to $1,000,000.00"),
        ("1.2345678", "up to six decimals"),
    ],
)
def test_an_amount_is_refused_for_its_own_reason(amount: str, says: str) -> None:
    with pytest.raises(CliError) as refused:
        text.microusd(amount, field="amount")
    assert says in refused.value.message


def test_sizes_have_units() -> None:
    assert [size(0), size(1536), size(80 << 30), size(1 << 45)] == ["0 B", "1.5 KiB", "80 GiB", "32 TiB"]


def test_pairs_are_split_once_and_never_twice() -> None:
    assert pairs(["A=1=2", "B="], option="--env") == {"A": "1=2", "B": ""}
    for bad in (["A"], ["=1"], ["A=1", "A=2"]):
        with pytest.raises(typer.BadParameter):
            pairs(bad, option="--env")
