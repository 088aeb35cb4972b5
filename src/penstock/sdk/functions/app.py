"""An app: the functions and classes of a file that are deployed together, each as `<app>-<function>`."""

from collections.abc import Callable, Iterator
from typing import Any

from penstock.sdk.functions.classes import Cls
from penstock.sdk.functions.function import Function
from penstock.sdk.functions.imports import Imports
from penstock.sdk.functions.options import Options, deployed_name

#: How the names of functions end while somebody works on them, beside those that are deployed for good.
DEVELOPMENT = "-dev"


class App:
    """Collects what is decorated.

    >>> app = penstock.App("images")
    >>> @app.function(sku="g1.1")
    ... def resize(url: str, width: int = 512) -> str: ...
    """

    def __init__(self, name: str) -> None:
        deployed_name(name, "x")
        self.name = name.lower()
        self._deployed: dict[str, Function | Cls] = {}

    def function(self, *, name: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Function]:
        """Make a function of the one below. The options are those of `Options`; only `sku` is needed."""
        checked = _options(options)

        def decorate(body: Callable[..., Any]) -> Function:
            handler = _handler(body)
            made = Function(
                deployed_name(self.name, name or body.__name__), body=body, options=checked, handler=handler
            )
            self._add(made)
            return made

        return decorate

    def cls(self, *, name: str | None = None, **options: Any) -> Callable[[type], Cls]:
        """Make one function of the class below, with a method for each `@penstock.method()`."""
        checked = _options(options)

        def decorate(owner: type) -> Cls:
            made = Cls(deployed_name(self.name, name or owner.__name__), owner, checked, _handler(owner))
            self._add(made)
            return made

        return decorate

    def imports(self) -> Imports:
        """A block of imports of packages that only the unit has.

        >>> with app.imports():
        ...     import numpy as np
        """
        return Imports()

    def develop(self) -> None:
        """Mean the functions that are deployed under names for development when they are called."""
        for made in self:
            made.name += DEVELOPMENT

    def _add(self, made: Function | Cls) -> None:
        if made.name in self._deployed:
            raise ValueError(f"{made.name} is there already: give one of them another name=")
        self._deployed[made.name] = made

    def __iter__(self) -> Iterator[Function | Cls]:
        """Everything that is deployed."""
        return iter(self._deployed.values())

    def __len__(self) -> int:
        return len(self._deployed)

    def __repr__(self) -> str:
        return f"<penstock app {self.name}: {', '.join(self._deployed)}>"


def _options(given: dict[str, Any]) -> Options:
    try:
        return Options(**given)
    except TypeError as error:
        raise TypeError(f"@app.function: {str(error).partition(') ')[2] or error}") from None


def _handler(body: Any) -> str:
    """Where a worker finds it. It must stand at the top of its file."""
    if not callable(body) or "<locals>" in getattr(body, "__qualname__", "<locals>"):
        raise ValueError(f"{body!r} must be a function or class at the top level of a file")
    return f"{body.__module__}:{body.__qualname__}"
