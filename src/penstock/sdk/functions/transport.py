"""How calls of functions travel: inside a unit through the sidecar, elsewhere over HTTP. Whoever knows sets the way."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penstock.sdk.functions.errors import FunctionError
from penstock.sdk.functions.values import Payload

if TYPE_CHECKING:
    from penstock.sdk.functions.objects import Way


@dataclass(eq=False, repr=False)
class Answer:
    """How an invocation ended, before anybody made a value or an exception of it."""

    invocation_id: str
    state: str
    content_type: str = "application/json"
    body: Any = None
    encoding: str = ""
    failure_class: str = ""
    error: str = ""
    error_type: str = ""
    traceback: str = ""


class Transport(Protocol):
    """A way to the functions of a project."""

    def call(self, function: str, payload: Payload, timeout_s: "float | None") -> Answer:
        """Invoke and wait for the end."""
        ...

    async def call_async(self, function: str, payload: Payload, timeout_s: "float | None") -> Answer:
        """The same, without blocking the loop."""
        ...

    def spawn(self, function: str, payload: Payload) -> str:
        """Invoke and go on: the invocation's id."""
        ...

    def wait(self, invocation_id: str, timeout_s: "float | None") -> Answer:
        """The end of an invocation; ResultTimeout when it does not come in time."""
        ...

    def status(self, invocation_id: str) -> str:
        """The state of an invocation."""
        ...

    def cancel(self, invocation_id: str) -> None:
        """It is not wanted any more."""
        ...

    def map(self, function: str, payloads: "Iterable[Payload]", *, ordered: bool) -> "Iterator[Answer]":
        """Invoke once for each payload, a bounded number at a time."""
        ...

    def stream(self, function: str, payload: Payload) -> "Iterator[Any]":
        """The chunks as they come; the last item is the Answer."""
        ...

    def objects(self) -> "Way":
        """The way to the project's objects."""
        ...


_way: list[Callable[[], Transport]] = []
_otherwise: list[Callable[[], object]] = []


def use(connect: Callable[[], Transport]) -> None:
    """From now on, calls go this way."""
    _way[:] = [connect]


def otherwise(choose: Callable[[], object]) -> None:
    """When a call is made and no way is set, this is asked to set one."""
    _otherwise[:] = [choose]


def transport() -> Transport:
    """The way that calls go from here."""
    if not _way:
        for choose in _otherwise:
            choose()
    if not _way:
        raise FunctionError("there is no way to call functions from here: use penstock.connect(client)")
    return _way[0]()
