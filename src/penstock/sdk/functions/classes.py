"""Classes as functions: a worker makes one instance, runs its `enter` hooks once, and keeps it for all calls.

A class is one deployed function, `<app>-<class>`: its methods share workers, and with them what `enter` loaded. A
call names its method; plain callers may leave it out where there is only one.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.sdk.functions.errors import FunctionError
from penstock.sdk.functions.function import Function
from penstock.sdk.functions.options import Options

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__penstock_hook__"


def enter() -> Callable[[F], F]:
    """Run this method once in each worker, before its first call: load the model here."""
    return _marked("enter")


def exit() -> Callable[[F], F]:  # noqa: A001 - read as `penstock.exit`
    """Run this method when the worker ends in an orderly way."""
    return _marked("exit")


def method() -> Callable[[F], F]:
    """Calls may name this method."""
    return _marked("method")


def _marked(kind: str) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, kind)
        return function

    return mark


def marked(owner: type, kind: str) -> list[str]:
    """The methods with this mark, those of base classes first, in the order of the source."""
    found: dict[str, None] = {}
    for base in reversed(owner.__mro__):
        for name, member in vars(base).items():
            if getattr(member, _MARK, "") == kind:
                found[name] = None
    return list(found)


class Cls:
    """A class that is deployed. Its methods are functions: `Model().generate.remote(…)`."""

    def __init__(self, name: str, owner: type, options: Options, handler: str) -> None:
        self.name = name
        self.owner = owner
        self.options = options
        self.handler = handler
        self.methods = marked(owner, "method")
        self.__doc__ = owner.__doc__
        self._instance: list[Any] = []
        if not self.methods:
            raise ValueError(f"{owner.__name__} has no method to call: put @penstock.method() above one")

    def __call__(self) -> "Cls":
        """Reads as an instance; the workers make theirs without arguments too."""
        return self

    def __getattr__(self, name: str) -> Function:
        if name not in self.__dict__.get("methods", ()):
            raise AttributeError(f"{self.__dict__.get('name', 'the class')} has no @penstock.method() {name!r}")
        return Function(self.name, body=self._local(name), options=self.options, method=name, handler=self.handler)

    def _local(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._instance:
                self._instance.append(self._entered())
            return getattr(self._instance[0], name)(*args, **kwargs)

        return call

    def _entered(self) -> Any:
        instance = self.owner()
        for name in marked(self.owner, "enter"):
            done = getattr(instance, name)()
            if inspect.isawaitable(done):
                asyncio.run(_wait(done))
        return instance

    def chosen(self, name: str) -> str:
        """The method that a call means."""
        if name in self.methods:
            return name
        if not name and len(self.methods) == 1:
            return self.methods[0]
        known = ", ".join(self.methods)
        said = f"no method {name!r}" if name else "the call names no method"
        raise FunctionError(f'{said}; {self.name} has: {known}. Send {{"method": …, "args": […], "kwargs": {{…}}}}')


async def _wait(done: Any) -> None:
    await done
