"""Foreign text made safe to show: no character of it can steer a terminal, a spreadsheet or the reader's eye."""

import re
from datetime import UTC, datetime
from typing import Final

from penstock.cli.errors import CliError
from penstock.kit.text import Count, Figure, Hours, Money, clean, csv_cell, decimal, dollars

__all__ = [
    "Count",
    "Hours",
    "Money",
    "cell",
    "clean",
    "clean_json",
    "csv_cell",
    "decimal",
    "dollars",
    "microusd",
    "seconds",
    "size",
]

#: The most that the API takes at once.
AMOUNT_MAX_MICROUSD: Final = 1_000_000_000_000

#: What must not stand inside JSON, where line breaks stand between values.
_UNSAFE_JSON: Final = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
_AMOUNT: Final = re.compile(r"(?P<sign>-?)\$?(?P<whole>[0-9]{1,40})(?:\.(?P<rest>[0-9]{1,6}))?", re.ASCII)
_PLACES: Final = {2: "two", 6: "six"}


def clean_json(text: str) -> str:
    """JSON with the same meaning and without unsafe characters."""
    return _UNSAFE_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def cell(value: object, *, bare: bool = False) -> str:
    """A value as people read it; bare, without the units that keep programs from reading a number."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return Figure(value)
    if isinstance(value, float):
        return _fraction(value, "" if bare else ",")
    if isinstance(value, Money | Hours | Count):
        return value.bare if bare else str(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    if isinstance(value, dict):
        return " ".join(f"{key}={cell(item, bare=bare)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(cell(item, bare=bare) for item in value)
    return str(value)


def _fraction(value: float, separator: str) -> Figure:
    """A number with as many decimals as it needs, six at most."""
    return Figure(f"{value:{separator}.6f}".rstrip("0").rstrip("."))


def size(count: int) -> str:
    """Bytes in a unit of which there are few."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.4g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"


def microusd(text: str, *, field: str, at_least: int = 0, places: int = 6) -> int:
    """An amount such as 25, 3.49 or $0.000001 as an exact number of micro-dollars, within the API's bounds."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or len(found["rest"] or "") > places:
        wanted = f"dollars with up to {_PLACES[places]} decimals, such as 3.49"
        raise CliError(f"{field} must be {wanted}, not {clean(text)[:40]!r}", field=field)
    amount = int(found["whole"]) * 1_000_000 + int((found["rest"] or "").ljust(6, "0"))
    if found["sign"] or not at_least <= amount <= AMOUNT_MAX_MICROUSD:
        bounds = f"{dollars(at_least)} to {dollars(AMOUNT_MAX_MICROUSD)}"
        raise CliError(f"{field} must be {bounds}, not {clean(text)[:40]!r}", field=field)
    return amount


def seconds(text: str, *, field: str) -> int:
    """A time such as 90s, 30m, 2h or 1d."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    if found is None:
        raise CliError(f"{field} must be a number and s, m, h or d, such as 30m, not {clean(text)[:40]!r}", field=field)
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
