from datetime import UTC, date, datetime

import pytest

from penstock.billing.periods import DAYS_MAX, Period, month_of
from penstock.billing.service.invoices import price_text, quantity_text, rounded_cents
from penstock.kit.errors import Invalid, NotFound

TODAY = date(2026, 11, 16)


@pytest.mark.parametrize(
    ("asked", "days"),
    [
        ((None, None), ("2026-11-01", "2026-11-16")),
        (("2026-10-03", None), ("2026-10-03", "2026-11-16")),
        ((None, "2026-02-28"), ("2026-02-01", "2026-02-28")),
        ((None, "2026-12-24"), ("2026-11-01", "2026-12-24")),
        (("2026-12-24", None), ("2026-12-24", "2026-12-24")),
        (("2026-03-05", "2026-03-05"), ("2026-03-05", "2026-03-05")),
    ],
)
def test_a_period_is_this_month_unless_told(asked: tuple[str | None, str | None], days: tuple[str, str]) -> None:
    found = Period.of(*asked, today=TODAY)
    assert (str(found.from_day), str(found.to_day)) == days
    assert found.since < found.until


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (("2026-02-30", None), "from"),
        ((None, "20261116"), "to"),
        ((None, "2026-11-16T00:00"), "to"),
        (("2026-W01-1", None), "from"),
        ((None, "9999-12-31"), "to"),
        ((None, "2099-01-01"), "from"),
        (("0001-01-01", "2026-01-01"), "from"),
        (("2026-02-01", "2026-01-01"), "from"),
        (("2024-01-01", "2026-01-01"), "from"),
        (("", None), "from"),
        (("\u0662026-01-01", None), "from"),
    ],
)
def test_other_days_are_refused_by_name(asked: tuple[str | None, str | None], field: str) -> None:
    with pytest.raises(Invalid, match=field) as refused:
        Period.of(*asked, today=TODAY)
    assert refused.value.field == field


def test_the_longest_period_is_allowed() -> None:
    assert DAYS_MAX == 400
    assert Period.of("2025-01-01", "2026-02-04", today=TODAY).from_day == date(2025, 1, 1)


@pytest.mark.parametrize(("month", "last"), [("2026-02", 28), ("2028-02", 29), ("2026-12", 31), ("2999-12", 31)])
def test_a_month_has_all_its_days(month: str, last: int) -> None:
    found = Period.month(month)
    assert (found.from_day.day, found.to_day.day, month_of(found.to_day)) == (1, last, month)
    assert found.until.day == 1
    assert found.since == datetime(found.from_day.year, found.from_day.month, 1, tzinfo=UTC)


@pytest.mark.parametrize("month", ["", "2026", "2026-00", "2026-13", "1999-12", "2026-1", "2026-011", "xxx"])
def test_other_months_are_absent(month: str) -> None:
    with pytest.raises(NotFound):
        Period.month(month)


@pytest.mark.parametrize(
    ("amount", "cents"), [(0, 0), (4_999, 0), (5_000, 1), (14_999, 1), (3_490_000, 349), (-5_000, -1), (-4_999, 0)]
)
def test_cents_are_rounded_at_the_half(amount: int, cents: int) -> None:
    assert rounded_cents(amount) == cents


def test_quantities_and_prices_are_readable() -> None:
    hour = 3_600_000_000
    assert (quantity_text(hour * 3 // 2, hour), price_text(3_490_000, hour)) == ("1.5000 h", "$3.49 per h")
    assert (quantity_text(1_234_567, 1_000_000), price_text(200_000, 1_000_000)) == ("1,234,567", "$0.20 per 1,000,000")
    assert price_text(1, 1) == "$0.000001 each"
