"""What a handler may ask and say about the invocation that it runs for.

Who that is stands in a context variable, so that threads and tasks that copy their context know it too. In other
threads it is the one invocation that runs, if there is only one.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.sdk.functions.errors import FunctionError


@dataclass(eq=False, repr=False)
class Invocation:
    """The invocation as the platform described it."""

    id: str
    function: str
    attempt: int
    mode: str
    timeout_s: float
    content_type: str
    worker: str = ""
    headers: "Mapping[str, str]" = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    attributes: "Mapping[str, str]" = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]


class Running(Protocol):
    """An invocation that runs in this process."""

    @property
    def invocation(self) -> Invocation:
        """What it is."""
        ...

    def progress(self, report: Any) -> None:
        """Say how far it is."""
        ...


current: "ContextVar[Running | None]" = ContextVar("penstock_invocation", default=None)
#: Set by the framework: the one that runs, if there is only one.
_sole: "list[Callable[[], Running | None]]" = []


def running() -> "Running | None":
    """Whose code this is."""
    return current.get() or (_sole[0]() if _sole else None)


def know_sole(find: "Callable[[], Running | None]") -> None:
    """The framework says how to find the one invocation of code without a context."""
    _sole[:] = [find]


def current_invocation() -> Invocation:
    """The invocation that this code runs for; FunctionError where there is none."""
    found = running()
    if found is None:
        raise FunctionError("this code does not run for an invocation")
    return found.invocation


def progress(done: float, total: "float | None" = None, message: str = "") -> None:
    """Tell whoever follows how far this invocation is; nothing happens where there is none, as in a local call."""
    found = running()
    if found is not None:
        found.progress({"done": done, "total": total, "message": message})
