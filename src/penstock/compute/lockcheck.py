"""Whether a lock is one of the requirements that it was made for. Pure.

A node resolves, and its answer is not believed: each requested package must be in the lock, once, in a version that was
asked for, and without a marker that keeps it from being installed. Packages that requested ones need are the node's
word: nobody else has their metadata.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Final, NamedTuple

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_PYTHON: Final = re.compile(r"3\.[0-9]{1,2}(?:\.[0-9]{1,3})?")
_MACHINES: Final = ("x86_64", "aarch64")
_PROBLEMS_MAX: Final = 5


class Unmet(ValueError):
    """The lock is not one of the requirements; the text says why."""


class _Pin(NamedTuple):
    version: str
    marker: str


def check(requirements: str, lock: str, python: str) -> None:
    """Unmet unless the (normal) lock has what the (normal) requirements ask for, under this version of Python."""
    if not _PYTHON.fullmatch(python):
        raise Unmet("it is for no version of Python")
    pins = _pins(lock)
    problems = [problem for line in requirements.splitlines() if (problem := _problem(line, pins, python))]
    if problems:
        more = f" and {len(problems) - _PROBLEMS_MAX} more" if len(problems) > _PROBLEMS_MAX else ""
        raise Unmet("; ".join(problems[:_PROBLEMS_MAX]) + more)


def _pins(lock: str) -> Mapping[str, _Pin]:
    pins: dict[str, _Pin] = {}
    for line in lock.splitlines():
        what, _, marker = line.partition(" --hash=")[0].partition(" ; ")
        name, _, version = what.partition("==")
        key = canonicalize_name(name.partition("[")[0])
        if key in pins:
            raise Unmet(f"{key} is in it twice")
        pins[key] = _Pin(version, marker)
    return pins


def _problem(line: str, pins: Mapping[str, _Pin], python: str) -> str:
    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return f"{line[:60]!r} cannot be read"
    pin = pins.get(canonicalize_name(wanted.name))
    needed = [where for where in _environments(python) if wanted.marker is None or _holds(wanted.marker, where)]
    if pin is None:
        # A node's machine is not known here: a package that only one of them wants may be left out.
        return f"{wanted.name} is missing" if len(needed) == len(_MACHINES) else ""
    if not _satisfies(pin.version, wanted):
        return f"{wanted.name} is {pin.version[:40]}, which is not {str(wanted.specifier)[:60]}"
    if pin.marker and not all(_installs(pin.marker, where) for where in needed):
        return f"{wanted.name} is there, but its marker leaves it out"
    return ""


def _satisfies(version: str, wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _environments(python: str) -> Iterator[Mapping[str, str]]:
    """Where a lock may be installed: Linux, on any machine that nodes have."""
    full = python if python.count(".") == 2 else f"{python}.0"
    for machine, system in product(_MACHINES, ("linux",)):
        yield {
            "python_version": ".".join(full.split(".")[:2]),
            "python_full_version": full,
            "implementation_name": "cpython",
            "implementation_version": full,
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": system,
            "platform_system": "Linux",
            "platform_machine": machine,
            "platform_release": "",
            "platform_version": "",
            "extra": "",
        }


def _holds(marker: Marker, where: Mapping[str, str]) -> bool:
    try:
        return marker.evaluate(dict(where))
    except (UndefinedComparison, UndefinedEnvironmentName):
        return True


def _installs(marker: str, where: Mapping[str, str]) -> bool:
    try:
        return _holds(Marker(marker), where)
    except InvalidMarker:
        return False
