"""A copy of a Postgres cluster of ours: of a running one by its own base backup, of a stopped one as it lies there.

A physical copy keeps transaction ids, by which events and audit rows are ordered; a logical dump would not.
"""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.embedded import binaries
from penstock.kit.errors import Unavailable

_TIMEOUT_S: Final = 24 * 3600.0
_USER: Final = "penstock"
#: Lines of postmaster.pid.
_PID_LINE, _PORT_LINE = 0, 3


def copy(folder: Path, password_file: Path, target: Path, *, held: bool) -> None:
    """Write a consistent copy of the cluster in `folder` to `target`, which must not exist. `held` says that the caller
    keeps a stopped cluster from being started meanwhile; else only a running one can be copied."""
    port = _port(folder)
    if port is None and not held:
        raise Unavailable("the database is starting or stopping: try again in a moment")
    if port is None:
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("postmaster.pid", "postmaster.opts"))
        return
    command = [
        *(str(binaries.postgres_bin() / "pg_basebackup"), "--no-password", "--checkpoint=fast", "--wal-method=stream"),
        *("--host", "127.0.0.1", "--port", str(port), "--username", _USER, "--pgdata", str(target)),
    ]
    environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "PGPASSWORD": password_file.read_text().strip()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise Unavailable(f"the database could not be copied: {done.stderr.strip()[-500:]}")


def _port(folder: Path) -> int | None:
    """Where the cluster's server listens; none when it does not run."""
    try:
        lines = (folder / "postmaster.pid").read_text().splitlines()
        # Another's process is there too.
        with suppress(PermissionError):
            os.kill(int(lines[_PID_LINE]), 0)
        return int(lines[_PORT_LINE])
    except (OSError, ValueError, IndexError):
        return None
