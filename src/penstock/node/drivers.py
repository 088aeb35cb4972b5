"""How a unit is started: one interface, two drivers. `choose` takes bubblewrap wherever it works.

Every driver starts a launcher that waits for a line on its standard input before it does anything. An agent that dies
before it has durably noted the launcher's pid therefore leaves nothing behind: the pipe ends, and so does the launcher.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from penstock.node.runtimes import Runtime
from penstock.wire.tasks import Gpu, Limits

HOME: Final = "/home/unit"
GO: Final = b"go\n"
#: Waits for the go, then becomes the rest of its arguments.
GATE: Final = ("/bin/sh", "-c", 'read -r _ || exit 3; exec "$@"', "sh")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a driver must know of a unit. `uid` is the host user it runs as; None for the agent's own."""

    unit_id: str
    folder: Path
    runtime: Runtime
    limits: Limits
    uid: int | None = None
    gpus: tuple[Gpu, ...] = ()
    devices: tuple[str, ...] = ()
    simulated: bool = True


@dataclass(frozen=True)
class Launch:
    """What to execute. The descriptors are passed to it; `owned` ones are closed here afterwards."""

    argv: list[str]
    descriptors: tuple[int, ...] = ()
    owned: tuple[int, ...] = field(default=())


class Driver(Protocol):
    """A way to run units."""

    @property
    def name(self) -> str:
        """Shown in health reports."""
        ...

    @property
    def isolated(self) -> bool:
        """Whether a unit has namespaces of its own."""
        ...

    def launch(self, spec: Spec, *, listener: int, info: int) -> Launch:
        """The launcher's command. Init listens on `listener`; a sandbox writes about itself to `info`."""
        ...

    def environment(self, spec: Spec) -> dict[str, str]:
        """What every command in the unit sees, before what the tenant adds."""
        ...

    def close(self) -> None:
        """Let go of what the driver holds."""
        ...


def environment(spec: Spec, *, home: str) -> dict[str, str]:
    """The part that all drivers share. Nothing of the host's environment is in it."""
    env = {
        "PATH": spec.runtime.path,
        "HOME": home,
        "USER": "unit",
        "LANG": "C.UTF-8",
        "PENSTOCK_UNIT": spec.unit_id,
        "PENSTOCK_ALLOCATION": spec.unit_id,
    }
    uuids = ",".join(gpu.uuid for gpu in spec.gpus)
    if spec.simulated:
        return env | {"PENSTOCK_GPUS": uuids, "PENSTOCK_GPUS_SIMULATED": "1"}
    return env | {"PENSTOCK_GPUS": uuids, "CUDA_VISIBLE_DEVICES": uuids, "NVIDIA_VISIBLE_DEVICES": uuids}


class PlainDriver:
    """Plain processes without any isolation, for development on hosts that cannot sandbox."""

    name = "plain"
    isolated = False

    def launch(self, spec: Spec, *, listener: int, info: int) -> Launch:
        """Init itself, under the agent's own user."""
        python = str(spec.runtime.python)
        return Launch([*GATE, python, "-I", "-S", str(spec.runtime.init), str(listener)], (listener, info))

    def environment(self, spec: Spec) -> dict[str, str]:
        """Home and temporary files are in the unit's folder."""
        return environment(spec, home=str(spec.folder / "home")) | {"TMPDIR": str(spec.folder / "tmp")}

    def close(self) -> None:
        """Nothing is held."""


def memory_file(content: bytes) -> int:
    """A descriptor from which `content` can be read."""
    descriptor = os.memfd_create("penstock")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
