"""The service that lets processes share a GPU (CUDA MPS): one daemon for each GPU, in folders of its own.

A daemon of its own per GPU keeps the projects on different GPUs apart: an error of one client ends the others of its
daemon. It outlives the agent, as units do, and is found again by its folder.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.kit.errors import Invalid
from penstock.kit.telemetry import logger
from penstock.node.layout import FIELD

PROGRAM: Final = "nvidia-cuda-mps-control"
_log = logger(__name__)
_ASK_TIMEOUT_S: Final = 10.0
_SERVERS_MAX: Final = 64
#: Clients and servers share memory by files in /dev/shm, where a unit sees only its own: the daemon gets the folder
#: that its clients get.
_WITH_SHARED_MEMORY: Final = 'mount --bind "$0" /dev/shm && exec "$@"'


@dataclass(frozen=True, slots=True)
class Access:
    """The folders through which a unit reaches the daemon of its GPU."""

    pipe: Path
    shared_memory: Path


class Mps:
    """The daemons of a node."""

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._program = program

    def access(self, uuid: str) -> Access:
        """The folders of a GPU's daemon."""
        return Access(self._folder / uuid / "pipe", self._folder / uuid / "shm")

    def start(self, uuid: str) -> None:
        """Start the daemon of a GPU, or find it; Invalid says why it could not."""
        if self._ask(uuid, "get_server_list") is not None:
            return
        self._make_folders(uuid)
        try:
            subprocess.run(
                self._command(uuid),
                env=self._environment(uuid) | {"CUDA_VISIBLE_DEVICES": uuid},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_ASK_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            detail = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip() or str(error)
            raise Invalid(f"{FIELD}: the MPS daemon of GPU {uuid} fails: {detail[:500]}", field=FIELD) from error
        _log.info("mps_started", gpu_uuid=uuid)

    def _command(self, uuid: str) -> list[str]:
        # Every unit has a user of its own.
        daemon = [self._program, "-d", "-multiuser-server"]
        shared = str(self.access(uuid).shared_memory)
        return ["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", _WITH_SHARED_MEMORY, shared, *daemon]

    def _make_folders(self, uuid: str) -> None:
        access, log = self.access(uuid), self._folder / uuid / "log"
        for folder, mode in ((access.pipe, 0o755), (access.shared_memory, 0o1777), (log, 0o700)):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(mode)
        for folder in (self._folder, self._folder / uuid):
            folder.chmod(0o711)

    def end_servers(self, uuid: str) -> bool:
        """End what holds memory of the GPU between clients; the daemon starts it anew for the next."""
        answer = self._ask(uuid, "get_server_list")
        if answer is None:
            return True
        pids = answer.split()[:_SERVERS_MAX]
        return all(self._ask(uuid, f"shutdown_server {pid} -f") is not None for pid in pids if pid.isdigit())

    def servers(self, uuid: str) -> set[int]:
        """The processes that serve a GPU's clients: they are on the GPU and are not a tenant's."""
        return {int(pid) for pid in (self._ask(uuid, "get_server_list") or "").split() if pid.isdigit()}

    def _ask(self, uuid: str, command: str) -> str | None:
        """What the daemon answers; None when there is none."""
        if not self.access(uuid).pipe.is_dir():
            return None
        try:
            done = subprocess.run(
                [self._program],
                input=f"{command}\n",
                env=self._environment(uuid),
                capture_output=True,
                text=True,
                timeout=_ASK_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    def _environment(self, uuid: str) -> dict[str, str]:
        return {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "CUDA_MPS_PIPE_DIRECTORY": str(self.access(uuid).pipe),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / uuid / "log"),
        }


def open_mps(folder: Path) -> Mps:
    """The daemons below this folder; Invalid where there can be none."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise Invalid(f"{FIELD}: mps needs the program {PROGRAM}, which is not on this host", field=FIELD)
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        raise Invalid(f"{FIELD}: mps needs an agent that runs as root, and util-linux", field=FIELD)
    return Mps(folder, program)
