"""Messages for JetStream: refused before they leave when they are wrong, and kept only when the stream says so.

Every message has an id, under which the stream drops repeats. What the server would answer by closing the connection (a
message too large) or by taking for its own command (a line break in a header) never reaches it.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping
from typing import Final, TypeAlias

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error

from penstock.kit.errors import Invalid, Unavailable
from penstock.wire.unreadable import UNREADABLE

ACK_TIMEOUT_S: Final = 5.0
_PENDING_MAX: Final = 4096
_MSG_ID: Final = "Nats-Msg-Id"
_TTL: Final = "Nats-TTL"
_GOOD_ID: Final = re.compile(r"[!-~]{1,255}")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
_HEADER_START_BYTES: Final = len(b"NATS/1.0\r\n\r\n")
_HEADER_LINE_BYTES: Final = len(b": \r\n")
#: JetStream's numbers for refusals.
_TOO_LARGE_FOR_STREAM: Final = 10054
FULL_FOR_SUBJECT: Final = 10077


class BadMessage(Invalid):
    """It cannot be sent as it is."""

    code = "bad_message"


class MessageTooLarge(BadMessage):
    """The server takes no message of that size."""

    code = "message_too_large"


class NotStored(Unavailable):
    """The stream did not say that it has the message; under the same id it can be sent again."""

    code = "not_stored"

    @property
    def refusal(self) -> int:
        """JetStream's own number for why; 0 when it did not answer."""
        number = self.context.get("refusal", 0)
        return number if isinstance(number, int) else 0


class Refusal(msgspec.Struct, frozen=True):
    """Why a stream did not take it."""

    description: str = ""
    err_code: int = 0


class PubAck(msgspec.Struct, frozen=True):
    """Where the message is. `duplicate`: it was there before."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: Refusal | None = None


Acknowledged: TypeAlias = "asyncio.Future[PubAck]"


class Publisher:
    """Publishes on one connection, any number at a time up to a bound, and waits for each one's acknowledgement."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting: dict[str, tuple[Acknowledged, asyncio.TimerHandle]] = {}
        self._room = asyncio.Semaphore(_PENDING_MAX)
        self._decode = msgspec.json.Decoder(PubAck).decode
        self._inbox = ""
        self._count = 0

    async def send(
        self, subject: str, body: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None, ttl_s: int = 0
    ) -> Acknowledged:
        """Written to the connection; the future says where it is kept, or raises NotStored. A message with `ttl_s`
        leaves its stream by itself, where that allows it."""
        lines = checked(body, msg_id, headers or {}, self._client.max_payload)
        if ttl_s:
            lines[_TTL] = f"{ttl_s}s"
        await self._room.acquire()
        token, future = self._expect()
        try:
            inbox = self._inbox or await self._subscribe()
            await self._client.publish(subject, body, reply=f"{inbox}{token}", headers=lines)
        except (Error, OSError) as error:
            self._settle(token, NotStored("the message could not be sent", error=repr(error)))
        except BaseException:
            self._settle(token, None)
            raise
        return future

    def _expect(self) -> tuple[str, Acknowledged]:
        loop = asyncio.get_running_loop()
        self._count += 1
        token = str(self._count)
        future: Acknowledged = loop.create_future()
        silent = NotStored("the stream did not answer in time")
        self._waiting[token] = future, loop.call_later(ACK_TIMEOUT_S, self._settle, token, silent)
        return token, future

    async def _subscribe(self) -> str:
        """An inbox that nobody can guess: others in our account could answer in the stream's place."""
        self._inbox = f"{self._client.new_inbox()}.{secrets.token_hex(12)}."
        await self._client.subscribe(f"{self._inbox}*", cb=self._acknowledged, pending_msgs_limit=4 * _PENDING_MAX)
        return self._inbox

    async def _acknowledged(self, message: Msg) -> None:
        self._settle(message.subject[len(self._inbox) :], self._outcome(message))

    def _outcome(self, message: Msg) -> "PubAck | NotStored | MessageTooLarge":
        if not message.data:
            return NotStored("no stream takes this subject")
        try:
            ack = self._decode(message.data)
        except UNREADABLE:
            return NotStored("the stream's answer is none")
        if ack.error is None:
            return ack
        if ack.error.err_code == _TOO_LARGE_FOR_STREAM:
            return MessageTooLarge("the message is over the stream's limit", field="body")
        return NotStored(f"the stream refused the message: {ack.error.description}", refusal=ack.error.err_code)

    def _settle(self, token: str, outcome: "PubAck | NotStored | MessageTooLarge | None") -> None:
        waiting = self._waiting.pop(token, None)
        if waiting is None:
            return
        future, timer = waiting
        timer.cancel()
        self._room.release()
        if future.done():
            return
        if isinstance(outcome, PubAck):
            future.set_result(outcome)
        elif outcome is None:
            future.cancel()
        else:
            future.set_exception(outcome)


def checked(body: bytes, msg_id: str, headers: Mapping[str, str], bytes_max: int) -> dict[str, str]:
    """The headers to send, or why the message cannot be sent."""
    if not msg_id:
        raise BadMessage(f"a message needs a {_MSG_ID}", field=_MSG_ID)
    if not _GOOD_ID.fullmatch(msg_id):
        raise BadMessage(f"{_MSG_ID} must be 1 to 255 visible ASCII characters", field=_MSG_ID)
    for name, value in headers.items():
        if name.lower().startswith("nats-") or _CONTROL.search(name) or _CONTROL.search(value):
            raise BadMessage("a header has a control character, or a name that is the server's own", field=name)
    lines = {_MSG_ID: msg_id, **headers}
    size = len(body) + _HEADER_START_BYTES
    size += sum(_HEADER_LINE_BYTES + len(name.encode()) + len(value.encode()) for name, value in lines.items())
    if size > bytes_max:
        raise MessageTooLarge(f"a message of {size} bytes is over the server's limit of {bytes_max}", field="body")
    return lines
