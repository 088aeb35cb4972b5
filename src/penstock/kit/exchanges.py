"""Long exchanges with clients: one whose credential is revoked ends within seconds.

Only waiting for the client is ended, never work of the server. The check every `CHECK_EVERY_S` and the authenticator's
memory (2 s) sum up to less than five seconds, even when every hint is lost.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from penstock.kit.caller import Caller
from penstock.kit.errors import Unauthenticated
from penstock.kit.telemetry import logger

T = TypeVar("T")

CHECK_EVERY_S: Final = 1.0

_log = logger(__name__)


class Exchange:
    """One request and its answer. `caller` is none until it is known, and for public routes."""

    __slots__ = ("_limits", "_whose", "revoked", "waited")

    def __init__(self, whose: Callable[[], Caller | None]) -> None:
        self._whose = whose
        self._limits: set[asyncio.Timeout] = set()
        self.revoked = False
        self.waited = False

    @property
    def caller(self) -> Caller | None:
        """The authenticated caller."""
        return self._whose()

    async def wait(self, step: Callable[[], Awaitable[T]]) -> T:
        """The client's next step; Unauthenticated if the credential is revoked before it is made."""
        self.waited = True
        if self.revoked:
            raise _revoked()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                return await step()
        except TimeoutError as error:
            if limit.expired():
                raise _revoked() from error
            raise
        finally:
            self._limits.discard(limit)

    def cut(self) -> None:
        """End the wait for the client, now and from now on."""
        self.revoked = True
        now = asyncio.get_running_loop().time()
        while self._limits:
            self._limits.pop().reschedule(now)


class Exchanges:
    """All exchanges of this process."""

    def __init__(self, still_valid: Callable[[Caller], Awaitable[bool]]) -> None:
        self._still_valid = still_valid
        self._live: set[Exchange] = set()

    @contextmanager
    def begin(self, whose: Callable[[], Caller | None]) -> Iterator[Exchange]:
        """One more, for as long as the context is entered."""
        exchange = Exchange(whose)
        self._live.add(exchange)
        try:
            yield exchange
        finally:
            self._live.discard(exchange)

    async def recheck(self) -> None:
        """Cut what has lost its right: one look per caller, however many exchanges they have."""
        waited = [(it, caller) for it in self._live if it.waited and (caller := it.caller) is not None]
        callers = list({caller for _, caller in waited})
        valid = await asyncio.gather(*map(self._still_valid, callers), return_exceptions=True)
        failed = [each for each in valid if isinstance(each, BaseException)]
        if failed:
            _log.warning("exchange_check_failed", callers=len(failed), error=repr(failed[0]))
        revoked = {caller for caller, right in zip(callers, valid, strict=True) if right is False}
        for exchange, caller in waited:
            if caller in revoked and not exchange.revoked:
                _log.info("exchange_cut", key_id=caller.key_id)
                exchange.cut()


def _revoked() -> Unauthenticated:
    return Unauthenticated("the credential was revoked meanwhile")
