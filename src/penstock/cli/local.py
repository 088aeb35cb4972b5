"""The instance that runs on this machine: where its data is, and the address and key that `up` left there."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from penstock.cli.errors import CliError

INSTANCE_FILE: Final = "instance.json"
_FILE_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Instance:
    """A running local instance."""

    folder: Path
    api: str
    gateway: str
    key: str = field(repr=False)
    pid: int


def data_folder(flag: str | None, environ: Mapping[str, str]) -> Path:
    """Where the local instance keeps everything: `--data`, `PENSTOCK_DATA`, beside the environment that this runs
    from, or the user's data folder."""
    if chosen := flag or environ.get("PENSTOCK_DATA"):
        return Path(chosen).expanduser().absolute()
    if Path(sys.prefix).name == ".venv":
        return Path(sys.prefix).parent / ".penstock"
    return user_folder(environ, "XDG_DATA_HOME", ".local/share") / "penstock"


def user_folder(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    """A folder of the user's by the XDG rules; relative values count as unset there."""
    if (chosen := environ.get(variable, "")) and Path(chosen).is_absolute():
        return Path(chosen)
    home = environ.get("HOME") or environ.get("USERPROFILE")
    if not home:
        raise CliError(f"cannot find your files: set HOME or {variable}", code="no_home", field="HOME")
    return Path(home) / below_home


def instance(folder: Path) -> Instance | None:
    """What `up` wrote there; none if it does not run, or the file is not ours to read."""
    path = folder / INSTANCE_FILE
    try:
        with path.open("rb") as file:
            values: Any = json.loads(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return _parse(folder, values)


def _parse(folder: Path, values: Any) -> Instance | None:
    if not isinstance(values, dict):
        return None
    given = cast("dict[str, Any]", values)
    api, gateway, key, pid = (given.get(name) for name in ("api", "gateway", "key", "pid"))
    if isinstance(api, str) and isinstance(gateway, str) and isinstance(key, str) and isinstance(pid, int):
        return Instance(folder, api, gateway, key, pid)
    return None
