"""What of ours runs inside units, compiled for a tenant's interpreter: init, the zygote of stock units, and the
framework of functions.

Init is one file of several sources, since each further import would delay every unit's start. The framework is a folder
that units see read-only, named by its content: units of an older one keep theirs.
"""

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.sdk import tenant

_HERE: Final = Path(__file__).parent
_SOURCES: Final = {"init": ("commands.py", "init.py"), "zygote": ("zygote.py",)}
_OUR_IMPORT: Final = re.compile(r"^from penstock\.[\w.]+ import (?:\([^)]*\)|[^(\n]*)\n", re.MULTILINE)
#: Takes threes: the source, where it goes (its usual place if empty), and its name in tracebacks.
_COMPILE: Final = """
import os, py_compile, sys
for at in range(1, len(sys.argv), 3):
    source, target, name = sys.argv[at : at + 3]
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    made = py_compile.compile(source, target or None, dfile=name, doraise=True, invalidation_mode=mode)
    os.chmod(made, 0o644)
    if not target:
        os.chmod(os.path.dirname(made), 0o755)
"""


@dataclass(frozen=True)
class Inside:
    """Where the host has them."""

    init: Path
    zygote: Path
    framework: Path


def compile_into(
    work: Path, version: str, run: Callable[..., object], *, sources: Mapping[str, bytes] | None = None
) -> Inside:
    """All of it in `work`, compiled by the interpreter behind `run(code, *arguments)`. `sources` is the framework's."""
    made: dict[str, Path] = {}
    threes: list[str] = []
    for name in _SOURCES:
        source = work / f"{name}-{version}.py"
        source.write_text(join(name))
        made[name] = source.with_suffix(".pyc")
        threes += [str(source), str(made[name]), name]
    framework = lay_out(work, tenant.sources() if sources is None else sources)
    for source in sorted(framework.rglob("*.py")):
        threes += [str(source), "", str(source)]
    run(_COMPILE, *threes)
    return Inside(init=made["init"], zygote=made["zygote"], framework=framework)


def join(name: str) -> str:
    """The sources of a program as one."""
    return _OUR_IMPORT.sub("", "\n".join((_HERE / part).read_text() for part in _SOURCES[name]))


def lay_out(work: Path, sources: Mapping[str, bytes]) -> Path:
    """A folder below `work` with these files: whole or not there, and readable for everybody."""
    digest = hashlib.sha256(b"\0".join(name.encode() + b"\0" + text for name, text in sorted(sources.items())))
    folder = work / f"framework-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    unfinished = work / f".framework-{secrets.token_hex(4)}"
    try:
        for name, text in sources.items():
            path = unfinished / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
            path.chmod(0o644)
        for path in (unfinished, *unfinished.rglob("*/")):
            path.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
