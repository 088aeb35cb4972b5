"""Ties a description of an operation to the executor that runs it.

A method of a resource only describes; reading it from a resource of the blocking client gives a function, from one of
the asynchronous client a coroutine function, with the same arguments and types.
"""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from penstock.sdk.commands import Command, CommandResult
from penstock.sdk.outputs import Outputs, Said
from penstock.sdk.protocol import Listing, Steps
from penstock.sdk.sse import Follower
from penstock.sdk.transfers import Download
from penstock.wire.rest import EventOut

if TYPE_CHECKING:
    from penstock.sdk.asynchronous import AsyncExecutor
    from penstock.sdk.blocking import BlockingExecutor

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")
X = TypeVar("X", bound="BlockingExecutor | AsyncExecutor")


class Resource(Generic[X]):
    """Operations on one kind of object, run by one executor."""

    def __init__(self, executor: X) -> None:
        self.executor = executor


class _Described(Generic[P, D]):
    def __init__(self, describe: Callable[Concatenate[Any, P], D]) -> None:
        self._describe = describe
        self.__doc__ = describe.__doc__

    def _bind(self, resource: Resource[Any], run: Callable[[D], Any]) -> Callable[P, Any]:
        def bound(*args: P.args, **kwargs: P.kwargs) -> object:
            return run(self._describe(resource, *args, **kwargs))

        return functools.update_wrapper(bound, self._describe)


class operation(_Described[P, Steps[T]]):  # noqa: N801 - read as the decorator that it is
    """One request and its answer, or a few in turn."""

    @overload
    def __get__(self, resource: "Resource[BlockingExecutor]", owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, resource: "Resource[AsyncExecutor]", owner: type) -> Callable[P, Awaitable[T]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Callable[P, Any]:
        return self._bind(resource, resource.executor.run)


class listing(_Described[P, Listing[T]]):  # noqa: N801
    """An iterator over all items of a list."""

    @overload
    def __get__(self, resource: "Resource[BlockingExecutor]", owner: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, resource: "Resource[AsyncExecutor]", owner: type) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Callable[P, Any]:
        return self._bind(resource, resource.executor.items)


class stream(_Described[P, Follower]):  # noqa: N801
    """An endless iterator over live events."""

    @overload
    def __get__(self, resource: "Resource[BlockingExecutor]", owner: type) -> Callable[P, Iterator[EventOut]]: ...
    @overload
    def __get__(self, resource: "Resource[AsyncExecutor]", owner: type) -> Callable[P, AsyncIterator[EventOut]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Callable[P, Any]:
        return self._bind(resource, resource.executor.follow)


class outputs(_Described[P, Outputs]):  # noqa: N801
    """An iterator over what handlers say."""

    @overload
    def __get__(self, resource: "Resource[BlockingExecutor]", owner: type) -> Callable[P, Iterator[Said]]: ...
    @overload
    def __get__(self, resource: "Resource[AsyncExecutor]", owner: type) -> Callable[P, AsyncIterator[Said]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Callable[P, Any]:
        return self._bind(resource, resource.executor.outputs)


class download(_Described[P, Download]):  # noqa: N801
    """An iterator over the bytes of an object."""

    @overload
    def __get__(self, resource: "Resource[BlockingExecutor]", owner: type) -> Callable[P, Iterator[bytes]]: ...
    @overload
    def __get__(self, resource: "Resource[AsyncExecutor]", owner: type) -> Callable[P, AsyncIterator[bytes]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Callable[P, Any]:
        return self._bind(resource, resource.executor.download)


class command(_Described[P, Command]):  # noqa: N801
    """A command run in a unit."""

    @overload
    def __get__(self, resource: "Resource[BlockingExecutor]", owner: type) -> Callable[P, CommandResult]: ...
    @overload
    def __get__(self, resource: "Resource[AsyncExecutor]", owner: type) -> Callable[P, Awaitable[CommandResult]]: ...
    def __get__(self, resource: Resource[Any], owner: type) -> Callable[P, Any]:
        return self._bind(resource, resource.executor.execute)
