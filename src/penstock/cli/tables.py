"""Aligned columns that fit a width: the least important are cut first, and left out when cutting does not help."""

from collections.abc import Sequence
from typing import Final

#: A column is cut to no less than this before others are.
_CHARS_MIN: Final = 8
_GAP: Final = 3
_ELLIPSIS: Final = "…"


def width(text: str) -> int:
    """How many places of a terminal a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cut(text: str, chars: int) -> str:
    """The text, or its beginning and an ellipsis."""
    if width(text) <= chars:
        return text
    while text and width(text) > chars - 1:
        text = text[:-1]
    return (text.rstrip() + _ELLIPSIS)[:chars]


def fit(natural: Sequence[int], ranks: Sequence[int], chars_max: int) -> list[int]:
    """The widths of columns such that all fit; 0 for one that is left out. Those of a high rank give way first, of
    equal ones those on the right; the first column gives way last."""
    order = sorted(range(1, len(natural)), key=lambda at: (ranks[at], at), reverse=True)
    least = [natural[0], *(min(chars, _CHARS_MIN) for chars in natural[1:])]
    for at in order:
        if _total(least) > chars_max:
            least[at] = 0
    widths = [chars if least[at] else 0 for at, chars in enumerate(natural)]
    for at in order:
        over = _total(widths) - chars_max
        widths[at] = max(least[at], widths[at] - max(over, 0))
    widths[0] = min(widths[0], chars_max)
    return widths


def _total(widths: Sequence[int]) -> int:
    shown = [each for each in widths if each]
    return sum(shown) + _GAP * (len(shown) - 1)


def lines(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """The rows, each as one line."""
    return [_line(row, widths) for row in rows]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [(cut(text, chars), chars) for text, chars in zip(row, widths, strict=True) if chars]
    return (" " * _GAP).join(text + " " * (chars - width(text)) for text, chars in cells).rstrip()
