"""Days and months of reports, always UTC's. Pure."""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Final

from penstock.kit.errors import Invalid, NotFound

DAYS_MAX: Final = 400
_FIRST: Final = date(2000, 1, 1)
_LAST: Final = date(2999, 12, 31)
_DAY: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_MONTH: Final = re.compile(r"(2[0-9]{3})-(0[1-9]|1[0-2])", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """Whole days, the last one included."""

    from_day: date
    to_day: date

    @classmethod
    def of(cls, from_day: str | None, to_day: str | None, *, today: date) -> "Period":
        """What was asked for; without a beginning from the first of the month, at the latest this one; without an
        end until today."""
        begins = _day("from", from_day)
        last = _day("to", to_day) or max(today, begins or today)
        first = begins or min(last, today).replace(day=1)
        for name, day in (("to", last), ("from", first)):
            if not _FIRST <= day <= _LAST:
                raise Invalid(f"{name} must be a day between {_FIRST} and {_LAST}", field=name)
        if first > last:
            raise Invalid(f"from must not be after to ({last})", field="from")
        if (last - first).days >= DAYS_MAX:
            raise Invalid(f"from and to must be at most {DAYS_MAX} days apart", field="from")
        return cls(from_day=first, to_day=last)

    @classmethod
    def month(cls, text: str) -> "Period":
        """The month, such as 2026-11, or NotFound."""
        match = _MONTH.fullmatch(text)
        if match is None:
            raise NotFound("no invoice of this month; months look like 2026-11")
        first = date(int(match[1]), int(match[2]), 1)
        return cls(from_day=first, to_day=(first + timedelta(days=31)).replace(day=1) - timedelta(days=1))

    @property
    def since(self) -> datetime:
        """When it begins."""
        return datetime.combine(self.from_day, time.min, UTC)

    @property
    def until(self) -> datetime:
        """When it is over."""
        return datetime.combine(self.to_day + timedelta(days=1), time.min, UTC)


def _day(name: str, text: str | None) -> date | None:
    if text is None:
        return None
    try:
        if not _DAY.fullmatch(text):
            raise ValueError
        return date.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{name} must be a day such as 2026-11-16", field=name) from error


def month_of(day: date) -> str:
    """The month of a day, as invoices are named."""
    return f"{day:%Y-%m}"
