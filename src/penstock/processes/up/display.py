"""What `penstock up` says while things start: a live table on a terminal, plain lines elsewhere."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_REFRESH_S: Final = 0.1


@dataclass(slots=True)
class _Line:
    name: str
    began: float
    took_s: float | None = None
    failed: bool = False


class Display:
    """Steps that begin and end; on a terminal they turn until they are done."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._lines: dict[str, _Line] = {}

    @asynccontextmanager
    async def step(self, name: str) -> AsyncIterator[None]:
        """Show that `name` is under way, then how long it took."""
        line = self._lines[name] = _Line(name, time.monotonic())
        try:
            yield
        except BaseException:
            line.failed = True
            raise
        line.took_s = time.monotonic() - line.began
        if self._live is None:
            self.say(f"{name}: ready after {line.took_s:.1f} s")

    def say(self, text: str) -> None:
        """One line, above the table when there is one. Who reads it may have gone, which must end nothing."""
        with suppress(OSError, SystemExit):
            self.console.print(Text(text))

    @asynccontextmanager
    async def live(self) -> AsyncIterator[None]:
        """Draw the table while inside; without a terminal, nothing is drawn."""
        if not self.console.is_terminal:
            yield
            return
        # Drawn from the event loop: a drawing thread could hold a lock at the moment a child is forked.
        with Live(get_renderable=self._table, console=self.console, auto_refresh=False) as self._live:
            turning = asyncio.create_task(self._turn(self._live))
            try:
                yield
            finally:
                turning.cancel()
                self._live.refresh()
        self._live = None

    async def _turn(self, live: Live) -> None:
        while True:
            live.refresh()
            await asyncio.sleep(_REFRESH_S)

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 1))
        for line in self._lines.values():
            table.add_row(self._mark(line), line.name, self._time(line))
        return Group(table)

    def _mark(self, line: _Line) -> RenderableType:
        if line.failed:
            return Text("✗", style="red")
        return Text("✓", style="green") if line.took_s is not None else _SPINNER

    def _time(self, line: _Line) -> Text:
        return Text(f"{line.took_s:.1f} s" if line.took_s is not None else "", style="dim")


_SPINNER: Final = Spinner("dots", style="cyan")
