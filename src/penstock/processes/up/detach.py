"""Starts a supervisor that outlives who asked for it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from rich.console import Console

from penstock.kit.errors import Conflict, Invalid, PenstockError, Unavailable
from penstock.processes.up.banner import Ready
from penstock.processes.up.folder import AlreadyRunning, DataFolder

_START_S: Final = 240.0
_POLL_S: Final = 0.1
#: How a supervisor's exit code is told again by who started it.
_AS: Final[dict[int, type[PenstockError]]] = {1: Invalid, 5: Conflict}


def detached(folder: DataFolder, arguments: Sequence[str], environ: Mapping[str, str]) -> Ready:
    """Start a supervisor of its own; what there is to tell when everything is ready."""
    folder.prepare()
    if holder := folder.holder():
        raise AlreadyRunning(
            f"{folder.path} is in use by another `penstock up` (pid {holder}); stop it with `penstock down`,"
            " or name another folder with --data"
        )
    folder.forget()
    log = folder.log / "up.log"
    with open(log, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.command", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environ),
            start_new_session=True,
        )
    try:
        return _until_ready(folder, supervisor, Console(stderr=True, highlight=False))
    except BaseException:
        with suppress(ProcessLookupError):
            supervisor.send_signal(signal.SIGTERM)
        raise


def _until_ready(folder: DataFolder, supervisor: "subprocess.Popen[bytes]", console: Console) -> Ready:
    deadline = time.monotonic() + _START_S
    with console.status("starting"):
        while time.monotonic() < deadline:
            status, instance = folder.status(), folder.instance()
            if status and instance and status.pid == supervisor.pid and status.ready and status.trial:
                gpus, notes = status.simulated_gpus, status.notes
                return Ready(instance=instance, simulated_gpus=gpus, notes=notes, trial=status.trial)
            if supervisor.poll() is not None:
                raise _AS.get(supervisor.returncode, Unavailable)(_last_words(folder))
            time.sleep(_POLL_S)
    raise Unavailable(f"it was not ready after {_START_S:.0f} s: {_last_words(folder)}")


def _last_words(folder: DataFolder) -> str:
    """Its error without the command line's frame, which is put around it again."""
    lines = (folder.log / "up.log").read_text(errors="replace").strip().splitlines()
    last = lines[-1] if lines else "it ended without a word"
    return re.sub(r" \((?:code|field)=[^()]*\)$", "", last.removeprefix("error: "))
