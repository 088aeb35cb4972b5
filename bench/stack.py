"""A whole Penstock on free ports in a folder of its own, for measurements."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.embedded.child import free_port


@dataclass(frozen=True)
class Stack:
    """Where it is."""

    data: Path
    api: str
    gateway: str
    key: str

    def setting(self, process: str, name: str) -> str:
        """A setting as one of the running processes has it."""
        status = json.loads((self.data / "status.json").read_text())
        pid = next(entry["pid"] for entry in status["processes"] if entry["name"] == process)
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next(entry for entry in entries if entry.startswith(f"{name}=".encode())).decode().partition("=")[2]


@contextmanager
def running(*, simulated_gpus: int = 64) -> Iterator[Stack]:
    """`penstock up --detach`, and `down` at the end."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    data = folder / "data"
    ports = [part for name in ("api", "gateway", "link") for part in (f"--{name}-port", str(free_port()))]
    try:
        _penstock(
            "up", "--detach", "--data", str(data), *ports, env={"PENSTOCK_AGENT_SIMULATED_GPUS": str(simulated_gpus)}
        )
        instance = json.loads((data / "instance.json").read_text())
        yield Stack(data, instance["api"], instance["gateway"], instance["key"])
    finally:
        _penstock("down", "--data", str(data))
        shutil.rmtree(folder, ignore_errors=True)


def _penstock(*arguments: str, env: dict[str, str] | None = None) -> None:
    subprocess.run(
        [sys.executable, "-m", "penstock.command", *arguments],
        check=True,
        env={**os.environ, **(env or {})},
        stdout=sys.stderr,
        timeout=180,
    )
