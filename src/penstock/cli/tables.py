"""Aligned columns that fit a width: the least important give way first, and what names a row is never cut."""

from collections.abc import Sequence
from typing import Final

#: Ranks of columns: what names a row, what one must read, what one wants to, and texts that are nice to have.
ID: Final = -1
NEEDED: Final = 0
NORMAL: Final = 1
EXTRA: Final = 2
#: A column is cut to no less than this.
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


def fit(natural: Sequence[int], ranks: Sequence[int], chars_max: int, empty: Sequence[bool]) -> list[int]:
    """The widths of columns such that all fit; 0 for one that is left out. Those that are empty give way first, then
    those of a high rank, of equal ones those on the right. Texts are cut before they are left out. What must be read is
    cut when nothing else is left, and what names a row never: a line may get too wide for that alone."""
    named = [at for at, rank in enumerate(ranks) if rank == ID] or [0]
    places = [at for at in reversed(range(len(natural))) if at not in named]
    read = [at for at in places if ranks[at] == NEEDED]
    optional = sorted((at for at in places if at not in read), key=lambda at: (not empty[at], -ranks[at]))
    least = [
        min(chars, _CHARS_MIN) if at in optional and ranks[at] == EXTRA else chars for at, chars in enumerate(natural)
    ]
    widths = _shown(least, optional, chars_max)
    for at in read:
        widths[at] -= min(max(widths[at] - _CHARS_MIN, 0), max(_total(widths) - chars_max, 0))
    for at in read:
        widths[at] = 0 if _total(widths) > chars_max else widths[at]
    for at in reversed(optional):
        if widths[at]:
            widths[at] += min(natural[at] - widths[at], max(chars_max - _total(widths), 0))
    return widths


def _shown(least: Sequence[int], optional: Sequence[int], chars_max: int) -> list[int]:
    """The least widths, without as many optional columns as it takes. A narrow one may fit where a wide one did not."""
    widths = [*least]
    for at in optional:
        widths[at] = 0 if _total(widths) > chars_max else widths[at]
    for at in reversed(optional):
        if not widths[at] and _total([*widths, least[at]]) <= chars_max:
            widths[at] = least[at]
    return widths


def _total(widths: Sequence[int]) -> int:
    shown = [each for each in widths if each]
    return sum(shown) + _GAP * (len(shown) - 1)


def lay_out(
    heading: Sequence[str] | None, rows: Sequence[Sequence[str]], ranks: Sequence[int], chars_max: int | None
) -> tuple[list[str], list[int]]:
    """A line for the heading and for each row, and the places of columns that have values and were left out. Without
    `chars_max` all of it."""
    shown = [heading, *rows] if heading is not None else rows
    if not shown:
        return [], []
    widths = [max(map(width, column)) for column in zip(*shown, strict=True)]
    empty = [not any(row[at] for row in rows) for at in range(len(widths))]
    if chars_max is not None:
        widths = fit(widths, ranks, chars_max, empty)
    missing = [at for at, chars in enumerate(widths) if not chars and not empty[at]]
    return [_line(row, widths) for row in shown], missing


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [(cut(text, chars), chars) for text, chars in zip(row, widths, strict=True) if chars]
    return (" " * _GAP).join(text + " " * (chars - width(text)) for text, chars in cells).rstrip()
