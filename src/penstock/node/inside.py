"""What of ours runs inside units, compiled for a tenant's interpreter: init, and the zygote of stock units.

Init is one file of several sources, since each further import would delay every unit's start.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_SOURCES: Final = {"init": ("commands.py", "init.py"), "zygote": ("zygote.py",)}
_OUR_IMPORT: Final = re.compile(r"^from penstock\.[\w.]+ import (?:\([^)]*\)|[^(\n]*)\n", re.MULTILINE)
_COMPILE: Final = (
    "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], dfile=sys.argv[3], doraise=True,"
    " invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
)


def compile_into(work: Path, name: str, version: str, run: Callable[..., object]) -> Path:
    """`name` as a compiled file in `work`, by the interpreter behind `run(code, *arguments)`."""
    source = work / f"{name}-{version}.py"
    source.write_text(join(name))
    compiled = source.with_suffix(".pyc")
    run(_COMPILE, str(source), str(compiled), name)
    compiled.chmod(0o644)
    return compiled


def join(name: str) -> str:
    """The sources of a program as one."""
    return _OUR_IMPORT.sub("", "\n".join((_HERE / part).read_text() for part in _SOURCES[name]))
