"""How a unit is started: one interface, two drivers. `choose` takes bubblewrap wherever it works.

Every driver starts a launcher that waits for a line on its standard input before it does anything. An agent that dies
before it has durably noted the launcher's pid therefore leaves nothing behind: the pipe ends, and so does the launcher.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from penstock.node import layout
from penstock.node.mps import Access
from penstock.node.runtimes import Runtime
from penstock.wire.tasks import Gpu, Limits

HOME: Final = "/home/unit"
#: Where a sandboxed unit finds the service by which it shares a GPU.
MPS_PIPE: Final = "/run/penstock/mps"
#: Folders of a unit's folder: its home, what its code is in below that, and where a function's framework listens.
CODE: Final = "app"
FRAMEWORK: Final = "framework"
GO: Final = b"go\n"
#: Waits for the go, then becomes the rest of its arguments.
GATE: Final = ("/bin/sh", "-c", 'read -r _ || exit 3; exec "$@"', "sh")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a driver must know of a unit. `uid` is the host user it runs as; None for the agent's own. A `stock` unit
    has no tenant yet."""

    unit_id: str
    folder: Path
    runtime: Runtime
    limits: Limits
    uid: int | None = None
    gpus: tuple[Gpu, ...] = ()
    devices: tuple[str, ...] = ()
    mps: Access | None = None
    simulated: bool = True
    allocation_id: str = ""
    stock: bool = False


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where the commands of a unit find what makes it a function's worker: the folder of the framework's socket, the
    function's code, and the platform's own framework."""

    sockets: str
    code: str
    framework: str


@dataclass(frozen=True)
class Launch:
    """What to execute. The descriptors are passed to it; `owned` ones are closed here afterwards."""

    argv: list[str]
    descriptors: tuple[int, ...] = ()
    owned: tuple[int, ...] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A program of ours that handles what tenants chose. It may write to `folder` alone, and see what is `shown`."""

    argv: tuple[str, ...]
    folder: Path
    shown: tuple[Path, ...]
    uid: int | None = None
    online: bool = False


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

    def secrets(self, spec: Spec) -> str:
        """The folder for secrets, as init sees it."""
        ...

    def zygote(self, spec: Spec) -> list[str]:
        """The zygote's file as init sees it and the modules to import; empty where a unit has none."""
        ...

    def places(self, folder: Path, framework: Path) -> Places:
        """For the unit of this folder; `framework` is where the host has ours."""
        ...

    def tool(self, tool: Tool) -> Launch:
        """The command of a tool, which ends with the agent. Its environment is its caller's to give."""
        ...

    def close(self) -> None:
        """Let go of what the driver holds."""
        ...


def environment(spec: Spec, *, home: str, mps_pipe: str = MPS_PIPE) -> dict[str, str]:
    """The part that all drivers share. Nothing of the host's environment is in it."""
    env = {
        "PATH": spec.runtime.path,
        "HOME": home,
        "USER": "unit",
        "LANG": "C.UTF-8",
        "PENSTOCK_UNIT": spec.unit_id,
        "PENSTOCK_ALLOCATION": spec.allocation_id or spec.unit_id,
    }
    uuids = ",".join(gpu.uuid for gpu in spec.gpus)
    if spec.simulated:
        return env | {"PENSTOCK_GPUS": uuids, "PENSTOCK_GPUS_SIMULATED": "1"}
    return env | {"PENSTOCK_GPUS": uuids} | layout.variables(spec.gpus, pipe=mps_pipe)


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
        pipe = str(spec.mps.pipe) if spec.mps else ""
        env = environment(spec, home=str(spec.folder / "home"), mps_pipe=pipe)
        return env | {"TMPDIR": str(spec.folder / "tmp"), "PENSTOCK_SECRETS": self.secrets(spec)}

    def secrets(self, spec: Spec) -> str:
        """In the unit's folder, and on disk: there is no other place that is the unit's alone."""
        return str(spec.folder / "secrets")

    def zygote(self, spec: Spec) -> list[str]:
        """None: stock is for nodes that sandbox, and here a handoff starts the command in the ordinary way."""
        del spec
        return []

    def places(self, folder: Path, framework: Path) -> Places:
        """As they are on the host."""
        return Places(sockets=str(folder / FRAMEWORK), code=str(folder / "home" / CODE), framework=str(framework))

    def tool(self, tool: Tool) -> Launch:
        """The tool itself."""
        return Launch([*tool.argv])

    def close(self) -> None:
        """Nothing is held."""


def memory_file(content: bytes) -> int:
    """A descriptor from which `content` can be read."""
    descriptor = os.memfd_create("penstock")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
