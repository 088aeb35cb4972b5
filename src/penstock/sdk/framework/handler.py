"""The tenant's handler: found, made ready once, and given its arguments.

A plain payload that is an object whose names fit the handler's parameters is taken as keyword arguments; null for a
handler that needs none is no argument; anything else is the one positional argument.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

from penstock.sdk.functions import values
from penstock.sdk.functions.app import DEVELOPMENT, App
from penstock.sdk.functions.classes import Cls, marked
from penstock.sdk.functions.function import Function

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Target:
    """Something that can be called. `on_loop`: it is asynchronous."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        on_loop: bool,
        names: frozenset[str],
        required: frozenset[str],
        any_names: bool,
    ) -> None:
        self.function = function
        self.on_loop = on_loop
        self._names = names
        self._required = required
        self._any_names = any_names

    def arguments(self, payload: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """How a plain payload is handed over."""
        if isinstance(payload, dict) and self._fits(payload):
            return (), payload
        if payload is None and not self._required:
            return (), {}
        return (payload,), {}

    def _fits(self, payload: dict[str, Any]) -> bool:
        return payload.keys() >= self._required and (self._any_names or payload.keys() <= self._names)


class Bound:
    """A call that is ready to be made."""

    __slots__ = ("_args", "_kwargs", "sdk", "target")

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], *, sdk: bool) -> None:
        self.target = target
        self.sdk = sdk
        self._args = args
        self._kwargs = kwargs

    def __call__(self) -> Any:
        """Make it."""
        return self.target.function(*self._args, **self._kwargs)


class Handler:
    """What `PENSTOCK_HANDLER` names; nothing answers with what it was given."""

    def __init__(self) -> None:
        self._module = ""
        self._targets: dict[str, Target] = {"": target(_echo)}
        self._class: Cls | None = None
        self._exits: list[Callable[[], Any]] = []

    async def load(self, name: str, deployed: str = "") -> None:
        """Import it, make the instance of a class and run its hooks. Whatever it raises is the tenant's. `deployed` is
        the name that it has in the project."""
        self._module, _, path = name.partition(":")
        # Not importlib's function, whose frames a tenant would see in its traceback.
        __import__(self._module)
        found: Any = sys.modules[self._module]
        for part in path.split("."):
            found = getattr(found, part)
        if isinstance(found, (Function, Cls)) and deployed == found.name + DEVELOPMENT:
            _develop(vars(sys.modules[self._module]))
        if isinstance(found, Cls):
            await self._enter(found)
        else:
            self._targets = {"": target(found.body if isinstance(found, Function) else found)}

    async def _enter(self, owner: Cls) -> None:
        instance = owner.owner()
        for hook in marked(owner.owner, "enter"):
            await _settled(getattr(instance, hook)())
        self._exits = [getattr(instance, hook) for hook in marked(owner.owner, "exit")]
        self._targets = {name: target(getattr(instance, name)) for name in owner.methods}
        self._class = owner

    async def leave(self) -> None:
        """Run the hooks for the end."""
        for hook in self._exits:
            await _settled(await asyncio.get_running_loop().run_in_executor(None, hook))

    def bind(self, content_type: str, payload: Any) -> Bound:
        """The call that a payload asks for."""
        methods = self._class.methods if self._class else ()
        call = values.decode_call(content_type, payload, self._module, methods) if self._module else None
        asked = call.method if call else _misnamed(payload) if len(methods) > 1 else ""
        chosen = self._targets[self._class.chosen(asked) if self._class else ""]
        if call is None:
            args, kwargs = chosen.arguments(payload)
            return Bound(chosen, args, kwargs, sdk=False)
        return Bound(chosen, call.args, call.kwargs, sdk=call.sdk)


def _develop(names: "dict[str, Any]") -> None:
    """Apps of a file that is served for development call one another, not what is deployed for good."""
    for app in {id(value): value for value in names.values() if isinstance(value, App)}.values():
        app.develop()


def _misnamed(payload: Any) -> str:
    """The method that a payload asks for in vain, so that it is told of by its name."""
    name = cast("dict[str, Any]", payload).get("method") if isinstance(payload, dict) else None
    return name if isinstance(name, str) else ""


async def _settled(done: Any) -> Any:
    return await done if inspect.isawaitable(done) else done


def target(function: Any) -> Target:
    """What there is to know about a callable before it is called."""
    if not callable(function):
        raise TypeError(f"the handler is {type(function).__name__}, which cannot be called")
    kind: Any = function if inspect.isroutine(function) else type(function).__call__
    on_loop = inspect.iscoroutinefunction(kind) or inspect.isasyncgenfunction(kind)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Of some builtins nothing is known: they get the payload as it is.
        return Target(function, on_loop=on_loop, names=frozenset(), required=frozenset({"?"}), any_names=False)
    empty = inspect.Parameter.empty
    fixed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return Target(
        function,
        on_loop=on_loop,
        names=frozenset(item.name for item in parameters if item.kind in _NAMED),
        required=frozenset(item.name for item in parameters if item.default is empty and item.kind not in fixed),
        any_names=any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters),
    )


def _echo(payload: Any, /) -> Any:
    return payload


def put_first(folder: str) -> None:
    """The tenant's modules come before ours."""
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
