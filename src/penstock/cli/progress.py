"""Shows on standard error how something moves: a spinner on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.cli.output import notice
from penstock.cli.text import clean

Report = Callable[[str], None]


@contextmanager
def progress(first: str) -> Iterator[Report]:
    """Report with the function that this yields."""
    if not sys.stderr.isatty():
        notice(first)
        yield _changes(first)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    # The status restores the cursor on every way out, an interrupt included.
    with console.status(Text(clean(first))) as status:

        def report(text: str) -> None:
            status.update(Text(clean(text)))

        yield report


def _changes(first: str) -> Report:
    """Lines, each of them once."""
    said = {first}

    def report(text: str) -> None:
        if text not in said:
            said.add(text)
            notice(text)

    return report


@contextmanager
def transfer(what: str, total: int | None) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar for many bytes, on a terminal only: tell it how many are done, and how many there are once known."""
    if not sys.stderr.isatty():
        yield _ignore, _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True))
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, TransferSpeedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(clean(what), total=total)
        yield lambda done: bar.update(task, completed=done), lambda size: bar.update(task, total=size)


def _ignore(_: int) -> None:
    """Nobody looks."""
