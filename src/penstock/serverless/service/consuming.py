"""The loop of one consumer: messages are taken in batches, and each is settled once.

A message is settled when it was acknowledged, terminated or put back, or when somebody else has it in hand. A failure
of the database or of the queue says nothing of a message: the batch is held, and taken again soon. The server is told
that it is held, so that an outage of any length uses up no deliveries. A message that meets such a failure alone, while
others are taken, is at fault itself and is given up.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError, MsgAlreadyAckdError, OutboundBufferLimitError

from penstock.kit.bus import Bus
from penstock.kit.clock import backoff_s
from penstock.kit.errors import Unavailable
from penstock.kit.pull import InProgress, Pull
from penstock.kit.telemetry import logger
from penstock.serverless.service import burying

Take: TypeAlias = Callable[[Sequence[Msg]], Awaitable[None]]

BATCH_MAX: Final = 256
_log = logger(__name__)
#: Soon after an outage, and all consumers at about the same time: a heartbeat that is read long before the results of
#: its worker would make their attempts look lost.
_AGAIN_MAX_S: Final = 1.0
#: After so many failures of a batch its messages are taken one by one, beside others that have come meanwhile.
_TOGETHER_MAX: Final = 3
_OTHERS_S: Final = 0.1
#: Failures that are not about the message. `OSError` has the time-outs of all libraries.
_OUTAGES: Final = (Unavailable, OSError, ConnectionClosedError, OutboundBufferLimitError, MsgAlreadyAckdError)


class Consumer:
    """Takes what one durable consumer brings."""

    def __init__(self, bus: Bus, pull: Pull, progress: InProgress, take: Take) -> None:
        self._bus = bus
        self._pull = pull
        self._progress = progress
        self._take = take
        self._held: list[Msg] = []
        self._failures = 0

    async def turn(self) -> None:
        """Take the next batch, or the one that is held."""
        await self._fill()
        batch = list(self._held)
        try:
            await self._settle()
            self._failures = 0
        except _OUTAGES as error:
            self._failures += 1
            _log.warning("messages_held", subject=batch[0].subject, messages=len(self._held), error=repr(error))
            await asyncio.sleep(backoff_s(self._failures, cap_s=_AGAIN_MAX_S))
        finally:
            left = {id(message) for message in self._held}
            self._progress.let_go(*(message for message in batch if id(message) not in left))

    async def _fill(self) -> None:
        """Pull a batch. One that has failed often gets company, to see whether others fail too."""
        if not self._held:
            came = await self._pull.take(BATCH_MAX)
        elif self._failures >= _TOGETHER_MAX and len(self._held) < BATCH_MAX:
            came = []
            with suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_S):
                    came = await self._pull.take(BATCH_MAX - len(self._held))
        else:
            return
        self._held += came
        self._progress.hold(*came)

    async def _settle(self) -> None:
        try:
            await together(self._bus, self._held, self._take)
        except _OUTAGES:
            if self._failures < _TOGETHER_MAX:
                raise
            await self._apart()

    async def _apart(self) -> None:
        """Take each by itself. One that fails while the next is taken is given up; two in a row are an outage, and the
        first of them is put last."""
        suspect: tuple[Msg, Exception] | None = None
        for message in list(self._held):
            try:
                await self._take([message])
            except _OUTAGES as error:
                if suspect is not None:
                    self._drop(suspect[0])
                    self._held.append(suspect[0])
                    raise
                suspect = message, error
                continue
            self._drop(message)
            if suspect is not None:
                _log.warning("message_at_fault", subject=suspect[0].subject, error=repr(suspect[1]))
                self._drop(suspect[0])
                await burying.give_up(self._bus, *suspect)
                suspect = None
        if suspect is not None:
            raise suspect[1]

    def _drop(self, message: Msg) -> None:
        self._held = [each for each in self._held if each is not message]


async def together(bus: Bus, held: list[Msg], take: Take) -> None:
    """Take all at once; if that fails, each by itself, so that one that cannot be taken harms no other. It is given up
    after the others were taken. What is settled leaves `held`; an outage is raised."""
    held[:] = _unsettled(held)
    try:
        if held:
            await take(held)
        held.clear()
    except _OUTAGES:
        held[:] = _unsettled(held)
        raise
    except Exception as error:  # noqa: BLE001 (supervises one batch of a loop; what fails again is told)
        _log.info("batch_failed", messages=len(held), error=repr(error))
        held[:] = _unsettled(held)
        await _one_by_one(bus, held, take)


async def _one_by_one(bus: Bus, held: list[Msg], take: Take) -> None:
    failed: list[tuple[Msg, Exception]] = []
    batch = list(held)
    for number, message in enumerate(batch):
        held[:] = [*(each for each, _ in failed), *batch[number:]]
        try:
            await take([message])
        except _OUTAGES:
            raise
        except Exception as error:  # noqa: BLE001 (supervises one message of a loop; it is told, and comes again or is buried)
            _log.exception("message_failed", subject=message.subject)
            failed.append((message, error))
    for number, (message, error) in enumerate(failed, 1):
        # One that cannot be given up either comes again when its time is over.
        held[:] = [each for each, _ in failed[number:]]
        if not message.is_acked:
            await burying.give_up(bus, message, error)
    held.clear()


def _unsettled(messages: Sequence[Msg]) -> list[Msg]:
    return [message for message in messages if not message.is_acked]
