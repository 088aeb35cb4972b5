"""What an unprivileged user must be able to reach, although our folders may lie under a home that only root can enter.

As root, units start under a user of their own before bubblewrap makes any namespace (otherwise it would write to the
host as root), and that user cannot walk into a 0700 home. So once, at the agent's start, a mount namespace is made in
which the needed folders also stand below a folder that everyone can enter. It is held by a descriptor and vanishes with
the agent; the host never sees these mounts. Units started from it keep what they need by mounts of their own.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.kit.errors import Unavailable

_PLACES: Final = ("/mnt", "/media", "/srv", "/opt", "/home", "/tmp")  # noqa: S108 - hidden by our own mount
_SCRIPT: Final = """
set -e
mount -t tmpfs -o mode=0755,size=1m,nosuid,nodev penstock "$1"
place=$1
shift
while [ $# -gt 0 ]; do
    mkdir "$place/$1"
    mount --bind "$2" "$place/$1"
    shift 2
done
echo ready
read -r _
"""
_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True)
class Stage:
    """How paths are seen by whoever launches units. Without a namespace paths are what they are."""

    namespace: int | None
    seen: tuple[tuple[Path, Path], ...] = ()

    def at(self, path: Path) -> str:
        """Where `path` stands for the launcher."""
        for source, place in self.seen:
            if path.is_relative_to(source):
                return str(place / path.relative_to(source))
        return str(path)

    def close(self) -> None:
        """Let go of the namespace."""
        if self.namespace is not None:
            os.close(self.namespace)


def build(folders: Mapping[str, Path]) -> Stage:
    """As root, make the namespace with these folders in it; as an ordinary user there is nothing to do."""
    if os.geteuid() != 0:
        return Stage(None)
    place = _place(list(folders.values()))
    arguments = [part for name, path in folders.items() for part in (name, str(path))]
    with subprocess.Popen(
        ["unshare", "--mount", "--propagation", "slave", "/bin/sh", "-c", _SCRIPT, "sh", str(place), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    ) as process:
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            _, complaint = process.communicate(timeout=_TIMEOUT_S)
            raise Unavailable(f"cannot stage folders for units: {complaint.decode(errors='replace').strip()}")
        namespace = os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        process.communicate(b"\n", timeout=_TIMEOUT_S)
    seen = tuple((path, place / name) for name, path in folders.items())
    return Stage(namespace, tuple(sorted(seen, key=lambda pair: -len(pair[0].parts))))


def available() -> bool:
    """Whether the tools that root needs here are installed."""
    return all(shutil.which(tool) for tool in ("unshare", "nsenter", "mount"))


def _place(sources: list[Path]) -> Path:
    for candidate in map(Path, _PLACES):
        if candidate.is_dir() and not any(source.is_relative_to(candidate) for source in sources):
            return candidate
    raise Unavailable("no folder is left over which units' folders could be staged")
