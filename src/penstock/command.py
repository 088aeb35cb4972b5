"""The entry point `penstock`: the command line that speaks HTTP, and the processes that answer it."""

import os
import sys
from typing import Final

import typer

from penstock.cli.app import ENTRIES, app, run
from penstock.cli.lazy import Entry
from penstock.cli.session import group

_PROCESSES: Final = {
    "up": "Start the whole cloud here.",
    "down": "Stop the local cloud.",
    "status": "Show whether the local cloud is ready.",
    "serve": "Run one process.",
    "bootstrap": "Make the first administrator.",
    "db": "The database's schema.",
    "pki": "The control plane's keys and certificates.",
}


def main() -> None:
    """Run the command line of this process."""
    ENTRIES.update({name: Entry(text, _processes, inside=True) for name, text in _PROCESSES.items()})
    sys.exit(run(app, sys.argv[1:], os.environ))


def _processes() -> typer.Typer:
    from penstock.processes import commands

    loaded = group("process", "Run Penstock itself.")
    commands.register(loaded)
    return loaded


if __name__ == "__main__":
    main()
