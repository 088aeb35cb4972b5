"""A durable consumer's messages, as many together as have come.

One inbox takes the answers to requests for `batch` messages that are always under way, so that nothing waits for being
asked for. Requests are made again when half is used up, when the server ends one, after a reconnect, and when the
server is silent although it promised to be heard. Only publish rights on the consumer's `MSG.NEXT` and acknowledge
subjects are needed. (nats-py's own `fetch(n)` waits until the batch is full or its time is over.)

Others of our account can have messages sent to any inbox: ours cannot be guessed, and what is no message of our
consumer is dropped. Messages that wait here to be taken are told to be in progress, so that none is delivered again for
the time that its turn takes.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import msgspec
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error

from penstock.kit.bus import Bus
from penstock.kit.clock import backoff_s
from penstock.kit.process import heed_cancellation
from penstock.kit.telemetry import logger
from penstock.wire import subjects

_NS: Final = 1_000_000_000
_HEARTBEAT_S: Final = 5.0
_SILENCE_S: Final = 12.0
_AGAIN_MAX_S: Final = 1.0
_BYTES_MAX: Final = 16 << 20
#: How the server says, with a status of failure, that a request for so many messages and bytes got all it asked for.
_SERVED: Final = ("Batch Completed", "Message Size Exceeds MaxBytes")
#: Well below the time that our consumers have for an acknowledgement.
IN_PROGRESS_EVERY_S: Final = 10.0

_log = logger(__name__)


class Pull:
    """Messages of one durable consumer. `ensure` makes stream and consumer again where they are gone."""

    def __init__(
        self,
        bus: Bus,
        *,
        stream: str,
        consumer: str,
        batch: int,
        ensure: Callable[[], Awaitable[None]] | None = None,
        expires_s: float = 30.0,
    ) -> None:
        self._bus = bus
        self._next = subjects.next_messages(stream, consumer)
        self._acks = subjects.acks(stream, consumer).removesuffix(">")
        self._batch = batch
        self._half = max(1, batch // 2)
        self._ensure = ensure
        self._expires_s = expires_s
        self._inbox = ""
        self._ready: deque[Msg] = deque()
        self._progress = InProgress()
        self._ready_bytes = 0
        self._arrived = asyncio.Event()
        self._look = asyncio.Event()
        #: What each request may still bring; the server serves the oldest first.
        self._asked: dict[str, int] = {}
        self._count = 0
        self._heard = 0.0
        self._failures = 0
        self._missing = False
        self._subscription: Subscription | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._bus.follow(self)
        await self._progress.__aenter__()
        await self.reconnected()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give back what nobody took, so that it is not missed until its time is over."""
        self._bus.unfollow(self)
        assert self._keeper is not None
        self._keeper.cancel()
        await asyncio.wait({self._keeper})
        await self.disconnected()
        await self._progress.__aexit__(kind, error, trace)
        with suppress(Error):
            for message in self._ready:
                await message.nak()

    async def take(self, most: int) -> list[Msg]:
        """At least one, and all that are there up to `most`, in order."""
        while not self._ready:
            self._arrived.clear()
            await self._arrived.wait()
        taken = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
        self._ready_bytes -= sum(len(message.data) for message in taken)
        self._progress.let_go(*taken)
        if self._room() >= self._half:
            self._look.set()
        return taken

    def _room(self) -> int:
        """How many more may be asked for; none while those that wait are large."""
        if self._ready_bytes >= _BYTES_MAX // 2:
            return 0
        return self._batch - len(self._ready) - sum(self._asked.values())

    async def _receive(self, message: Msg) -> None:
        self._heard = asyncio.get_running_loop().time()
        if message.reply.startswith(self._acks):
            self._failures = 0
            self._ready.append(message)
            self._ready_bytes += len(message.data)
            self._progress.hold(message)
            self._arrived.set()
            self._one_came()
        elif (status := (message.headers or {}).get("Status")) is not None:
            self._told(message, status)
        else:
            _log.warning("message_not_ours", subject=message.subject, consumer=self._next)

    def _one_came(self) -> None:
        oldest = next(iter(self._asked), None)
        if oldest is None:
            return
        self._asked[oldest] -= 1
        if self._asked[oldest] == 0:
            del self._asked[oldest]
        if self._room() >= self._half:
            self._look.set()

    def _told(self, message: Msg, status: str) -> None:
        """100 is a sign of life; all others end a request: because it was served or its time is over (`_SERVED`), or
        because something is wrong."""
        if status == "100":
            return
        self._asked.pop(message.subject[len(self._inbox) :], None)
        described = (message.headers or {}).get("Description", "")
        if status in ("404", "408") or described in _SERVED:
            self._failures = 0
        else:
            self._failures += 1
            self._missing = self._missing or status == "503" or "Deleted" in described
            _log.debug("pull_refused", consumer=self._next, status=status, why=described)
        self._look.set()

    async def disconnected(self) -> None:
        """Our requests died with the connection. The server sees that by their inbox, which therefore must not come
        back: it would take them for alive, and send messages into the void."""
        self._asked.clear()
        if self._subscription is not None:
            with suppress(Error):
                await self._subscription.unsubscribe()
            self._subscription = None

    async def reconnected(self) -> None:
        """Another inbox, and other requests."""
        await self.disconnected()
        self._inbox = f"{self._bus.client.new_inbox()}.{secrets.token_hex(12)}."
        self._subscription = await self._bus.client.subscribe(
            f"{self._inbox}*", cb=self._receive, pending_bytes_limit=8 * _BYTES_MAX
        )
        self._look.set()

    async def _keep(self) -> None:
        while True:
            try:
                await self._once()
            except Exception as error:  # noqa: BLE001 (the loop outlives servers that come and go)
                self._failures += 1
                self._look.set()
                _log.debug("pull_failed", consumer=self._next, error=repr(error))
            heed_cancellation()

    async def _once(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_S / 2):
                await self._look.wait()
        self._look.clear()
        if self._failures:
            await asyncio.sleep(min(backoff_s(self._failures), _AGAIN_MAX_S))
        if self._subscription is None or not self._bus.client.is_connected:
            return
        self._mind_silence()
        if self._missing and self._ensure is not None:
            await self._ensure()
        self._missing = False
        if (room := self._room()) >= self._half:
            await self._ask(room)

    def _mind_silence(self) -> None:
        if self._asked and asyncio.get_running_loop().time() - self._heard > _SILENCE_S:
            _log.debug("pull_silent", consumer=self._next)
            self._asked.clear()
            self._missing = True

    async def _ask(self, number: int) -> None:
        self._count += 1
        token = str(self._count)
        if not self._asked:
            self._heard = asyncio.get_running_loop().time()
        self._asked[token] = number
        request = {
            "batch": number,
            "max_bytes": _BYTES_MAX,
            "expires": int(self._expires_s * _NS),
            "idle_heartbeat": int(min(_HEARTBEAT_S, self._expires_s / 3) * _NS),
        }
        await self._bus.client.publish(self._next, msgspec.json.encode(request), reply=f"{self._inbox}{token}")


class InProgress:
    """Tells the server of messages that take long that they are still being worked on."""

    def __init__(self, every_s: float | None = None) -> None:
        self._every_s = every_s or IN_PROGRESS_EVERY_S
        self._held: dict[str, Msg] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.get_running_loop().create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})

    def hold(self, *messages: Msg) -> None:
        """From now on."""
        for message in messages:
            self._held[message.reply] = message

    def let_go(self, *messages: Msg) -> None:
        """They are done, given up, or held by somebody else: call it before the acknowledgement."""
        for message in messages:
            self._held.pop(message.reply, None)

    async def run(self) -> None:
        """For ever, every few seconds."""
        while True:
            await asyncio.sleep(self._every_s)
            for message in list(self._held.values()):
                with suppress(Error):
                    await message.in_progress()
                heed_cancellation()
