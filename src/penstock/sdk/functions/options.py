"""How a function is run: the arguments of `@app.function` and `@app.cls`, checked when the file is read."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NAME = re.compile(r"[a-z0-9_-]{1,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(eq=False, repr=False)
class Cron:
    """When a function runs by itself: five fields of cron in a time zone, and what it is given."""

    cron: str
    timezone: str = "UTC"
    payload: Any = None

    def __post_init__(self) -> None:
        if len(self.cron.split()) != 5:
            raise ValueError(f"schedule: cron has five fields, such as '0 3 * * *', not {self.cron!r}")


@dataclass(eq=False, repr=False)
class Options:
    """What a function may say about itself. None leaves the choice to the platform."""

    sku: str
    gpus: int = 1
    concurrency: int = 1
    workers_min: int = 0
    workers_max: int = 8
    tasks_per_worker: int = 0
    idle_s: float = 300.0
    start_timeout_s: float = 120.0
    timeout_s: float = 300.0
    retries: int = 0
    retry_for: "Sequence[str | type[BaseException]]" = ()
    retry_delay_s: float = 1.0
    secrets: "Sequence[str] | Mapping[str, str]" = ()
    env: "Mapping[str, str]" = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    labels: "Mapping[str, str]" = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    image: str = "python:3"
    runtime: "str | None" = None
    requirements: "str | os.PathLike[str] | Sequence[str] | None" = None
    schedule: "Cron | None" = None
    webhook: "str | None" = None

    def __post_init__(self) -> None:
        for name, kinds, said in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ValueError(f"{name} must be {said}, not {value!r}")  # noqa: TRY004 - told like the others
        for name, lowest, highest in _BOUNDS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= highest:
                raise ValueError(f"{name} must be {lowest:g} to {highest:g}, not {value!r}")
        if self.workers_min > self.workers_max:
            raise ValueError(f"workers_min is {self.workers_min}, more than workers_max {self.workers_max}")
        if self.runtime and self.requirements:
            raise ValueError("give either runtime or requirements: requirements make a runtime of their own")
        _check_packages(self.requirements)
        for text in self.retry_for:
            error_name(text)
        for variable in (*self.env, *(value for value in self.secret_variables().values() if value)):
            if not _VARIABLE.fullmatch(variable):
                raise ValueError(f"{variable!r} is not the name of a variable")

    def secret_variables(self) -> "dict[str, str]":
        """Each secret with the variable that holds it. A plain list makes DB_PASSWORD of db-password."""
        if isinstance(self.secrets, Mapping):
            return dict(self.secrets)
        return {name: re.sub(r"[^A-Za-z0-9_]", "_", name).upper() for name in self.secrets}

    def retried(self) -> "list[str]":
        """The names of the exceptions that are tried again."""
        return [error_name(item) for item in self.retry_for]


_NONE = type(None)
_LISTS = (list, tuple, set, frozenset)
_KINDS: "tuple[tuple[str, tuple[type, ...], str], ...]" = (
    ("sku", (str,), "text"),
    ("image", (str,), "text"),
    ("runtime", (str, _NONE), "a runtime's name"),
    ("requirements", (str, os.PathLike, list, tuple, _NONE), "a list of packages or the path of a requirements file"),
    ("webhook", (str, _NONE), "text"),
    ("schedule", (Cron, _NONE), 'a penstock.Cron("0 3 * * *")'),
    ("env", (Mapping,), "a mapping"),
    ("labels", (Mapping,), "a mapping"),
    ("secrets", (*_LISTS, Mapping), "a list or a mapping"),
    ("retry_for", _LISTS, "a list"),
)
_BOUNDS = (
    ("gpus", 1, 1024),
    ("concurrency", 1, 1000),
    ("workers_min", 0, 1000),
    ("workers_max", 1, 1000),
    ("tasks_per_worker", 0, 100_000),
    ("idle_s", 0, 86_400),
    ("start_timeout_s", 1, 3600),
    ("timeout_s", 0.001, 86_400),
    ("retries", 0, 10),
    ("retry_delay_s", 0, 3600),
)


def _check_packages(given: Any) -> None:
    """A list must name packages."""
    for item in given if isinstance(given, (list, tuple)) else ():
        if not isinstance(item, str) or not item.strip():
            raise ValueError(f"requirements must be names of packages, not {item!r}")


def error_name(item: Any) -> str:
    """An exception's name, as invocations report it."""
    if isinstance(item, str) and item:
        return item
    if isinstance(item, type) and issubclass(item, BaseException):
        return item.__name__
    raise ValueError(f"retry_for takes exceptions or their names, not {item!r}")


def deployed_name(app: str, function: str) -> str:
    """How a function is called everywhere: `<app>-<function>` in lower case."""
    name = f"{app}-{function}".lower()
    if not NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a function's name: 1 to 63 of a to z, 0 to 9, _ and -")
    return name
