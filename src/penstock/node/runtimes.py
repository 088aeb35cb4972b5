"""Images, until real ones land: a name maps to a Python environment on the host that tenant code sees read-only.

The environment and the interpreter it was made from are each shown at their own paths: at another one an interpreter
may silently load the system's library of the same name.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.kit.errors import Unavailable
from penstock.node.errors import Failed

_ASK: Final = "import sys; print(sys.prefix); print(sys.base_prefix); print('%d.%d' % sys.version_info[:2])"
_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True)
class Runtime:
    """A tenant environment. `folders` must be visible for it to work; `init` is our init, compiled for it."""

    python: Path
    folders: tuple[Path, ...]
    init: Path
    version: str

    @property
    def path(self) -> str:
        """The search path of commands."""
        return f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin"


class Runtimes:
    """The images this node can run."""

    def __init__(self, by_image: Mapping[str, Runtime]) -> None:
        self._by_image = dict(by_image)

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


def prepare(folders: Mapping[str, str], work: Path) -> Runtimes:
    """Look at each environment and compile our init for it into `work`. Each is also known by its exact version."""
    made = {folder: _prepare(Path(folder), work) for folder in dict.fromkeys(folders.values())}
    by_image = {image: made[folder] for image, folder in folders.items()}
    for image, runtime in list(by_image.items()):
        if image == "python:3":
            by_image.setdefault(f"python:{runtime.version}", runtime)
    return Runtimes(by_image)


def _prepare(folder: Path, work: Path) -> Runtime:
    python = folder / "bin" / "python"
    prefix, base, version = _run(python, _ASK).split()
    work.mkdir(parents=True, exist_ok=True)
    work.chmod(0o755)
    compiled = work / f"init-{version}.pyc"
    source = Path(__file__).with_name("init.py")
    _run(
        python,
        "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], dfile='init', doraise=True,"
        " invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)",
        str(source),
        str(compiled),
    )
    compiled.chmod(0o644)
    return Runtime(
        python=Path(prefix) / "bin" / "python", folders=_outermost(prefix, base), init=compiled, version=version
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
