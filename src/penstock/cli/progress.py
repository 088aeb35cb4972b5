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
        yield notice
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    # The status restores the cursor on every way out, an interrupt included.
    with console.status(Text(clean(first))) as status:

        def report(text: str) -> None:
            status.update(Text(clean(text)))

        yield report
