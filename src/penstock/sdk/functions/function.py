"""A function that can be called here (`local`) and where it is deployed (`remote`, `spawn`, `map`, `stream`).

Every verb has a twin to be awaited: `await f.remote.aio(…)`. Inside a unit that is a call without a thread; elsewhere
the blocking call runs in a thread of a bounded pool.
"""

import asyncio
import concurrent.futures
import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

from penstock.sdk.functions import outcome, values
from penstock.sdk.functions.errors import FunctionError
from penstock.sdk.functions.options import NAME, Options
from penstock.sdk.functions.transport import Answer, Transport, transport

P = ParamSpec("P")
R = TypeVar("R")

_THREADS_MAX = 64
_END = object()
_pool: list[concurrent.futures.ThreadPoolExecutor] = []


class Function:
    """A function by its deployed name, wherever its code is."""

    def __init__(
        self,
        name: str,
        *,
        body: Callable[..., Any] | None = None,
        options: Options | None = None,
        method: str = "",
        handler: str = "",
    ) -> None:
        self.name = name
        self.body = body
        self.options = options
        self.method = method
        #: `module:name` in the code that is deployed.
        self.handler = handler
        self.__doc__ = body.__doc__ if body is not None else None

    @classmethod
    def lookup(cls, name: str, *, method: str = "") -> "Function":
        """A function that is deployed, by its name, such as `images-resize`; of a class, with the method."""
        lowered = name.lower()
        if not NAME.fullmatch(lowered):
            raise FunctionError(f"{name!r} is no function's name: 1 to 63 of a to z, 0 to 9, _ and -")
        return cls(lowered, method=method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Here and now, as if it were not decorated."""
        return self.local(*args, **kwargs)

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code in this process."""
        if self.body is None:
            raise FunctionError(f"the code of {self.name} is not here; use remote()")
        return self.body(*args, **kwargs)

    @property
    def remote(self) -> "Verb":
        """Call it where it is deployed and wait for the result."""
        return Verb(self._remote, self._remote_async)

    @property
    def spawn(self) -> "Verb":
        """Call it and go on; gives a FunctionCall."""
        return Verb(self._spawn, threaded(self._spawn))

    @property
    def map(self) -> "Series":
        """Call it once for each item of an iterable; gives an iterator of results."""
        return Series(self._map)

    @property
    def stream(self) -> "Series":
        """Call a generator and get what it yields as it comes."""
        return Series(self._stream)

    @property
    def module(self) -> str:
        """Where the handler's classes are."""
        return self.handler.partition(":")[0]

    def __repr__(self) -> str:
        return f"<penstock function {self.name}{'.' + self.method if self.method else ''}>"

    def _payload(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> values.Payload:
        return values.encode_call(args, kwargs, self.method)

    def _remote(self, *args: Any, **kwargs: Any) -> Any:
        return outcome.value(transport().call(self.name, self._payload(args, kwargs), None), self.module)

    async def _remote_async(self, *args: Any, **kwargs: Any) -> Any:
        answer = await transport().call_async(self.name, self._payload(args, kwargs), None)
        return outcome.value(answer, self.module)

    def _spawn(self, *args: Any, **kwargs: Any) -> "FunctionCall":
        way = transport()
        return FunctionCall(way.spawn(self.name, self._payload(args, kwargs)), way=way, module=self.module)

    def _map(self, items: Iterable[Any], *, return_exceptions: bool = False, ordered: bool = True) -> Iterator[Any]:
        payloads = (self._payload((item,), {}) for item in items)
        for answer in transport().map(self.name, payloads, ordered=ordered):
            if answer.state != "succeeded" and return_exceptions:
                yield outcome.failure(answer, self.module)
            else:
                yield outcome.value(answer, self.module)

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for item in transport().stream(self.name, self._payload(args, kwargs)):
            if isinstance(item, Answer):
                outcome.value(item, self.module)
                return
            yield values.decode_chunk(item, self.module)


class Verb:
    """A way to call, and its twin to be awaited."""

    def __init__(self, blocking: Callable[..., Any], awaited: Callable[..., Awaitable[Any]]) -> None:
        self._blocking = blocking
        self.aio = awaited

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Block until it is done."""
        return self._blocking(*args, **kwargs)


class Series:
    """A way to call that gives many values, and its twin for `async for`."""

    def __init__(self, blocking: Callable[..., Iterator[Any]]) -> None:
        self._blocking = blocking

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Block for each value."""
        return self._blocking(*args, **kwargs)

    async def aio(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The values, to be awaited one by one."""
        iterator = self._blocking(*args, **kwargs)
        while (item := await in_thread(next, iterator, _END)) is not _END:
            yield item


class FunctionCall:
    """An invocation that was spawned."""

    def __init__(self, invocation_id: str, *, way: Transport | None = None, module: str = "") -> None:
        self.id = invocation_id
        self._way = way
        self._module = module

    @classmethod
    def from_id(cls, invocation_id: str) -> "FunctionCall":
        """An invocation that was spawned elsewhere."""
        return cls(invocation_id)

    @property
    def get(self) -> Verb:
        """The result; `get(timeout)` raises ResultTimeout after so many seconds."""
        return Verb(self._get, threaded(self._get))

    @property
    def status(self) -> Verb:
        """The state, such as `running`."""
        return Verb(self._status, threaded(self._status))

    @property
    def cancel(self) -> Verb:
        """Stop it, in whatever phase it is."""
        return Verb(self._cancel, threaded(self._cancel))

    def __repr__(self) -> str:
        return f"<penstock call {self.id}>"

    def _get(self, timeout: float | None = None) -> Any:
        return outcome.value((self._way or transport()).wait(self.id, timeout), self._module)

    def _status(self) -> str:
        return (self._way or transport()).status(self.id)

    def _cancel(self) -> None:
        (self._way or transport()).cancel(self.id)


def threaded(blocking: Callable[P, R]) -> Callable[P, Awaitable[R]]:
    """The same to be awaited, in a thread of the pool."""

    async def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return await in_thread(lambda: blocking(*args, **kwargs))

    return run


async def in_thread(blocking: Callable[..., R], *args: Any) -> R:
    """Run it in a thread of the pool, with the caller's context."""
    if not _pool:
        _pool.append(concurrent.futures.ThreadPoolExecutor(_THREADS_MAX, "penstock-calls"))
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_pool[0], lambda: context.run(blocking, *args))
