"""What a command prints: tables for people, JSON and CSV for programs.

Everything foreign is made safe first. Colour and movement exist only on a terminal, on standard error where they
could mix with data.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.cli import tables
from penstock.cli.tables import EXTRA, ID, NEEDED, NORMAL
from penstock.cli.text import cell, clean, clean_json, csv_cell

if TYPE_CHECKING:
    import msgspec

__all__ = ["EXTRA", "ID", "NEEDED", "NORMAL", "Column", "Format", "Output", "notice", "terminal_chars"]

T = TypeVar("T")

_BOLD: Final = "\x1b[1m{}\x1b[0m"
_GAP: Final = " " * 3
#: A longer list of one object's has a line for each entry.
_LIST_CHARS_MAX: Final = 90


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column: its heading, how to read its value, and its rank, which says how it gives way on a narrow terminal
    (see `tables.fit`)."""

    title: str
    read: Callable[[T], object]
    rank: int = NORMAL


@dataclass(frozen=True, slots=True)
class Output:
    """Prints results in the chosen format."""

    format: Format = Format.TABLE
    heading: bool = True

    def items(self, items: Iterable[T], columns: Sequence[Column[T]]) -> None:
        """A list; in JSON as the API's page, with everything on it."""
        if self.format is Format.JSON:
            self.json({"items": list(items), "next_cursor": None})
            return
        rows = ([column.read(item) for column in columns] for item in items)
        self.rows([column.title for column in columns], rows, ranks=[column.rank for column in columns])

    def item(self, item: "msgspec.Struct", columns: Sequence[Column[Any]]) -> None:
        """One object: a line for each of its values, but in CSV a heading and one line."""
        if self.format is Format.JSON:
            self.json(item)
        elif self.format is Format.CSV:
            self.items([item], columns)
        else:
            pairs = ((column.title, column.read(item)) for column in columns)
            self._details([row for title, value in pairs for row in _lines(title, value)])

    def rows(
        self, titles: Sequence[str], rows: Iterable[Sequence[object]], *, ranks: Sequence[int] | None = None
    ) -> None:
        """Rows with headings, as a table or as CSV."""
        if self.format is Format.CSV:
            self._csv(titles, rows)
        else:
            self._table(titles, rows, ranks or [NORMAL] * len(titles))

    def json(self, value: object) -> None:
        """A value as indented JSON."""
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        self.line(clean_json(text))

    def json_line(self, value: object) -> None:
        """A value as JSON on one line, at once: for streams."""
        import msgspec

        self.line(clean_json(msgspec.json.encode(value).decode()))
        sys.stdout.flush()

    def line(self, text: str) -> None:
        """A line that is safe already."""
        sys.stdout.write(text + "\n")

    def _table(self, titles: Sequence[str], rows: Iterable[Sequence[object]], ranks: Sequence[int]) -> None:
        """Aligned columns: all of them as they are, but on a terminal such that each row is one line of it."""
        terminal = sys.stdout.isatty()
        texts = [[_text(value, brief=terminal) for value in row] for row in rows]
        heading = [*titles] if self.heading else None
        laid_out, missing = tables.lay_out(heading, texts, ranks, terminal_chars() if terminal else None)
        if laid_out and heading and terminal:
            laid_out[0] = _BOLD.format(laid_out[0])
        for line in laid_out:
            self.line(line)
        if missing:
            named = ", ".join(titles[at] for at in missing)
            notice(f"the terminal is too narrow for: {named}; -o csv and -o json have everything")

    def _details(self, rows: Sequence[tuple[str, object]]) -> None:
        """A title and a value on each line; on a terminal, long values go on below themselves."""
        if not rows:
            return
        terminal = sys.stdout.isatty()
        begin = max(tables.width(title) for title, _ in rows) + len(_GAP)
        for title, value in rows:
            name = title + " " * (begin - tables.width(title))
            text = clean(cell(value))
            parts = _wrapped(text, terminal_chars() - begin) if terminal else [text]
            self.line(((_BOLD.format(name) if terminal else name) + parts[0]).rstrip())
            for part in parts[1:]:
                self.line(" " * begin + part)

    def _csv(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        if self.heading:
            writer.writerow([title.lower().replace(" ", "_") for title in titles])
        for row in rows:
            writer.writerow([csv_cell(cell(value, bare=True)) for value in row])


def _text(value: object, *, brief: bool) -> str:
    """A cell; brief, its first line."""
    text = cell(value)
    first, separator, _ = text.partition("\n")
    return clean(first + "…" if brief and separator else text)


def _wrapped(text: str, chars: int) -> list[str]:
    """Lines that end between words; a word alone is never broken, so that an id can be copied."""
    import textwrap

    return textwrap.wrap(text, max(chars, 20), break_long_words=False, break_on_hyphens=False) or [""]


def terminal_chars() -> int:
    """The columns of the terminal."""
    import shutil

    return shutil.get_terminal_size().columns


def _lines(title: str, value: object) -> list[tuple[str, object]]:
    """A value beside its title: nothing for none, a long list and a text of many lines on lines of their own."""
    if value in (None, "", [], {}):
        return []
    entries: list[object] = [value]
    if isinstance(value, str):
        entries = [*value.splitlines()]
    elif isinstance(value, list) and len(cell(value)) > _LIST_CHARS_MAX:
        entries = value
    return [("" if number else title, entry) for number, entry in enumerate(entries)]


def notice(text: str) -> None:
    """A word to the person, on standard error."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()
