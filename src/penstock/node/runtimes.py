"""Images, until real ones land: a name maps to a Python environment on the host that tenant code sees read-only.

The environment and the interpreter it was made from are each shown at their own paths: at another one an interpreter
may silently load the system's library of the same name.
"""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from penstock.kit.errors import Unavailable
from penstock.node import inside
from penstock.node.errors import Failed

_ASK: Final = "import sys; print(sys.prefix); print(sys.base_prefix); print('%d.%d' % sys.version_info[:2])"
_TIMEOUT_S: Final = 20.0
_USUAL: Final = "python:3.12"


@dataclass(frozen=True)
class Runtime:
    """A tenant environment. `folders` must be visible for it to work; `init`, `zygote` and `framework` are ours,
    compiled for it. `preload` are modules that a zygote imports beyond its own list."""

    python: Path
    folders: tuple[Path, ...]
    init: Path
    zygote: Path
    framework: Path
    version: str
    preload: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """The search path of commands."""
        return f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin"


class Built(Protocol):
    """Environments that were built on top of images."""

    def over(self, base: Runtime, digest: str) -> Runtime:
        """The environment of this digest on its base; Failed `no_runtime` when there is none."""
        ...


class Runtimes:
    """The images this node can run, and what tenants had built on top of them."""

    def __init__(self, by_image: Mapping[str, Runtime], built: Built | None = None) -> None:
        self._by_image = dict(by_image)
        self._built = built

    def choose(self, image: str, digest: str) -> Runtime:
        """What a unit runs on: the environment of this digest, or the image's own."""
        base = self.find(image)
        if not digest:
            return base
        if self._built is None:
            raise Failed("no_runtime", f"this node has not built the runtime {digest}")
        return self._built.over(base, digest)

    def find(self, image: str) -> Runtime:
        """The runtime of an image; Failed `unknown_image` names those that there are."""
        found = self._by_image.get(image)
        if found is None:
            known = ", ".join(sorted(self._by_image)) or "none"
            raise Failed("unknown_image", f"this node has no image {image!r}; it has: {known}")
        return found

    def all(self) -> list[Runtime]:
        """Each runtime once."""
        return list(dict.fromkeys(self._by_image.values()))

    @property
    def framework(self) -> Path:
        """The folder with the framework of functions, which is the same for all."""
        return self.all()[0].framework


def prepare(
    folders: Mapping[str, str],
    work: Path,
    preload: Mapping[str, Sequence[str]] | None = None,
    *,
    built: Built | None = None,
) -> Runtimes:
    """Look at each environment and compile what runs inside for it into `work`. What `python:3` means is also known by
    its exact version, and as the `python:3.12` that most people write, whatever it is."""
    made = {folder: _prepare(Path(folder), work) for folder in dict.fromkeys(folders.values())}
    by_image = {
        image: replace(made[folder], preload=tuple((preload or {}).get(image, ()))) for image, folder in folders.items()
    }
    for image, runtime in list(by_image.items()):
        if image == "python:3":
            by_image.setdefault(f"python:{runtime.version}", runtime)
            by_image.setdefault(_USUAL, runtime)
    return Runtimes(by_image, built)


def _prepare(folder: Path, work: Path) -> Runtime:
    python = folder / "bin" / "python"
    prefix, base, version = _run(python, _ASK).split()
    work.mkdir(parents=True, exist_ok=True)
    work.chmod(0o755)
    made = inside.compile_into(work, version, partial(_run, python))
    return Runtime(
        python=Path(prefix) / "bin" / "python",
        folders=_outermost(prefix, base),
        init=made.init,
        zygote=made.zygote,
        framework=made.framework,
        version=version,
    )


def _outermost(*names: str) -> tuple[Path, ...]:
    """Folders that are not inside another one or inside the read-only system."""
    folders = sorted({Path(name) for name in names})
    shown = [Path("/usr")]
    for folder in folders:
        if not any(folder.is_relative_to(other) for other in shown):
            shown.append(folder)
    return tuple(shown[1:])


def _run(python: Path, code: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [python, "-I", "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            env={},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unavailable(f"the tenant runtime {python} does not work: {error}") from error
    return done.stdout
