"""The Python environment that tenants' code sees on the local node: never Penstock's own."""

import sys
import venv
from pathlib import Path

from penstock.processes.up.folder import DataFolder


def environment(folder: DataFolder) -> Path:
    """The one beside our own environment, where `make install` puts it; else one made in the data folder."""
    beside = Path(sys.prefix).with_name(".tenant")
    if Path(sys.prefix).name == ".venv" and (beside / "bin" / "python").exists():
        return beside
    made = folder.path / "tenant"
    if not (made / "bin" / "python").exists():
        venv.create(made, clear=True, symlinks=True)
    return made
