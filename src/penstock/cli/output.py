"""What a command prints: tables for people, JSON and CSV for programs.

Everything foreign is made safe first. Colour and movement exist only on a terminal, on standard error where they
could mix with data.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from penstock.cli.text import cell, clean, clean_json, csv_cell

if TYPE_CHECKING:
    import msgspec

T = TypeVar("T")

#: Wide enough that no cell is ever folded: an id in two pieces cannot be copied. Terminals wrap long lines themselves.
_WIDTH_UNBOUNDED: Final = 10_000
#: A longer list of one object's has a line for each entry.
_LIST_CHARS_MAX: Final = 90


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column: its heading and how to read its value. In tables of many, text is cut after `chars_max`."""

    title: str
    read: Callable[[T], object]
    chars_max: int | None = None

    def brief(self, item: T) -> object:
        """The value for a table of many."""
        value = self.read(item)
        if self.chars_max is None or not isinstance(value, str):
            return value
        line = value.partition("\n")[0][: self.chars_max]
        return value if line == value else line[: self.chars_max - 1].rstrip() + "…"


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
        brief = self.format is Format.TABLE
        read = [column.brief if brief else column.read for column in columns]
        self.rows([column.title for column in columns], ([value(item) for value in read] for item in items))

    def item(self, item: "msgspec.Struct", columns: Sequence[Column[Any]]) -> None:
        """One object: a line for each of its values, but in CSV a heading and one line."""
        if self.format is Format.JSON:
            self.json(item)
        elif self.format is Format.CSV:
            self.items([item], columns)
        else:
            pairs = ((column.title, column.read(item)) for column in columns)
            self.table(None, [row for title, value in pairs for row in _lines(title, value)])

    def rows(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Rows with headings, as a table or as CSV."""
        if self.format is Format.CSV:
            self._csv(titles, rows)
        else:
            self.table(titles, rows)

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

    def table(self, titles: Sequence[str] | None, rows: Iterable[Sequence[object]]) -> None:
        """Aligned columns."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        tty = sys.stdout.isatty()
        console = Console(highlight=False, width=_WIDTH_UNBOUNDED, force_terminal=tty)
        show = titles is not None and self.heading
        table = Table(box=None, pad_edge=False, show_header=show, header_style="bold", padding=(0, 3, 0, 0))
        for position, title in enumerate(titles or ("", "")):
            style = "bold" if titles is None and position == 0 else ""
            table.add_column(title, style=style)
        for row in rows:
            table.add_row(*(Text(clean(cell(value))) for value in row))
        if table.row_count or show:
            with console.capture() as captured:
                console.print(table)
            for line in captured.get().splitlines():
                self.line(line.rstrip())

    def _csv(self, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        import csv

        writer = csv.writer(sys.stdout, lineterminator="\n")
        if self.heading:
            writer.writerow([title.lower().replace(" ", "_") for title in titles])
        for row in rows:
            writer.writerow([csv_cell(cell(value, bare=True)) for value in row])


def _lines(title: str, value: object) -> list[list[object]]:
    """A value beside its title: nothing for none, a long list and a text of many lines on lines of their own."""
    if value in (None, "", [], {}):
        return []
    entries: list[object] = [value]
    if isinstance(value, str):
        entries = [*value.splitlines()]
    elif isinstance(value, list) and len(cell(value)) > _LIST_CHARS_MAX:
        entries = value
    return [["" if number else title, entry] for number, entry in enumerate(entries)]


def notice(text: str) -> None:
    """A word to the person, on standard error."""
    sys.stderr.write(clean(text) + "\n")
    sys.stderr.flush()
