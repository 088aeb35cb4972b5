"""One install of the whole cloud and the command line that uses it, as a person would."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.embedded.ports import free_port

SIMULATED_GPUS = 64


@dataclass(frozen=True)
class Cloud:
    """One install and the command line that uses it."""

    data: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, int, int] = field(default_factory=lambda: (free_port(), free_port(), free_port()))
    prefix: tuple[str, ...] = ()

    def command(self, *arguments: str) -> list[str]:
        """The command line, as a child would be given it."""
        return [*self.prefix, sys.executable, "-m", "penstock.command", *arguments]

    def environment(self) -> dict[str, str]:
        """Of a person who has set nothing but where the install is."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        own = {"PENSTOCK_DATA": str(self.data), "PENSTOCK_AGENT_SIMULATED_GPUS": str(SIMULATED_GPUS)}
        return {**kept, **own, **self.env}

    def run(self, *arguments: str, timeout_s: float = 60, stdin: str = "") -> "subprocess.CompletedProcess[str]":
        """Run `penstock …` to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environment(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def ok(self, *arguments: str, timeout_s: float = 60, stdin: str = "") -> str:
        """What a command that must succeed prints."""
        done = self.run(*arguments, timeout_s=timeout_s, stdin=stdin)
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def json(self, *arguments: str, timeout_s: float = 60) -> Any:
        """The same, decoded."""
        return json.loads(self.ok(*arguments, "-o", "json", timeout_s=timeout_s))

    def up(self, *arguments: str) -> str:
        """`penstock up --detach` on this install's own ports."""
        return self.ok("up", "--detach", *self.port_options(), *arguments, timeout_s=240)

    def port_options(self) -> list[str]:
        """The ports of this install."""
        names = ("--api-port", "--gateway-port", "--link-port")
        return [part for name, port in zip(names, self.ports, strict=True) for part in (name, str(port))]

    def down(self) -> None:
        """Stop it."""
        self.ok("down", timeout_s=120)

    def status(self) -> Any:
        """As `status -o json` tells it, whatever its exit code."""
        return json.loads(self.run("status", "-o", "json").stdout)

    def pid_of(self, process: str) -> int:
        """Of one of its processes."""
        return next(entry["pid"] for entry in self.status()["processes"] if entry["name"] == process)

    @property
    def instance(self) -> Any:
        """instance.json."""
        return json.loads((self.data / "instance.json").read_text())

    @property
    def api(self) -> str:
        """Where the api is."""
        return self.instance["api"]

    @property
    def gateway(self) -> str:
        """Where the gateway is."""
        return self.instance["gateway"]

    @property
    def key(self) -> str:
        """The administrator's key."""
        return self.instance["key"]

    def logs(self, last: int = 1500) -> str:
        """The end of each log, for a failure's message."""
        files = sorted((self.data / "log").glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-last:]}" for file in files)


def processes_of(data: Path) -> dict[int, str]:
    """Living processes whose command line or environment names the folder."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if (
            state != "Z"
            and int(entry.name) != os.getpid()
            and (str(data) in command or str(data).encode() in environment)
        ):
            found[int(entry.name)] = command
    return found
