"""The script `penstock`: Ctrl-C while the command line is still being imported ends it quietly."""

import sys

_INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it."""
    try:
        from penstock.command import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
