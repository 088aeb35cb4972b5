"""What `penstock up` prints when everything is ready, in plain words."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from penstock.processes.up.folder import Instance, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What there is to tell once everything answers."""

    instance: Instance
    simulated_gpus: int
    notes: list[str]
    trial: Trial


def text(ready: Ready, folder: Path, *, usual_folder: bool, attached: bool) -> str:
    """Where things are, and three commands to try."""
    command, instance = _command(), ready.instance
    places = [
        ("API", instance.api),
        ("API reference", f"{instance.api}/docs"),
        ("Gateway", instance.gateway),
        *([("NATS for nodes", instance.nats)] if instance.nats else []),
        ("Admin key", instance.key),
        *([("Temporal's web UI", instance.temporal_ui)] if instance.temporal_ui else []),
        ("Data", str(folder)),
        ("Logs", str(folder / "log")),
    ]
    width = max(len(name) for name, _ in places)
    lines = ["", "Penstock is ready.", ""]
    lines += [f"  {name:<{width}}  {value}" for name, value in places]
    if ready.simulated_gpus:
        lines += ["", f"The {ready.simulated_gpus} GPUs of this node are SIMULATED: no NVIDIA GPU is in use."]
    lines += ["", "Try:"]
    if not usual_folder:
        lines.append(f"  export PENSTOCK_DATA={folder}")
    lines += [
        *([f"  {command} {ready.trial.define}"] if ready.trial.define else []),
        f"  {command} alloc create --sku {ready.trial.sku} --name demo --wait",
        f"  {command} alloc exec demo -- python3 -c 'print(1)'",
        f"  {command} alloc release demo --wait",
        "",
        f"{command} status shows how it is; {command} key show prints the key.",
        "Ctrl-C stops everything." if attached else f"{command} down stops everything.",
    ]
    return "\n".join(lines)


def _command() -> str:
    """How a person here would call us."""
    script = Path(sys.executable).with_name("penstock")
    found = shutil.which("penstock")
    if found and Path(found) == script:
        return "penstock"
    relative = os.path.relpath(script)
    return relative if not relative.startswith("..") else str(script)
