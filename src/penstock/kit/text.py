"""Foreign text made safe to show, and money as people read it: the same on the server's pages and the command line."""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

#: Control characters of both sets, line and paragraph separators, and everything that changes the writing direction.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")
_US_PER_HOUR: Final = 3_600_000_000


class Figure(str):
    """A number as text. We made it ourselves, so that no spreadsheet needs to be protected from it."""

    __slots__ = ()


def clean(text: str) -> str:
    """`text` with unsafe characters spelt out."""
    return _UNSAFE.sub(_spelt, text)


def _spelt(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def csv_cell(text: str) -> str:
    """A cell that no spreadsheet takes for a formula. A figure is none, whatever its sign; a name that looks like one
    may be."""
    if isinstance(text, Figure):
        return text
    return clean("'" + text if text.startswith(_FORMULA) else text)


def dollars(microusd: int) -> str:
    """Money, exact to the micro-dollar."""
    sign = "-" if microusd < 0 else ""
    whole, _, rest = decimal(abs(microusd)).partition(".")
    return f"{sign}${int(whole):,}.{rest}"


def decimal(microusd: int) -> Figure:
    """The same as a bare number: two decimals, or as many as it takes to be exact."""
    whole, rest = divmod(abs(microusd), 1_000_000)
    cents = f"{rest:06d}".rstrip("0")
    return Figure(f"{'-' if microusd < 0 else ''}{whole}.{cents:0<2}")


@dataclass(frozen=True, slots=True)
class Money:
    """An amount that people read in dollars, and programs as a bare number."""

    microusd: int

    def __str__(self) -> str:
        return dollars(self.microusd)

    @property
    def bare(self) -> Figure:
        """The number alone."""
        return decimal(self.microusd)


@dataclass(frozen=True, slots=True)
class Hours:
    """A time in hours, with as many decimals as it takes to recompute what it cost from it."""

    us: int

    def __str__(self) -> str:
        return f"{self._number(',')} h"

    @property
    def bare(self) -> Figure:
        """The number alone."""
        return Figure(self._number(""))

    def _number(self, separator: str) -> str:
        whole, _, rest = f"{Decimal(self.us) / _US_PER_HOUR:{separator}.8f}".partition(".")
        return f"{whole}.{rest.rstrip('0'):0<4}"


@dataclass(frozen=True, slots=True)
class Count:
    """A number of units that may be large."""

    number: int

    def __str__(self) -> str:
        return f"{self.number:,}"

    @property
    def bare(self) -> Figure:
        """The number alone."""
        return Figure(self.number)
